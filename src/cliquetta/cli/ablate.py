"""``cliquetta ablate``: one field of a method's config, several values, a table and a curve."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import FAILED, SKIPPED, Common, command
from cliquetta.cli.console import Terminal, number

if TYPE_CHECKING:
    from cliquetta.evaluation.ablation import Curve
    from cliquetta.evaluation.sweep import RunResult

_EXAMPLES = """
cliquetta ablate --method scap --field threshold --values 0.6,0.7,0.8,0.9 --dataset bundled@fog:3

cliquetta ablate --method scap --field blocks --values '0;1;0,1' --dataset bundled --limit 256

cliquetta ablate --method tda --field positive_alpha --values 1,2,4 --dataset pets --root ~/data \
--model ViT-B/16 --seeds 0,1,2

cliquetta ablate --method tent --field batch_size --values 8,32,128 --dataset bundled@fog:3
"""


def add_to(app: typer.Typer) -> None:
    """Enter the command."""
    command(app, "ablate", examples=_EXAMPLES)(ablate)


def ablate(
    common: Common,
    field: Annotated[
        str, typer.Option(help="Of the config, see `cliquetta methods NAME`; or batch_size.")
    ],
    values: Annotated[
        str, typer.Option(help="With commas; with semicolons where values hold commas.")
    ],
    dataset: Annotated[str, typer.Option(help="Ids, several with commas: a curve each.")],
    method: Annotated[str, typer.Option(help="name, or name:preset.")] = "scap",
    model: Annotated[str, typer.Option(help="See `cliquetta models`, or a path.")] = "micro",
    seeds: Annotated[str, typer.Option(help="Seeds of order, views and method: 0,1,2.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder of runs; finished ones are kept.")] = Path(
        "runs"
    ),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the config, for all; repeat.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many images.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where data sets of yours lie.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Threads that decode images.")] = 2,
) -> None:
    """Vary one field and leave everything else as it is.

    Every value is a recorded run, so that nothing is run twice and `cliquetta compare` reads them.
    The curve is drawn to a PNG in the folder of runs where matplotlib is installed.
    """
    from cliquetta.cli.evaluate import read_seeds
    from cliquetta.cli.executing import run_cells
    from cliquetta.cli.options import read_settings, split_list
    from cliquetta.evaluation.ablation import ablation, curve, zero_shot
    from cliquetta.evaluation.sweep import RunContext, RunSpec

    name, _, preset = method.partition(":")
    base = RunSpec(
        "",
        name,
        model,
        preset=preset or None,
        options=tuple(read_settings(settings or ()).items()),
        batch_size=batch_size,
        limit=limit,
        dtype=common.dtype,
    )
    bases = [replace(base, dataset=id) for id in split_list(dataset, "data sets")]
    chosen, own_seeds = split_values(values), read_seeds(seeds)
    ablations = [ablation(each, field, chosen, own_seeds) for each in bases]
    context = RunContext(out, root, common.place(), workers)
    for each in bases:
        context.prepare(zero_shot(each))  # a bad name ends the command before the first run
    specs = [spec for each in ablations for spec in each.specs]
    results = run_cells(specs, context, common.terminal)
    curves = {e.dataset: curve(a, results) for e, a in zip(bases, ablations, strict=True)}
    for id, shown in curves.items():
        show_curve(shown, common.terminal, title=f"{method} on {id}")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"ablate-{method}-{field}-{dataset}")[:80]
    titles = {f"{field} on {id}": shown for id, shown in curves.items()}
    document = [{"dataset": id, **shown.plain()} for id, shown in curves.items()]
    save_curves(titles, {"method": method, "curves": document}, out / stem, common.terminal)
    finish(results, common.terminal)


def split_values(given: str) -> list[str]:
    """The parts of ``a,b`` or, where values hold commas themselves, of ``a;b,c``."""
    parts = given.split(";" if ";" in given else ",")
    return [part.strip() for part in parts if part.strip()]


def show_curve(curve: Curve, terminal: Terminal, *, title: str) -> None:
    """The points of a curve as a table."""
    from cliquetta.evaluation.ablation import label

    columns = (curve.field, "seeds", "top-1 %", "vs zero_shot", "NLL", "note")
    rows = [
        (
            label(point.value),
            str(len(point.records)),
            number(point.mean) + ("" if point.sd is None else f" ± {number(point.sd)}"),
            "–" if point.gain is None else f"{point.gain:+.2f}",
            number(point.nll, 4),
            "default" if point.value == curve.default else "",
        )
        for point in curve.points
    ]
    terminal.table(columns, rows, title=title, right=columns[1:5])
    if len({point.mean for point in curve.points}) == 1 < len(curve.points):
        terminal.say("  every value gives the same accuracy here; see NLL for what it does")


def save_curves(
    curves: Mapping[str, Curve], document: dict[str, Any], stem: Path, terminal: Terminal
) -> None:
    """Numbers to ``stem.json``, curves to ``stem.png`` if matplotlib is there; stdout for JSON."""
    from cliquetta.atomic import write_atomically
    from cliquetta.report.ablation_figure import ablation_figure
    from cliquetta.report.style import can_draw, to_file

    numbers, picture = Path(f"{stem}.json"), Path(f"{stem}.png")
    write_atomically(numbers, json.dumps(document, indent=1, ensure_ascii=False).encode())
    terminal.say(f"numbers: {numbers}")
    if can_draw():
        write_atomically(picture, to_file(ablation_figure(curves), "png"))
        terminal.say(f"curves: {picture}")
    else:
        terminal.say(
            "curves are drawn where matplotlib is installed: pip install cliquetta[report]"
        )
    terminal.document(document)


def finish(results: Sequence[RunResult], terminal: Terminal) -> None:
    """Warn of what looks wrong; end with the exit code of a grid that ran."""
    from cliquetta.cli.evaluate import warn_of_doubts

    records = [result.record for result in results if result.record is not None]
    warn_of_doubts(records, terminal)
    if len(records) < len(results):
        raise typer.Exit(FAILED)
    if any(record.skipped for record in records):
        raise typer.Exit(SKIPPED)
