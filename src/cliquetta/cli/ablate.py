"""``cliquetta ablate``: one field of a method's config, several values, a table and a curve."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cliquetta.atomic import write_atomically
from cliquetta.cli.checks import check_datasets, check_methods, check_model
from cliquetta.cli.command import (
    BatchSize,
    Common,
    Limit,
    Model,
    Out,
    Root,
    Seeds,
    Settings,
    Workers,
    read_seeds,
    read_settings,
    split_list,
)
from cliquetta.cli.console import Terminal, number
from cliquetta.cli.executing import finish, run_grid
from cliquetta.evaluation.metric_table import METRICS
from cliquetta.model.names import choose_model

if TYPE_CHECKING:
    from cliquetta.evaluation.ablation import Curve

_NAME_LENGTH = 80  # characters of a file's name
EXAMPLES = """
cliquetta ablate --method scap --field threshold --values 0.6,0.7,0.8,0.9 --dataset bundled@fog:3
cliquetta ablate --method scap --field blocks --values '0;1;0,1' --dataset bundled --limit 256
cliquetta ablate --method tda --field positive_alpha --values 1,2,4 --dataset pets --root ~/data \
--model ViT-B/16 --seeds 0,1,2
cliquetta ablate --method tent --field batch_size --values 8,32,128 --dataset bundled@fog:3
"""


def ablate(
    common: Common,
    field: Annotated[
        str, "Config field (see `cliquetta methods NAME`), or batch_size."
    ],
    values: Annotated[
        str, "Values, comma-separated; by ; where values contain commas."
    ],
    dataset: Annotated[str, "Dataset ids, comma-separated; a curve for each."],
    method: Annotated[str | None, "NAME or NAME:PRESET. (default: domain_norm)"] = None,
    model: Model = None,
    seeds: Seeds = "0",
    out: Out = Path("ablations"),
    settings: Settings = None,
    batch_size: BatchSize = 64,
    limit: Limit = None,
    root: Root = None,
    workers: Workers = None,
) -> None:
    """Vary one field of a method's config, and nothing else.

    Every value is a recorded run: completed runs are reused, and `cliquetta compare`
    reads them. The curve is saved as a PNG in the output directory where matplotlib is
    installed.
    """
    datasets = split_list(dataset, "datasets")
    varied = [] if field == "batch_size" else [f"{field}="]
    check_methods(method, settings=[*(settings or ()), *varied])
    check_datasets(datasets, root)
    model = choose_model(model, datasets)
    check_model(model)

    from cliquetta.evaluation.ablation import ablation, curve
    from cliquetta.evaluation.grid import RunSpec, with_method, with_options
    from cliquetta.evaluation.sweep import RunContext
    from cliquetta.methods.building.registry import DEFAULT_METHOD
    from cliquetta.report.curves import curves_figure
    from cliquetta.report.style import can_draw, to_file

    method = method or DEFAULT_METHOD
    base = RunSpec(
        "", "", model, batch_size=batch_size, limit=limit, dtype=common.dtype
    )
    base = with_options(with_method(base, method), read_settings(settings or ()))

    # One ablation per dataset; all their runs are one grid.
    varied_values = split_values(values)
    each_seed = read_seeds(seeds)
    ablations = {
        id: ablation(replace(base, dataset=id), field, varied_values, each_seed)
        for id in datasets
    }
    context = RunContext(
        out=out, root=root, device=common.checked_device(), workers=workers
    )
    specs = [spec for each in ablations.values() for spec in each.specs]
    results = run_grid(specs, context, common.terminal)
    curves = {id: curve(each, results) for id, each in ablations.items()}
    for id, points in curves.items():
        show_curve(points, common.terminal, title=f"{method} on {id}")

    plain = [{"dataset": id, **points.plain()} for id, points in curves.items()]
    document = {"method": method, "curves": plain}
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"ablate-{method}-{field}-{dataset}")
    stem = stem[:_NAME_LENGTH]
    numbers = out / f"{stem}.json"
    text = json.dumps(document, indent=1, ensure_ascii=False)
    write_atomically(numbers, text.encode())
    common.terminal.say(f"numbers: {numbers}")
    common.terminal.document(document)
    if can_draw():
        picture = out / f"{stem}.png"
        titles = {f"{field} on {id}": points for id, points in curves.items()}
        write_atomically(picture, to_file(curves_figure(titles), "png"))
        common.terminal.say(f"curves: {picture}")
    else:
        common.terminal.say(
            "curves are drawn where matplotlib is installed: pip install cliquetta[report]"
        )
    finish(results, common.terminal)


def split_values(text: str) -> list[str]:
    """Split ``a,b`` or, where values hold commas themselves, ``a;b,c``."""
    parts = text.split(";" if ";" in text else ",")
    return [part.strip() for part in parts if part.strip()]


def show_curve(curve: "Curve", terminal: Terminal, *, title: str) -> None:
    """Show the points of a curve as a table."""
    from cliquetta.evaluation.comparison import value_text

    columns = (
        curve.field,
        "seeds",
        METRICS["top1"].heading,
        "vs zero_shot",
        METRICS["nll"].heading,
        "note",
    )
    rows = []
    for point in curve.points:
        row = (
            value_text(point.value),
            str(len(point.records)),
            number(point.mean, sd=point.sd),
            number(point.gain, signed=True),
            number(point.nll, 4),
            "default" if point.value == curve.default else "",
        )
        rows.append(row)
    terminal.table(columns, rows, title=title, right=columns[1:5])
    if len({point.mean for point in curve.points}) == 1 < len(curve.points):
        terminal.say(
            "  every value gives the same accuracy here; see NLL for what it does"
        )
