"""What running a command in a test gives back."""

from __future__ import annotations

from collections.abc import Callable


class Answer:
    """What a command left behind; ``text`` is stdout and stderr with line breaks as blanks."""

    def __init__(self, code: int, stdout: str, stderr: str, error: BaseException | None) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr
        self.text = " ".join((stdout + " " + stderr).split())
        self.error = error


Run = Callable[..., Answer]
