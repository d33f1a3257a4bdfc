"""Write a page of our own results from its records: ``python -m benchmarks.results PAGE``."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.results import COMMAND
from benchmarks.results.grid_files import GRIDS, grid_file
from benchmarks.results.method_pages import method_files
from benchmarks.results.pages import ResultsPages
from benchmarks.results.pairing import add_changes
from cliquetta.atomic import write_atomically
from cliquetta.cli.command import (
    FAILED,
    RUNS,
    Common,
    Out,
    Workers,
    add_command,
    read_shard,
    split_list,
)
from cliquetta.cli.console import Terminal, count
from cliquetta.cli.executing import run_grid
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.grid import ROOT, read_grid, shard_of
from cliquetta.evaluation.grid_files import packaged_grid
from cliquetta.evaluation.record import Record, pack_records, unpack_records
from cliquetta.evaluation.sweep import RunContext
from cliquetta.methods.building.index import INDEX_FILE
from cliquetta.methods.building.registry import get_method

EXAMPLES = f"""
{COMMAND} headline
{COMMAND} methods --overwrite
{COMMAND} leaderboard --run --shard 2/8 --device cuda
{COMMAND} leaderboard --run --grid leaderboard-imagenet --root DIR --features kept
"""


def write_results(
    common: Common,
    page: Annotated[
        str,
        typer.Argument(help=f"Page of results: {', '.join(GRIDS)}."),
    ],
    run: Annotated[bool, "First run what is missing."] = False,
    shard: Annotated[
        str, "With --run: only shard I of N of the streams (I/N); records nothing."
    ] = "1/1",
    grid: Annotated[
        str,
        "With --run: only this grid of the page's, by the name of its file of records.",
    ] = "",
    features: Annotated[
        Path | None, "With --run: where features that several methods share are kept."
    ] = None,
    again: Annotated[
        str, "With --run: run these methods again, though recorded, as NAME,NAME."
    ] = "",
    overwrite: Annotated[
        bool, "Rewrite a page that is not what the records say."
    ] = False,
    results: Annotated[Path, "Directory of the records."] = Path("docs/results"),
    root: Annotated[
        Path | None, "Root directory of datasets, for grids that need one."
    ] = None,
    out: Out = RUNS,
    workers: Workers = None,
) -> None:
    """Write a page of our own results from its records.

    With --run, first run what the records lack. Runs of a shard stay in --out; a last
    --run without one records them beside the known ones. The paper's tables are grids
    for `cliquetta evaluate --grid ood --root DATA`.
    """
    check_page(page)
    number, shards = read_shard(shard)
    if again and not run:
        raise UserError("--again needs --run")
    if (grid or features is not None) and not run:
        raise UserError("--grid and --features need --run")
    if grid and grid not in GRIDS[page]:
        raise UnknownNameError("grid", grid, GRIDS[page])
    repeated = split_list(again, "methods") if again else []
    for method in repeated:
        get_method(method)  # a misspelt one would run nothing again

    terminal = common.terminal
    pages = ResultsPages(
        results,
        readme=Path("README.md"),
        methods=results.parent / "methods" / "README.md",
    )
    if run:
        for name in (grid,) if grid else GRIDS[page]:
            if root is None and ROOT in grid_file(name).read_text(encoding="utf-8"):
                terminal.warn(f"{name} is left as it is: its images need --root")
                continue
            path = pages.records_file(name)
            context = RunContext(
                out=out,
                device=common.checked_device(),
                workers=workers,
                features=features,
                recorded=find_recorded(path, repeated, str(root or ROOT)),
            )
            records = run_shard(name, number, shards, root, context, terminal)
            if shards > 1:
                terminal.say(f"{count(len(records), 'run')} in {out}")
            else:
                write_records(path, add_changes(records, out), root)
                terminal.say(f"{count(len(records), 'record')} in {path}")
    if shards == 1:
        write_page(page, pages, terminal, overwrite=overwrite)


def check_page(page: str) -> None:
    """Raise a :class:`UserError` unless a page is ours; a grid is run by another command."""
    if page in GRIDS:
        return
    if packaged_grid(page).exists():
        raise UserError(
            f"{page} is a grid: cliquetta evaluate --grid {page} --root DATA"
        )
    raise UnknownNameError("page", page, list(GRIDS))


def find_recorded(
    path: Path, again: Sequence[str], root: str
) -> Callable[[Record], Record | None]:
    """Find runs among those recorded by their settings, wherever datasets were.

    Args:
        path: A file of records; there may be none yet.
        again: Methods whose records are not found, so that they are run again.
        root: Folder of the datasets.

    Returns:
        A function that takes a planned run to its record.

    """

    def key(record: Record) -> str:
        return json.dumps(record.settings, sort_keys=True).replace(root, ROOT)

    by_settings = {}
    for record in unpack_records(path) if path.is_file() else []:
        if record.method not in again:
            by_settings[key(record)] = record
    return lambda planned: by_settings.get(key(planned))


def run_shard(
    name: str,
    number: int,
    shards: int,
    root: Path | None,
    context: RunContext,
    terminal: Terminal,
) -> list[Record]:
    """Run one of ``shards`` shards of a grid; all of its runs have to succeed."""
    specs = read_grid(grid_file(name), root=str(root or ""))
    specs = shard_of(specs, number, shards)
    results = run_grid(specs, context, terminal)
    records = [result.record for result in results if result.record is not None]
    if len(records) < len(specs):
        raise UserError(
            f"{len(specs) - len(records)} runs of {name} failed: nothing recorded"
        )
    return records


def write_records(path: Path, records: Sequence[Record], root: Path | None) -> None:
    """Write a file of records, in which datasets lie in no folder of this machine."""
    packed = pack_records(records)
    if root:
        packed = packed.replace(str(root), ROOT)
    write_atomically(path, packed.encode())


def write_page(
    page: str, pages: ResultsPages, terminal: Terminal, *, overwrite: bool
) -> None:
    """Write the files of a page that differ from the records; rewrite only if asked to."""
    texts = pages.texts(page)
    if page == "methods":
        texts |= method_files(pages.methods.parent, INDEX_FILE)
    changed = {}
    rewritten = False
    for path, text in texts.items():
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if before != text:
            changed[path] = text
            rewritten |= before is not None
    if not changed:
        files = str(next(iter(texts))) if len(texts) == 1 else f"{len(texts)} files"
        terminal.say(f"{files}: what the records say")
        return
    if rewritten and not overwrite:
        terminal.fail(
            "pages are not what the records say: pass --overwrite to rewrite them"
        )
        raise typer.Exit(FAILED)
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
        terminal.say(f"written: {path}")


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_command(app, "results", write_results, EXAMPLES)

if __name__ == "__main__":
    app(prog_name=COMMAND)
