"""A time limit on computation in a thread, which Python cannot stop from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class OutOfTimeError(Exception):
    """The work took longer than allowed and was broken off."""


class Deadline(TorchFunctionMode):
    """Inside ``with Deadline(seconds):`` every torch function looks at the clock first.

    Methods compute with nothing but torch, so a batch ends within one operation of its limit.
    The mode holds for the thread that entered it only. Other long work calls :meth:`check`.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raise :class:`OutOfTimeError` if the time is up."""
        if time.monotonic() > self._end:
            raise OutOfTimeError

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the clock, then do what was asked."""
        del types
        self.check()
        return func(*args, **(kwargs or {}))
