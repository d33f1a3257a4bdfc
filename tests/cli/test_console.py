"""Tables lose no figure, however narrow the terminal; progress without a terminal."""

import io
import json
import logging

import pytest
from rich.console import Console

from cliquetta.cli.console import Terminal

COLUMNS = ("method", *(f"figure number{n}" for n in range(12)))
ROWS = [
    (name, *(f"{10 * row + n}.25 ± 0.{n:02d}" for n in range(12)))
    for row, name in enumerate(["domain_norm", "a_method_with_a_long_name/lr=0.001"])
]


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_every_figure_is_in_one_line_and_no_line_too_long(width: int) -> None:
    file = io.StringIO()
    Terminal(out=Console(file=file, width=width)).table(
        COLUMNS, ROWS, right=COLUMNS[1:]
    )
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    for row in ROWS:
        for cell in row[1:]:
            assert any(cell in line for line in lines), cell
    if width == 400:
        assert any(all(cell in line for cell in ROWS[1]) for line in lines)


def test_pipes_are_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    Terminal().table(COLUMNS, ROWS, right=COLUMNS[1:])
    lines = capsys.readouterr().out.splitlines()
    assert any(all(cell in line for cell in ROWS[1]) for line in lines)


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("cliquetta.cli.console.time.monotonic", lambda: next(clock))
    text = io.StringIO()
    with Terminal(err=Console(file=text)).bars() as bars:
        for done in range(8):  # the first shows the bar only
            bars.show("predict", 100 * done, 700)
    lines = [line for line in text.getvalue().splitlines() if "━" not in line]
    assert lines == ["predict 100/700", "predict 400/700"]


def test_every_line_of_a_json_log_is_an_object(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = io.StringIO()
    terminal = Terminal(json_log=True, err=Console(file=text))
    with terminal.logging(), terminal.bars() as bars:
        bars.show("download", 1, 2)
        logging.getLogger("cliquetta.model").warning("a note, longer than a line " * 5)
        terminal.warn("a warning\nof two lines")
        terminal.fail("an error")
        try:
            raise ValueError("a defect")
        except ValueError:
            terminal.trace()
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["warning", "warning", "error", "error"]
    assert "ValueError: a defect" in lines[-1]["trace"]
