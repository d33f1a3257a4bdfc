"""``cliquetta reproduce``: the pages of our own results, from their records."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.atomic import write_atomically
from cliquetta.cli.command import (
    FAILED,
    RUNS,
    Common,
    Out,
    Workers,
    read_shard,
    split_list,
)
from cliquetta.cli.console import Terminal, count
from cliquetta.cli.executing import run_grid
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.grid_files import packaged_grid

if TYPE_CHECKING:
    from cliquetta.evaluation.record import Record
    from cliquetta.report.results_pages import ResultsPages

PAGES = ("headline", "methods", "ablation", "leaderboard", "published")
EXAMPLES = """
cliquetta reproduce headline
cliquetta reproduce methods --overwrite
cliquetta reproduce leaderboard --run --shard 2/8 --device cuda
cliquetta reproduce leaderboard --run --grid leaderboard-imagenet --root DIR --features kept
"""


def reproduce(
    common: Common,
    page: Annotated[
        str,
        typer.Argument(
            help="Page of results: headline, methods, ablation or leaderboard."
        ),
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

    from cliquetta.evaluation.grid import ROOT, read_grid, shard_of
    from cliquetta.evaluation.pairing import add_changes
    from cliquetta.evaluation.record import pack_records
    from cliquetta.evaluation.sweep import RunContext
    from cliquetta.methods.registry import get_method
    from cliquetta.report.results_pages import GRIDS, ResultsPages

    terminal = common.terminal
    pages = ResultsPages(
        results, Path("README.md"), results.parent / "methods" / "README.md"
    )
    if again and not run:
        raise UserError("--again needs --run")
    number, shards = read_shard(shard)
    if (grid or features is not None) and not run:
        raise UserError("--grid and --features need --run")
    if grid and grid not in GRIDS[page]:
        raise UnknownNameError("grid", grid, GRIDS[page])
    wanted = (grid,) if grid else GRIDS[page]
    for name in wanted if run else ():
        repeated = split_list(again, "methods") if again else []
        for method in repeated:
            get_method(method)  # a misspelt one would run nothing again
        if root is None and ROOT in packaged_grid(name).read_text(encoding="utf-8"):
            terminal.warn(f"{name} is left as it is: its images need --root")
            continue
        specs = shard_of(
            read_grid(packaged_grid(name), root=str(root or "")), number, shards
        )
        recorded = find_recorded(pages.records(name), repeated, str(root or ROOT))
        context = RunContext(
            out=out,
            device=common.checked_device(),
            workers=workers,
            features=features,
            recorded=recorded,
        )
        done = run_grid(specs, context, terminal)
        records = [result.record for result in done if result.record is not None]
        if len(records) < len(specs):
            raise UserError(
                f"{len(specs) - len(records)} runs of {name} failed: nothing recorded"
            )
        if shards > 1:
            terminal.say(f"{count(len(records), 'run')} in {out}")
            continue
        packed = pack_records(add_changes(records, out))
        if root:
            packed = packed.replace(str(root), ROOT)
        write_atomically(pages.records(name), packed.encode())
        terminal.say(f"{count(len(records), 'record')} in {pages.records(name)}")
    if shards == 1:
        _write_page(page, pages, terminal, overwrite=overwrite)


def check_page(page: str) -> None:
    """Raise a :class:`UserError` unless a page is ours; a grid is run by another command."""
    if page in PAGES:
        return
    if packaged_grid(page).exists():
        raise UserError(
            f"{page} is a grid: cliquetta evaluate --grid {page} --root DATA"
        )
    raise UnknownNameError("page", page, PAGES)


def find_recorded(
    path: Path, again: Sequence[str], root: str
) -> "Callable[[Record], Record | None]":
    """Find runs among those recorded by their settings, wherever datasets were; not ``again``."""
    from cliquetta.evaluation.grid import ROOT
    from cliquetta.evaluation.record import unpack_records

    def key(record: "Record") -> str:
        return json.dumps(record.settings, sort_keys=True).replace(root, ROOT)

    old = unpack_records(path) if path.is_file() else []
    by_settings = {key(record): record for record in old if record.method not in again}
    return lambda planned: by_settings.get(key(planned))


def _write_page(
    page: str, pages: "ResultsPages", terminal: Terminal, *, overwrite: bool
) -> None:
    from cliquetta.methods.building.index import INDEX_FILE
    from cliquetta.report.method_pages import method_files

    texts = pages.texts(page)
    if page == "methods":
        texts |= method_files(pages.methods.parent, INDEX_FILE)
    now = {
        path: path.read_text(encoding="utf-8") if path.exists() else None
        for path in texts
    }
    if now == texts:
        files = str(next(iter(texts))) if len(texts) == 1 else f"{len(texts)} files"
        terminal.say(f"{files}: what the records say")
        return
    if not overwrite and any(
        now[path] not in (None, text) for path, text in texts.items()
    ):
        terminal.fail(
            "pages are not what the records say: pass --overwrite to rewrite them"
        )
        raise typer.Exit(FAILED)
    changed = {path: text for path, text in texts.items() if now[path] != text}
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
        terminal.say(f"written: {path}")
