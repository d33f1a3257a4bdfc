"""``cliquetta data doctor``: check a directory of datasets."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.command import SKIPPED, Bounds, Common, split_list
from cliquetta.cli.console import count

if TYPE_CHECKING:
    from cliquetta.data.doctor import Finding, Report

EXAMPLES = """
cliquetta data doctor ~/data
cliquetta data doctor ~/data --only pets,eurosat --deep
cliquetta data doctor ~/data --json
"""


def doctor(
    common: Common,
    root: Annotated[Path, typer.Argument(help="Root directory of your datasets, or one of them.")],
    deep: Annotated[bool, "Open every image; slow, finds damaged files."] = False,
    only: Annotated[str | None, "Datasets to look for, comma-separated. (default: all)"] = None,
    workers: Annotated[int, Bounds(0), "Threads that open images."] = 4,
) -> None:
    """Report which datasets are under ROOT, in which layout, and what is missing or wrong.

    Counts are compared with those of a complete copy, labels with our class lists.
    """
    from cliquetta.data.doctor import examine

    ids = None if only is None else split_list(only, "datasets")
    with common.terminal.bars() as bars:

        def opened(id: str, done: int, total: int) -> None:
            bars.show(f"open {id}", done, total, "images")

        report = examine(root.expanduser(), ids=ids, deep=deep, workers=workers, on_image=opened)
    common.terminal.document(asdict(report))
    if not common.json:
        _show(common, report, named=ids is not None)
    if any(finding.opened and finding.opened.unreadable for finding in report.findings):
        raise typer.Exit(SKIPPED)


def _show(common: Common, report: "Report", *, named: bool) -> None:
    """A table of what is there, then what is wrong and what is missing."""
    terminal = common.terminal
    there = [finding for finding in report.findings if finding.state != "missing"]
    missing = [finding for finding in report.findings if finding.state == "missing"]
    columns = ("dataset", "state", "images", "other splits", "where")
    if there:
        terminal.table(columns, [_row(finding) for finding in there], right=("images",))
    for finding in there:
        for line in _remarks(finding):
            terminal.say(f"{finding.id}: {line}")
    if missing:
        ids = ", ".join(finding.id for finding in missing)
        terminal.say(f"{count(len(missing), 'dataset')} not found under {report.root}: {ids}")
        for finding in missing if named or not there else ():
            terminal.say(f"  {finding.id}: {finding.get}")
        if there and not named:
            terminal.say("How to get one: cliquetta data doctor ROOT --only ID")
    if report.unknown_folders:
        unknown = ", ".join(report.unknown_folders)
        terminal.say(f"Unknown folders: {unknown}; use one as folder:PATH")


def _row(finding: "Finding") -> tuple[str, ...]:
    counts = {name: f"{s.found:,} / {s.expected:,}" for name, s in finding.splits.items()}
    others = [f"{name} {number}" for name, number in list(counts.items())[1:]]
    folder = f"{finding.folder} ({finding.layout})" if finding.folder else "–"
    first = next(iter(counts.values()), "–")
    return finding.id, finding.state, first, ", ".join(others) or "–", folder


def _remarks(finding: "Finding") -> list[str]:
    lines = [f"to fix: {problem}" for problem in finding.problems]
    if finding.problems and finding.get:
        lines.append(finding.get)
    opened = finding.opened
    if opened is not None:
        lines.append(
            f"{count(opened.images, 'image')} opened, {len(opened.unreadable):,} unreadable, "
            f"{count(opened.duplicates, 'duplicate')}"
        )
        lines += [
            f"the same image in two classes: {first} and {second}"
            for first, second in opened.contradictions[:5]
        ]
    return lines + [f"note: {note}" for note in finding.notes]
