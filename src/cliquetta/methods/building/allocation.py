"""The memory that a method would take, counted before it is allocated."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cliquetta.errors import UserError


class StateTooLargeError(UserError):
    """A method would remember more than there is room for."""


def half_of_memory() -> int:
    """Return half of this machine's memory in bytes, if the system reports it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 2**62


class TorchWatch(TorchFunctionMode, ABC):
    """Calls :meth:`before` ahead of every torch function, in its own thread."""

    @abstractmethod
    def before(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Look at a call that is about to be made; raise to stop it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        self.before(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class AllocationLimit(TorchWatch):
    """Refuses, inside the block, settings that ask for more bytes than ``most``.

    Sizes come from running the same function on torch's meta device, which allocates
    nothing. The copies of ``Memory.declare`` add up to ``total``; other tensors must
    fit alone.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.total = 0

    def before(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Count what ``func`` would allocate."""
        if func not in _MAKERS:
            return
        # The same call on the meta device, where nothing is allocated.
        options = dict(kwargs)
        for name in ("device", "generator", "out"):
            options.pop(name, None)
        with torch._C.DisableTorchFunction():
            on_meta = [_without_data(value) for value in args]
            if func in _PLACED:
                result = func(*on_meta, **options, device="meta")
            else:
                result = func(*on_meta)

        # Memory.declare clones what it keeps.
        if func is torch.clone:
            self.total += result.nbytes
        if max(self.total, result.nbytes) > self._most:
            raise StateTooLargeError(
                f"the method would remember more than {self._most:,} bytes with these classes and "
                "options: use fewer or smaller ones"
            )


def _without_data(value: Any) -> Any:
    """Return a tensor's like on the meta device; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


_PLACED = frozenset(
    {
        torch.zeros,
        torch.ones,
        torch.full,
        torch.empty,
        torch.rand,
        torch.randn,
        torch.eye,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.empty_like,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.new_empty,
    }
)
"""Functions that make a tensor on a device of choice."""
_MAKERS = _PLACED | {Tensor.repeat, torch.clone}
