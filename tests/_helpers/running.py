"""What running a command in a test gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """The end of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Both outputs with line breaks as blanks."""
        return " ".join((self.stdout + " " + self.stderr).split())


Run = Callable[..., Result]
