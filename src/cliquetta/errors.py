"""Errors that more than one part of the package raises.

A :class:`UserError` is bad input: its message says what to do, and a command prints it without a
trace. Any other exception is a defect, except those of the operating system (``OSError``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Input that cannot be used; the message names the remedy."""


class UnknownNameError(UserError, KeyError):
    """A name that nothing is registered under; the message names the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        near = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        self.message = f"unknown {kind} {name!r}: {hint}known are {', '.join(choices)}"
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class BusyError(RuntimeError):
    """Another process is working on the same files."""
