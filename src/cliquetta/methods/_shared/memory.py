"""What a method remembers: named tensors of fixed shape with a defined start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cliquetta.errors import UserError


class Memory:
    """Named tensors that know their start values, so that reset and restore need no code.

    >>> memory = Memory()
    >>> memory.declare("count", torch.zeros(()))
    >>> memory["count"] = memory["count"] + 1
    >>> memory.reset(); float(memory["count"])
    0.0
    """

    def __init__(self) -> None:
        self._start: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}

    def declare(self, name: str, start: Tensor) -> None:
        """Add a tensor; its shape, dtype and device stay fixed from here on."""
        if name in self._start:
            raise KeyError(f"memory already holds {name!r}")
        self._start[name] = start.detach().clone()
        self._now[name] = start.detach().clone()

    def __getitem__(self, name: str) -> Tensor:
        return self._now[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        start = self._start[name]
        if value.shape != start.shape or value.dtype != start.dtype:
            raise UserError(
                f"memory {name!r} holds {tuple(start.shape)} {start.dtype}, "
                f"got {tuple(value.shape)} {value.dtype}"
            )
        self._now[name] = value.detach()

    def __contains__(self, name: str) -> bool:
        return name in self._now

    def __iter__(self) -> Iterator[str]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)

    def reset(self) -> None:
        """Back to the start values."""
        self._now = {name: start.clone() for name, start in self._start.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all tensors."""
        return {name: value.clone() for name, value in self._now.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over ``state`` whole, or raise and keep everything as it was."""
        missing, extra = self._start.keys() - state.keys(), state.keys() - self._start.keys()
        if missing or extra:
            raise UserError(
                f"state does not fit: missing {sorted(missing)}, unknown {sorted(extra)}; it was "
                "saved by another method or version"
            )
        taken = {}
        for name, start in self._start.items():
            value = state[name]
            if value.shape != start.shape or value.dtype != start.dtype:
                raise UserError(
                    f"state {name!r} is {tuple(value.shape)} {value.dtype}, this adapter keeps "
                    f"{tuple(start.shape)} {start.dtype}; it was saved with other classes or config"
                )
            taken[name] = value.to(start.device, copy=True)
        self._now = taken

    def generator(self, name: str) -> torch.Generator:
        """A CPU generator in the remembered state ``name``; store it back with :meth:`keep`."""
        generator = torch.Generator()
        generator.set_state(self._now[name].cpu())
        return generator

    def keep(self, name: str, generator: torch.Generator) -> None:
        """Remember where ``generator`` stands."""
        self._now[name] = generator.get_state()
