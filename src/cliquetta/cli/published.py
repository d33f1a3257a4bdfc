"""The paper's tables and figures on the terminal: its numbers, ours, and both protocols."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple
from itertools import chain
from typing import TYPE_CHECKING, Any

from cliquetta.cli.console import Terminal, count, number
from cliquetta.cli.executing import finish, run_grid
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.ablation import Curve
    from cliquetta.evaluation.published import PublishedTable
    from cliquetta.evaluation.reproduce import Line, Setting
    from cliquetta.evaluation.sweep import RunContext


def run_table(
    table: PublishedTable,
    setting: Setting,
    context: RunContext,
    terminal: Terminal,
    only: Sequence[str],
) -> None:
    """Run the rows of a table, of ``only`` these methods if any, and show them beside it."""
    from cliquetta.evaluation.reproduce import baselines, lines, plain, plan

    items = plan(table, setting, only)
    specs = [*baselines(items), *(spec for item in items for spec in item.specs)]
    if not specs:
        reasons = dict.fromkeys(item.missing for item in items)
        raise UserError(f"nothing of {table.name} can be run: {'; '.join(reasons)}")
    cells = list(dict.fromkeys(specs))
    _announce(table, setting, len(cells), terminal)
    results = run_grid(cells, context, terminal)
    made = lines(table, items, results)
    for dataset in dict.fromkeys(line.item.dataset for line in made):
        own = [line for line in made if line.item.dataset == dataset]
        _show(own, terminal, title=f"{table.title}: {dataset}")
    _explain(made, terminal)
    document = {"table": table.name, "title": table.title, "lines": [plain(m) for m in made]}
    assert context.out is not None
    hint = f"; all runs: cliquetta compare {context.out} --split"
    terminal.save(document, context.out / f"reproduce-{table.name}.json", hint)
    finish(results, terminal)


def run_figures(
    table: PublishedTable, setting: Setting, context: RunContext, terminal: Terminal
) -> None:
    """Run and show the figures: one curve per field, or the batch size and its cliques."""
    from cliquetta.cli.ablate import save_curves
    from cliquetta.evaluation.ablation import BATCH_SIZE, curve, largest_cliques
    from cliquetta.evaluation.reproduce import VALUES, figures, lines, plain, plan

    (item,) = plan(table, setting)
    if item.missing:
        raise UserError(f"{table.name} needs {item.dataset}: {item.missing}")
    base = item.specs[0]
    ablations = figures(table, base, setting.seeds)
    specs = [spec for each in ablations.values() for spec in each.specs]
    cells = list(dict.fromkeys([*specs, *item.specs]))
    _announce(table, setting, len(cells), terminal)
    results = run_grid(cells, context, terminal)
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
        sizes = largest_cliques(context, base, [int(size) for size in VALUES[BATCH_SIZE]])
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


def _announce(table: PublishedTable, setting: Setting, runs: int, terminal: Terminal) -> None:
    base = setting.base
    where = setting.dataset(", ".join(table.datasets))
    images = f", {count(base.limit, 'image')} each" if base.limit else ""
    terminal.say(f"{table.title} ({table.where}): {base.model} on {where}, {runs} runs{images}")


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


def _show(made: Sequence[Line], terminal: Terminal, *, title: str) -> None:
    """Numbers of both sides; a difference that means nothing stands in brackets."""
    columns = ("row", "paper", "ours", "difference", "gain, paper", "gain, ours")
    rows = [
        (
            line.item.row.label + ("†" if line.item.row.tuned_on_test else ""),
            f"{number(line.item.paper)} {line.item.row.source}",
            number(line.ours, sd=line.sd),
            _bracketed(line),
            number(line.paper_gain, signed=True),
            number(line.gain, signed=True),
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


def _bracketed(line: Line) -> str:
    shown = number(line.difference, signed=True)
    return f"({shown})" if line.reasons and line.difference is not None else shown


def _explain(made: Sequence[Line], terminal: Terminal) -> None:
    """Protocols of both sides, reasons, sources and notes."""
    from cliquetta.evaluation.published import sources

    columns = ("row", "views: paper", "ours", "templates: paper", "ours", "batch: paper", "ours")
    sides: dict[tuple[str, ...], list[str]] = {}
    for line in made:
        ours = ("–",) * 3 if line.our_side is None else astuple(line.our_side)
        key = tuple(chain(*zip(astuple(line.paper_side), ours, strict=True)))
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


def _say_reasons(made: Sequence[Line], terminal: Terminal) -> None:
    """Why differences in brackets mean nothing; said also when quiet."""
    ran = [line for line in made if line.ours is not None]
    groups: dict[tuple[str, ...], list[str]] = {}
    for line in ran:
        if line.reasons:
            groups.setdefault(line.reasons, []).append(line.item.row.label)
    for reasons, labels in groups.items():
        who = "" if len(labels) == len(ran) else f"{', '.join(dict.fromkeys(labels))}: "
        terminal.warn(f"{who}not comparable with the paper: {'; '.join(reasons)}.", always=True)
