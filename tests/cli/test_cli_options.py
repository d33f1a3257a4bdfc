"""How the values of options are parsed, and progress is shown without a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from cliquetta.cli.console import Terminal
from cliquetta.cli.options import read_settings, split_list


def test_settings_are_pairs() -> None:
    assert read_settings(["steps=2", "text=a=b"]) == {"steps": "2", "text": "a=b"}
    with pytest.raises(ValueError, match="key=value"):
        read_settings(["=2"])


def test_lists_lose_repeats_and_blanks() -> None:
    assert split_list("a, b,,a", "things") == ["a", "b"]
    with pytest.raises(ValueError, match="no things given"):
        split_list(" ,", "things")


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_of_commands_wait_asleep_unless_told_otherwise(given: str | None) -> None:
    program = (
        "import os, sys, cliquetta.cli.main\n"
        "assert 'torch' not in sys.modules  # which reads it when it is loaded\n"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    )
    known = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment = known | ({"OMP_WAIT_POLICY": given} if given else {})
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert run.stdout.split() == [(given or "PASSIVE").encode(), b"0"], run.stderr


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("cliquetta.cli.console.time.monotonic", lambda: next(clock))
    text = io.StringIO()
    with Terminal(err=Console(file=text)).bars() as bars:
        for done in range(1, 8):
            bars.show("predict", 100 * done, 700)
    lines = [line for line in text.getvalue().splitlines() if "━" not in line]
    assert lines == ["predict 100/700", "predict 400/700"]
