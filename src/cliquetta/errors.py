"""Errors that more than one part of the package raises.

A :class:`UserError` is bad input: its message says what to do, and a command prints it
without a trace. Any other exception is a defect, except those of the operating system
(``OSError``).
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar


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


Entry = TypeVar("Entry")


def look_up(kind: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """The entry of a name, or :class:`UnknownNameError`."""
    if name not in entries:
        raise UnknownNameError(kind, name, entries)
    return entries[name]


def first_line(error: object) -> str:
    """The first line of what an error of another library says, or else its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class BusyError(RuntimeError):
    """Another process is working on the same files."""
