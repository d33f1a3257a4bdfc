"""The memory of a method: named tensors of fixed shape with a defined start."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.tensor_tree import items

MOST_COUNTED = 2**48
"""Numbers of a state that are larger than this are refused."""


@dataclass(frozen=True)
class Range:
    """Numbers that a method can have written; a state with others is refused."""

    least: float = -MOST_COUNTED
    below: float = MOST_COUNTED
    unit: bool = False
    """Rows have length one, or are zero where nothing was stored yet."""
    diagonal: bool = False
    """Only the diagonals of matrices are compared with ``least``."""


ANY = Range()
NON_NEGATIVE = Range(least=-1e-3)
"""Counts, entropies and sums of squares; rounding may leave one just below zero."""
VARIANCE = Range(least=-1e-3, diagonal=True)  # Covariance matrices (..., E, E).
# Vectors no longer than one: unit vectors and their means.
SHORT = Range(least=-2, below=2)
UNIT = Range(least=-2, below=2, unit=True)
_UNIT_ROUNDING = 2**-6
"""How far from one a length may be: twice the rounding of bfloat16."""


def all_finite(values: Iterable[Tensor]) -> bool:
    """Return whether all numbers of some tensors are finite; a GPU is asked once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if value.is_floating_point() and value.numel() > 0:
            by_device.setdefault(value.device, []).append(value.detach())
    for tensors in by_device.values():
        # One number that is not finite if any of theirs is not.
        if len(tensors) > 1:
            largest = torch._foreach_norm(tensors, torch.inf)
            witness = torch.stack(largest).max()
        else:
            (only,) = tensors
            witness = only.sum(dtype=torch.promote_types(only.dtype, torch.float32))
        if not math.isfinite(witness):
            return False
    return True


class Memory:
    """Named tensors that know their start: reset and restore need no code.

    >>> memory = Memory()
    >>> memory.declare("count", torch.zeros(()))
    >>> memory["count"] = memory["count"] + 1
    >>> memory.reset(); float(memory["count"])
    0.0
    """

    def __init__(self) -> None:
        self._start: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}
        # The numbers that a loaded state may have.
        self._ranges: dict[str, Range] = {}
        # Names of tensors in which infinity means "empty".
        self._open: set[str] = set()

    def declare(self, name: str, start: Tensor, values: Range = ANY) -> None:
        """Add a tensor; its shape, dtype and device stay fixed from here on.

        A loaded state with numbers outside of ``values`` is refused. Integers are not
        negative unless the start is, and only where the start is infinite may later
        values be.
        """
        if name in self._start:
            raise KeyError(f"memory already holds {name!r}")
        # torch.clone, which AllocationLimit counts.
        self._start[name] = torch.clone(start.detach())
        self._now[name] = torch.clone(start.detach())
        self._ranges[name] = values

        # Infinity at the start means "empty".
        has_numbers = start.is_floating_point() and start.numel() > 0
        if has_numbers and start.amax() == torch.inf:
            self._open.add(name)

    def declare_tree(self, start: Any, ranges: Mapping[str, Range]) -> None:
        """Add the tensors of a tree by their paths; ``ranges`` go by path endings."""
        for path, value in items(start):
            allowed = ANY
            for ending, values in ranges.items():
                if path.endswith(ending):
                    allowed = values
                    break
            self.declare(path, value, allowed)

    def store_tree(self, tree: Any) -> None:
        """Replace the tensors of a tree that differ from before."""
        for path, value in items(tree):
            if value is not self._now[path]:
                self[path] = value

    def __getitem__(self, name: str) -> Tensor:
        return self._now[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        start = self._start[name]
        fits = value.shape == start.shape and value.dtype == start.dtype
        if not fits:
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
        """Go back to the start values."""
        self._now = {name: start.clone() for name, start in self._start.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Copy all tensors."""
        return {name: value.clone() for name, value in self._now.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state, or raise and keep everything as it was."""
        missing = self._start.keys() - state.keys()
        extra = state.keys() - self._start.keys()
        if missing or extra:
            raise UserError(
                f"state does not fit: missing {sorted(missing)}, unknown {sorted(extra)}; it was "
                "saved by another method or version"
            )

        # All of them are checked before the first is taken over.
        loaded = {}
        for name, start in self._start.items():
            value = state[name]
            fits = value.shape == start.shape and value.dtype == start.dtype
            if not fits:
                raise UserError(
                    f"state {name!r} is {tuple(value.shape)} {value.dtype}, this adapter keeps "
                    f"{tuple(start.shape)} {start.dtype}; it was saved with other classes or config"
                )
            self._refuse_values(name, value)
            loaded[name] = value.to(start.device, copy=True)
        self._now = loaded

    def _refuse_values(self, name: str, value: Tensor) -> None:
        """Refuse numbers of a state that no method can have written."""
        if value.numel() == 0 or value.dtype in _BITS:
            return
        values = self._ranges[name]
        closed = self._closed(name, value)

        # The least that is allowed: of counters it follows from the start.
        least = values.least
        if not value.is_floating_point():
            least = min(0, int(self._start[name].min()))
        elif not all_finite([closed]):
            raise UserError(
                f"state {name!r} holds numbers that are not finite: it is damaged, or was saved by "
                "a run that diverged; start without it"
            )

        # Both ends of the range.
        bounded = closed.diagonal(dim1=-2, dim2=-1) if values.diagonal else closed
        low = float(bounded.min())
        high = float(closed.max())
        if low < least or high >= values.below or float(closed.min()) < -MOST_COUNTED:
            raise UserError(
                f"state {name!r} holds {low if low < least else high:g}, outside of {least:g} to "
                f"{values.below:g}: it is damaged; start without it"
            )

        # Unit vectors; zero is an empty slot.
        if values.unit:
            length = closed.double().norm(dim=-1)
            is_off = (length - 1).abs() > _UNIT_ROUNDING
            if bool((is_off & (length > 0)).any()):
                raise UserError(
                    f"state {name!r} holds vectors whose length is not one: it is damaged; start "
                    "without it"
                )

    def snapshot(self) -> dict[str, Tensor]:
        """List the tensors for :meth:`restore`; methods never write into them."""
        return dict(self._now)

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Restore the tensors of a snapshot."""
        self._now = snapshot

    def changed(self, snapshot: Mapping[str, Tensor]) -> list[Tensor]:
        """List the tensors that differ from a snapshot, with zero for "empty"."""
        return [
            self._closed(name, value)
            for name, value in self._now.items()
            if value is not snapshot.get(name)
        ]

    def _closed(self, name: str, value: Tensor) -> Tensor:
        """Replace the infinity that means "empty" in this tensor by zero."""
        if name not in self._open:
            return value
        return value.nan_to_num(torch.nan, 0, torch.nan)

    def declare_generator(self, name: str, seed: int) -> None:
        """Add the state of a CPU generator, for :meth:`generator`."""
        self.declare(name, torch.Generator().manual_seed(seed).get_state())

    @contextmanager
    def generator(self, name: str) -> Iterator[torch.Generator]:
        """Provide a CPU generator that goes on from the remembered state ``name``."""
        generator = torch.Generator()
        generator.set_state(self._now[name].cpu())
        yield generator
        self._now[name] = generator.get_state()


# Masks and states of generators, of which every value is valid.
_BITS = (torch.bool, torch.uint8)
