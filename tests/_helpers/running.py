"""The command as a function of its words."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cliquetta.cli.main import app

COMMAND = (sys.executable, "-c", "from cliquetta.cli.main import main; main()")
"""The command as a process, whether or not it is installed."""


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

    def refuses(self, sentence: str = "") -> bool:
        """Whether the command ended with code 2 and a sentence, not with a trace."""
        return self.code == 2 and sentence in self.text and "Traceback" not in self.text


def child_environment(**more: str) -> dict[str, str]:
    """Variables of a Python process that imports the same package and these tests."""
    source = Path(sys.modules["cliquetta"].__path__[0]).parent
    folders = os.pathsep.join(map(str, (source, Path(__file__).parents[2])))
    return {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", **more}


Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run the command with these words; a raised error other than an exit fails the test."""
    return runner_of(app)


def runner_of(app: typer.Typer) -> Run:
    """Make a function of words that runs a command or program."""

    def call(*words: object, input: bytes | None = None) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words], input=input)
        if result.exception is not None and not isinstance(
            result.exception, SystemExit
        ):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return call
