"""Pieces of text that several pages of results have: names, figures, paragraphs, marks."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import COMMAND
from cliquetta.decimals import signed
from cliquetta.evaluation.comparison import Overall
from cliquetta.evaluation.record import Record

BLANK = "–"
_LINE = 100  # characters of a line of a page


def method_of(label: str) -> str:
    """Return the registered name in the label of a row."""
    return label.split()[0].partition(":")[0]


def short_id(dataset: str) -> str:
    """Return the id without the folder that its files are in."""
    known = dataset.partition(" with unknown")[0]
    return known.rpartition("/")[2].replace("bundled@", "")


def linked(label: str, folder: Path, way: str = "") -> str:
    """Link the label of a row to the method's page where ``folder`` has one."""
    page = folder / f"{method_of(label)}.md"
    return f"[`{label}`]({way}{page.name})" if page.exists() else f"`{label}`"


def figure(value: float | None, form: str) -> str:
    """Write a figure of a table; a dash where there is none."""
    if value is None:
        return BLANK
    digits = int(form[-2])
    return format(round(value, digits) + 0.0, form)  # + 0.0: no figure is -0.0


def times(cost: float | None) -> str:
    """Write a cost as a multiple."""
    return BLANK if cost is None else f"{cost:.3g} ×"


def gain_with_interval(row: Overall) -> str:
    """Write a gain with half of its 95 % interval, where that is known."""
    if row.gain is None:
        return BLANK
    spread = "" if row.half_width is None else f" ± {row.half_width:.2f}"
    return f"{signed(row.gain)}{spread}"


def fill(text: str, indent: str = "") -> str:
    """Break a paragraph into lines; ``indent`` is for the second and those after it."""
    wrapper = textwrap.TextWrapper(
        _LINE,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.fill(text)


def as_item(text: str) -> str:
    """Write an item of a list."""
    return fill(f"- {text}", "  ")


def recorded_line(records: Sequence[Record]) -> str:
    """Say when and on what our figures were recorded."""
    days = set()
    machines = set()
    versions = set()
    for record in records:
        days.add(record.finished[:10])
        machines.add(str(record.environment["device_name"]))
        versions.add(str(record.environment["versions"]["torch"]))
    period = min(days)
    if len(days) > 1:
        period += f" to {max(days)}"
    where = ", ".join(sorted(machines))
    torch = ", ".join(sorted(versions))
    text = f"Recorded {period} on {where}, torch {torch}: {len(records)} runs."
    return fill(text)


def insert_between(page: str, name: str, command: str, text: str) -> str:
    """Put a text between the two marks of its name on a page."""
    begin = f"<!-- {name}: {COMMAND} {command} -->"
    end = f"<!-- /{name} -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page needs a line {begin!r} and a line {end!r}")
    return f"{before}{begin}\n{text}\n{end}{after}"
