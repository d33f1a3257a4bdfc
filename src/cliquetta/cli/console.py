"""Output of commands: tables and messages on stdout, progress and warnings on stderr."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from cliquetta.decimals import decimal
from cliquetta.report.markup import count as count
from cliquetta.serve.logs import JSONFormatter

# how often progress is reported where there is no terminal to draw bars on
LINE_SECONDS = 30.0
_BETWEEN = 3  # columns of the terminal between two columns of a table
_LEAST_NAME = 12  # to which the first column is narrowed at most


def _standard_output() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = 1000  # a pipe that states no width has room for every table
    return console


@dataclass(frozen=True)
class Terminal:
    """Output of a command. With ``json`` stdout carries one JSON document and nothing else."""

    json: bool = False
    quiet: bool = False
    json_log: bool = False
    """Whether every line of stderr is a JSON object, as a service's log is."""
    out: Console = field(default_factory=_standard_output)
    err: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))

    def say(self, sentence: str) -> None:
        """Print a message; left out with ``quiet`` or ``json``."""
        if not (self.quiet or self.json):
            self.out.print(escape(sentence), soft_wrap=True)

    def warn(self, sentence: str) -> None:
        """Print a warning; left out with ``quiet``."""
        if self.json_log:
            self._log(logging.WARNING, sentence)
        elif not self.quiet:
            self.err.print(f"[yellow]{escape(sentence)}[/yellow]", soft_wrap=True)

    def fail(self, sentence: str) -> None:
        """Print why the command stops."""
        if self.json_log:
            self._log(logging.ERROR, sentence)
            return
        self.err.print(
            f"[bold red]error:[/bold red] {escape(sentence)}", soft_wrap=True
        )

    def trace(self) -> None:
        """Print where the error that is being handled was raised."""
        if self.json_log:
            self._log(logging.ERROR, "trace", exc_info=sys.exc_info())
        else:
            self.err.print_exception()

    def _log(self, level: int, message: str, **more: Any) -> None:
        """Write a line of JSON to stderr."""
        about = {
            "name": "cliquetta.cli",
            "levelno": level,
            "levelname": logging.getLevelName(level),
            "msg": message,
            **more,
        }
        line = JSONFormatter().format(logging.makeLogRecord(about))
        self.err.file.write(f"{line}\n")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str | None = None,
        right: Sequence[str] = (),
    ) -> None:
        """Print a table, also with ``quiet``: it is the result; columns of ``right`` to the right.

        Columns that do not fit beside the others follow below, after the first one
        again.
        """
        if self.json:
            return
        widths = _unbroken_widths(columns, rows, right)
        # Rather break long names than lose columns of numbers at the edge.
        others = sum(widths[1:]) + _BETWEEN * len(columns) + 1
        room = self.out.width - others
        is_tight = widths[0] > room
        widths[0] = min(widths[0], max(_LEAST_NAME, room))
        for part in _split_columns(widths, self.out.width):
            table = Table(
                title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD
            )
            title = None  # of the first part only
            for index in part:
                is_figure = columns[index] in right
                # Where it is tight, widths are given: rich would first narrow all
                # columns alike.
                is_fixed = is_tight and (index == 0 or is_figure)
                table.add_column(
                    escape(columns[index]),
                    justify="right" if is_figure else "left",
                    overflow="fold",
                    min_width=widths[index],
                    width=widths[index] if is_fixed else None,
                )
            for row in rows:
                cells = [escape(row[index]) for index in part]
                table.add_row(*cells)
            self.out.print(table)

    def document(self, value: Any) -> None:
        """Print the result as one JSON document; only with ``json``."""
        if self.json:
            self.out.file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    @contextmanager
    def bars(self) -> "Iterator[Bars]":
        """Draw bars on stderr that do not get into the way of warnings; none when quiet."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
        )
        kind = Progress if self.err.is_terminal else _Lines
        silent = self.quiet or self.json_log
        with kind(*columns, console=self.err, disable=silent) as progress:
            yield Bars(progress)

    @contextmanager
    def logging(self, *, debug: bool = False) -> Iterator[None]:
        """Show the package's warnings (a skipped image) above the bars while the command runs."""
        handler: logging.Handler
        if self.json_log:
            handler = logging.StreamHandler(self.err.file)
            handler.setFormatter(JSONFormatter())
        else:
            handler = RichHandler(
                console=self.err, show_time=False, show_path=False, show_level=False
            )
        shown = logging.ERROR if self.quiet else logging.WARNING
        handler.setLevel(logging.DEBUG if debug else shown)
        logger = logging.getLogger("cliquetta")
        propagate = logger.propagate
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate


def _unbroken_widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> list[int]:
    """Measure the least width of every column.

    Names and numbers stay in one piece; of the rest, and of headers, lines are broken.
    """
    widths = []
    for index, column in enumerate(columns):
        pieces = column.split()
        if index == 0 or column in right:
            pieces += [row[index] for row in rows]
        widths.append(max(map(len, pieces)))
    return widths


def _split_columns(widths: Sequence[int], width: int) -> list[list[int]]:
    """Split columns into parts that fit a terminal, each led by the first column."""
    whole = width - widths[0] - _BETWEEN - 1
    parts = [[0]]
    left = whole
    for index in range(1, len(widths)):
        needed = widths[index] + _BETWEEN
        if needed > left and len(parts[-1]) > 1:
            parts.append([0])
            left = whole
        parts[-1].append(index)
        left -= needed
    return parts


class Bars:
    """Bars by name; each appears when it is first shown."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int | None, note: str = "") -> None:
        """Draw the bar ``name`` at ``done``."""
        if name in self._tasks:
            task = self._tasks[name]
            self._progress.update(task, completed=done, total=total, note=note)
        else:
            self._tasks[name] = self._progress.add_task(
                name, completed=done, total=total, note=note
            )

    def remove(self, name: str) -> None:
        """Take a bar away, if it is there."""
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))


class _Lines(Progress):
    """Progress for a log file: a line every half minute instead of bars."""

    printed = float("-inf")

    def start(self) -> None:
        """Draw nothing."""

    def stop(self) -> None:
        """Leave no bar behind."""

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        now = time.monotonic()
        if self.disable or now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        parts = []
        for task in self.tasks:
            if task.total and not task.finished:
                done = f"{task.completed:,.0f}/{task.total:,.0f}"
                parts.append(f"{task.description.strip()} {done}")
        if parts:
            self.console.print(escape(", ".join(parts)), soft_wrap=True)


def number(
    value: float | None,
    digits: int = 2,
    *,
    sd: float | None = None,
    signed: bool = False,
) -> str:
    """Write a figure of a table, with its standard deviation; a dash where there is none."""
    text = "–" if value is None else decimal(value, digits, signed=signed)
    return text if sd is None else f"{text} ± {sd:.{digits}f}"
