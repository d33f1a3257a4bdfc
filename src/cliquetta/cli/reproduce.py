"""``cliquetta reproduce``: tables of the paper beside ours, and the pages of our own results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.command import FAILED, Common, command
from cliquetta.cli.console import Terminal, count
from cliquetta.cli.executing import RUNS, Limit, Out, Seeds, read_seeds, run_grid
from cliquetta.cli.options import BatchSize, Workers
from cliquetta.cli.published import run_figures, run_table
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.sweep import RunContext
    from cliquetta.report.results_pages import Pages

_EXAMPLES = """
cliquetta reproduce components

cliquetta reproduce hyperparameters --shift fog:4

cliquetta reproduce ood --root ~/data --device cuda

cliquetta reproduce headline --run --device cuda

cliquetta reproduce methods

cliquetta reproduce leaderboard --run --shard 2/8 --device cuda

cliquetta reproduce cross-domain --root ~/data --method scap,tda --seeds 0,1,2

cliquetta reproduce ood --root ~/data --fitted coop.safetensors --method zero_shot,coop
"""


def add_to(app: typer.Typer) -> None:
    """Enter the command."""
    command(app, "reproduce", examples=_EXAMPLES)(reproduce)


def reproduce(
    common: Common,
    table: Annotated[
        str,
        typer.Argument(
            help="Of the paper: ood, cross-domain, cross-domain-full, components, combination, "
            "batch-size, hyperparameters; of our results: headline, methods, ablation, leaderboard."
        ),
    ],
    run: Annotated[
        bool, typer.Option("--run", help="Our results: first run what is missing.")
    ] = False,
    shard: Annotated[
        str,
        typer.Option(help="With --run: only shard I of N of the streams (I/N); records nothing."),
    ] = "1/1",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Our results: rewrite a page that is not what the records say."
        ),
    ] = False,
    results: Annotated[Path, typer.Option(help="Our results: directory of the records.")] = Path(
        "docs/results"
    ),
    root: Annotated[
        Path | None, typer.Option(help="Root directory of your datasets. (default: bundled images)")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name or path. (default: micro, or ViT-B/16)")
    ] = None,
    shift: Annotated[
        str | None, typer.Option(help="Shift of all images, NAME:SEVERITY (see `datasets`).")
    ] = None,
    limit: Limit = None,
    method: Annotated[str | None, typer.Option(help="Rows to include, comma-separated.")] = None,
    seeds: Seeds = "0",
    fitted: Annotated[
        list[Path] | None, typer.Option(help="File written by `cliquetta fit` (repeatable).")
    ] = None,
    out: Out = RUNS,
    batch_size: BatchSize = 64,
    workers: Workers = None,
) -> None:
    """Run a table of the paper with what is available and print both sides with their protocols.

    With --root, on the datasets that are found there, each row with the views and templates of
    its published number. Without, on the bundled images under a shift: that shows the shape of a
    table in minutes, and its numbers cannot be compared with the printed ones.
    """
    from cliquetta.cli.options import read_shard, split_list
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.published import published_table
    from cliquetta.evaluation.reproduce import FEW_IMAGES, GRIDS, STAND_IN_IMAGES, Setting
    from cliquetta.evaluation.sweep import RunContext
    from cliquetta.methods.state import read_fitted_method
    from cliquetta.report.results_pages import Pages

    if table in GRIDS:
        pages = Pages(results, Path("README.md"), results.parent / "methods" / "README.md")
        if run:
            context = RunContext(out, None, common.place(), workers)
            _run_grids(table, pages, context, root, common, read_shard(shard))
        if shard == "1/1":
            _write_page(table, pages, common.terminal, overwrite=overwrite)
        return
    if run or overwrite or shard != "1/1":
        raise UserError(f"--run, --shard and --overwrite are for {', '.join(GRIDS)}")
    wanted = published_table(table)
    if root is None and limit is None:
        limit = STAND_IN_IMAGES.get(table, FEW_IMAGES)
    base = RunSpec(
        "",
        "scap",
        model or ("micro" if root is None else "ViT-B/16"),
        batch_size=batch_size,
        limit=limit,
        dtype=common.dtype,
    )
    files = {read_fitted_method(path): str(path) for path in fitted or ()}
    setting = Setting(base, root, shift, tuple(read_seeds(seeds)), files)
    context = RunContext(out, root, common.place(), workers)
    if table in ("hyperparameters", "batch-size"):
        if method or fitted:
            raise UserError(f"{table} is about SCAP alone: leave out --method and --fitted")
        run_figures(wanted, setting, context, common.terminal)
    else:
        only = split_list(method, "methods") if method else []
        run_table(wanted, setting, context, common.terminal, only)


def _run_grids(
    page: str,
    pages: Pages,
    context: RunContext,
    root: Path | None,
    common: Common,
    shard: tuple[int, int],
) -> None:
    """Run the grids of a page and record them; those that need files elsewhere only with --root.

    A shard is run only: a last call without one finds all finished and records them.
    """
    from cliquetta.atomic import write_atomically
    from cliquetta.evaluation.grid import ROOT, read_grid, shard_of
    from cliquetta.evaluation.record import pack_records
    from cliquetta.evaluation.reproduce import GRIDS, grid_file

    for grid in GRIDS[page]:
        if root is None and ROOT in grid_file(grid).read_text(encoding="utf-8"):
            common.terminal.warn(f"{grid} is left as it is: its images need --root")
            continue
        specs = shard_of(read_grid(grid_file(grid), root=str(root or "")), *shard)
        done = run_grid(specs, context, common.terminal)
        records = [result.record for result in done if result.record is not None]
        if len(records) < len(specs):
            raise UserError(f"{len(specs) - len(records)} runs of {grid} failed: nothing recorded")
        if shard[1] > 1:
            common.terminal.say(f"{count(len(records), 'run')} in {context.out}")
            continue
        packed = pack_records(records).replace(str(root), ROOT) if root else pack_records(records)
        write_atomically(pages.records(grid), packed.encode())
        common.terminal.say(f"{count(len(records), 'record')} in {pages.records(grid)}")


def _write_page(page: str, pages: Pages, terminal: Terminal, *, overwrite: bool) -> None:
    from cliquetta.atomic import write_atomically

    texts = pages.texts(page)
    now = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in texts}
    if now == texts:
        terminal.say(f"{', '.join(map(str, texts))}: what the records say")
        return
    if not overwrite and any(now[path] not in (None, text) for path, text in texts.items()):
        terminal.fail("pages are not what the records say: pass --overwrite to rewrite them")
        raise typer.Exit(FAILED)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
        terminal.say(f"written: {path}")
