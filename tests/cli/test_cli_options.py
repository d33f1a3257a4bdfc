"""How the values of options are parsed, and progress is shown without a terminal."""

from __future__ import annotations

import io

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


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("cliquetta.cli.console.time.monotonic", lambda: next(clock))
    text = io.StringIO()
    with Terminal(err=Console(file=text)).progress() as progress:
        bar = progress.add_task("predict", total=700, note="")
        for done in range(1, 8):
            progress.update(bar, completed=100 * done)
    lines = [line for line in text.getvalue().splitlines() if "━" not in line]
    assert lines == ["predict 100/700", "predict 400/700"]
