"""``cliquetta reproduce``: tables of the paper beside ours, and the pages of our own results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import FAILED, Common, command
from cliquetta.cli.console import Terminal, count, number
from cliquetta.cli.executing import RUNS, Limit, Out, Seeds, executing, finish, read_seeds
from cliquetta.cli.options import BatchSize, Workers
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.ablation import Curve
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.published import PublishedTable, Side
    from cliquetta.evaluation.reproduce import Line, Setting
    from cliquetta.evaluation.sweep import RunContext
    from cliquetta.report.results_pages import Pages

VALUES: dict[str, tuple[float, ...]] = {
    "threshold": (0.6, 0.65, 0.7, 0.8, 0.9),
    "concentration": (0.0, 0.5, 1.0, 2.0),
    "capacity": (2, 4, 6, 10),
    "neighbours": (1, 2, 3, 5),
    "batch_size": (8, 16, 32, 64, 128),
}
"""Where we measure: the paper's figures do not print their values."""
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
    check: Annotated[
        bool, typer.Option("--check", help="Our results: exit with 1 if the page is out of date.")
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
    workers: Workers = 2,
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
    from cliquetta.methods._shared.fewshot_io import load_fitted
    from cliquetta.report.results_pages import Pages

    if table in GRIDS:
        pages = Pages(results, Path("README.md"), results.parent / "methods" / "README.md")
        if run:
            context = RunContext(out, None, common.place(), workers)
            _run_grids(table, pages, context, root, common, read_shard(shard))
        if shard == "1/1":
            _write_page(table, pages, common.terminal, check=check)
        return
    if run or check or shard != "1/1":
        raise UserError(f"--run, --shard and --check are for {', '.join(GRIDS)}")
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
    files = {load_fitted(path).method: str(path) for path in fitted or ()}
    setting = Setting(base, root, shift, tuple(read_seeds(seeds)), files)
    context = RunContext(out, root, common.place(), workers)
    if table in ("hyperparameters", "batch-size"):
        if method or fitted:
            raise UserError(f"{table} is about SCAP alone: leave out --method and --fitted")
        _curves(wanted, setting, context, common.terminal)
    else:
        only = split_list(method, "methods") if method else []
        _table(wanted, setting, context, common.terminal, only)


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
    from cliquetta.evaluation.sweep import sweep

    for grid in GRIDS[page]:
        if root is None and ROOT in grid_file(grid).read_text(encoding="utf-8"):
            common.terminal.warn(f"{grid} is left as it is: its images need --root")
            continue
        specs = shard_of(read_grid(grid_file(grid), root=str(root or "")), *shard)
        with executing(specs, context, common.terminal) as at:
            done = sweep(specs, context, on_step=at.bars.step, on_result=at.bars.ended)
        records = [result.record for result in done if result.record is not None]
        if len(records) < len(specs):
            raise UserError(f"{len(specs) - len(records)} runs of {grid} failed: nothing recorded")
        if shard[1] > 1:
            common.terminal.say(f"{count(len(records), 'run')} in {context.out}")
            continue
        packed = pack_records(records).replace(str(root), ROOT) if root else pack_records(records)
        write_atomically(pages.records(grid), packed.encode())
        common.terminal.say(f"{count(len(records), 'record')} in {pages.records(grid)}")


def _write_page(page: str, pages: Pages, terminal: Terminal, *, check: bool) -> None:
    from cliquetta.atomic import write_atomically

    path, text = pages.text(page)
    now = path.read_text(encoding="utf-8") if path.exists() else ""
    if check and now != text:
        terminal.fail(f"{path} is not what the records say: run `cliquetta reproduce {page}`")
        raise typer.Exit(FAILED)
    if not check:
        write_atomically(path, text.encode())
        terminal.say(f"written: {path}")


def _table(
    table: PublishedTable,
    setting: Setting,
    context: RunContext,
    terminal: Terminal,
    only: Sequence[str],
) -> None:
    from cliquetta.evaluation.reproduce import baselines, lines, plain, plan
    from cliquetta.evaluation.sweep import sweep

    items = plan(table, setting, only)
    specs = [*baselines(items), *(spec for item in items for spec in item.specs)]
    if not specs:
        reasons = dict.fromkeys(item.missing for item in items)
        raise UserError(f"nothing of {table.name} can be run: {'; '.join(reasons)}")
    cells = list(dict.fromkeys(specs))
    _announce(table, setting, len(cells), terminal)
    with executing(cells, context, terminal) as at:
        results = sweep(cells, context, on_step=at.bars.step, on_result=at.bars.ended)
    made = lines(table, items, results)
    for dataset in dict.fromkeys(line.item.dataset for line in made):
        own = [line for line in made if line.item.dataset == dataset]
        _show(own, terminal, title=f"{table.title}: {dataset}")
    _explain(made, terminal)
    document = {"table": table.name, "title": table.title, "lines": [plain(m) for m in made]}
    _save(document, context, table, terminal)
    terminal.document(document)
    finish(results, terminal)


def _announce(table: PublishedTable, setting: Setting, runs: int, terminal: Terminal) -> None:
    base = setting.base
    where = setting.dataset(", ".join(table.datasets))
    images = f", {count(base.limit, 'image')} each" if base.limit else ""
    terminal.say(f"{table.title} ({table.where}): {base.model} on {where}, {runs} runs{images}")


def _show(made: Sequence[Line], terminal: Terminal, *, title: str) -> None:
    """Numbers of both sides; a difference that means nothing stands in brackets."""
    columns = ("row", "paper", "ours", "difference", "gain, paper", "gain, ours")
    rows = [
        (
            line.item.row.label + ("†" if line.item.row.tuned_on_test else ""),
            f"{number(line.item.paper)} {line.item.row.source}",
            number(line.ours) + ("" if line.sd is None else f" ± {number(line.sd)}"),
            _bracketed(line),
            _signed(line.paper_gain),
            _signed(line.gain),
        )
        for line in made
    ]
    terminal.table(columns, rows, title=title, right=columns[1:])
    likelihoods = {
        line.item.row.label: statistics.mean(record.metrics["nll"] for record in line.records)
        for line in made
        if line.ours is not None
    }
    shown = ", ".join(f"{label} {nll:.4f}" for label, nll in likelihoods.items())
    terminal.say(f"negative log-likelihood of ours: {shown}")


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def _bracketed(line: Line) -> str:
    shown = _signed(line.difference)
    return f"({shown})" if line.reasons and line.difference is not None else shown


def _explain(made: Sequence[Line], terminal: Terminal) -> None:
    """Protocols of both sides, reasons, sources and notes."""
    from cliquetta.evaluation.published import sources

    columns = ("row", "views: paper", "ours", "templates: paper", "ours", "batch: paper", "ours")
    sides: dict[tuple[str, ...], list[str]] = {}
    for line in made:
        pairs = zip(*(_words(side) for side in (line.paper_side, line.our_side)), strict=True)
        key = tuple(word for pair in pairs for word in pair)
        sides.setdefault(key, []).append(line.item.row.label)
    rows = [
        ("all rows" if len(sides) == 1 else ", ".join(dict.fromkeys(labels)), *key)
        for key, labels in sides.items()
    ]
    terminal.table(columns, rows, title="Protocols")
    _say_reasons(made, terminal)
    used = dict.fromkeys(line.item.row.source for line in made)
    for letter in used:
        terminal.say(f"{letter}: {sources()[letter]}")
    if any(line.item.row.tuned_on_test for line in made):
        terminal.say("†: the published number was tuned on test labels")
    for label, note in dict.fromkeys((m.item.row.label, m.note) for m in made if m.note):
        terminal.say(f"{label}: {note}")


def _words(side: Side | None) -> tuple[str, str, str]:
    return ("–", "–", "–") if side is None else (side.views, side.templates, side.batch_size)


def _say_reasons(made: Sequence[Line], terminal: Terminal) -> None:
    """Why differences in brackets mean nothing; said also when quiet."""
    ran = [line for line in made if line.ours is not None]
    groups: dict[tuple[str, ...], list[str]] = {}
    for line in ran:
        if line.reasons:
            groups.setdefault(line.reasons, []).append(line.item.row.label)
    for reasons, labels in groups.items():
        who = "" if len(labels) == len(ran) else f"{', '.join(dict.fromkeys(labels))}: "
        terminal.warn(f"{who}not comparable with the paper: {'; '.join(reasons)}.")


def _save(
    document: dict[str, Any], context: RunContext, table: PublishedTable, terminal: Terminal
) -> None:
    from cliquetta.atomic import write_atomically

    assert context.out is not None
    path = context.out / f"reproduce-{table.name}.json"
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False).encode())
    terminal.say(f"numbers: {path}; all runs: cliquetta compare {context.out} --split")


def _curves(
    table: PublishedTable, setting: Setting, context: RunContext, terminal: Terminal
) -> None:
    """The figures: one curve a field, or the batch size and the cliques that go with it."""
    from cliquetta.cli.ablate import save_curves
    from cliquetta.evaluation.ablation import ablation, curve, largest_cliques
    from cliquetta.evaluation.reproduce import lines, plain, plan
    from cliquetta.evaluation.sweep import sweep

    (item,) = plan(table, setting)
    if item.missing:
        raise UserError(f"{table.name} needs {item.dataset}: {item.missing}")
    base = item.specs[0]
    fields = list(table.curves) or ["batch_size"]
    ablations = {
        (field, modality): ablation(spec, field, VALUES[field], setting.seeds)
        for field in fields
        for modality, spec in _modalities(base, apart=field == "batch_size").items()
    }
    cells = list(dict.fromkeys(spec for each in ablations.values() for spec in each.specs))
    cells += [spec for spec in item.specs if spec not in cells]
    _announce(table, setting, len(cells), terminal)
    with executing(cells, context, terminal) as at:
        results = sweep(cells, context, on_step=at.bars.step, on_result=at.bars.ended)
    curves = {key: curve(each, results) for key, each in ablations.items()}
    named = {_show_figure(table, key, shown, terminal): shown for key, shown in curves.items()}
    document: dict[str, Any] = {
        "table": table.name,
        "title": table.title,
        "curves": [
            {**c.plain(), **table.curves.get(field, {}), "modalities": modality}
            for (field, modality), c in curves.items()
        ],
    }
    if table.name == "batch-size":
        sizes = largest_cliques(context, base, [int(size) for size in VALUES["batch_size"]])
        columns = ("batch size", "largest clique, mean over batches")
        rows = [(str(size), number(mean, 1)) for size, mean in sizes.items()]
        terminal.table(columns, rows, right=columns)
        document["largest_clique"] = sizes
    made = lines(table, [item], results)
    _show(made, terminal, title=f"with default values: {item.dataset}")
    _explain(made, terminal)
    assert context.out is not None
    document["lines"] = [plain(line) for line in made]
    save_curves(named, document, context.out / f"reproduce-{table.name}", terminal)
    finish(results, terminal)


def _modalities(base: RunSpec, *, apart: bool) -> dict[str, RunSpec]:
    """The run as it is and, where the paper draws them ``apart``, with either prompts alone."""
    found = {"both": base}
    for modality in ("image", "text") if apart else ():
        options = {**dict(base.options), "modalities": modality}
        found[modality] = replace(base, options=tuple(sorted(options.items())))
    return found


def _show_figure(
    table: PublishedTable, key: tuple[str, str], curve: Curve, terminal: Terminal
) -> str:
    """A curve as a table, with what the paper says about it; returns its name."""
    from cliquetta.cli.ablate import show_curve

    field, modality = key
    facts = table.curves.get(field, {})
    name = f"{facts['symbol']} ({field})" if facts else field
    name += "" if modality == "both" else f", {modality} prompts alone"
    show_curve(curve, terminal, title=name)
    for statement in [facts["statement"]] if facts else table.statements:
        terminal.say(f"  the paper: {statement}")
    return name
