"""``cliquetta evaluate``: methods on labelled datasets, recorded and resumable."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.checks import (
    check_classes,
    check_datasets,
    check_file,
    check_methods,
    check_model,
)
from cliquetta.cli.command import (
    RUNS,
    BatchSize,
    Bounds,
    Common,
    Fitted,
    Limit,
    Model,
    Out,
    Root,
    Seeds,
    Settings,
    Templates,
    Workers,
    read_cells,
    read_seeds,
    read_shard,
    split_list,
)
from cliquetta.cli.console import Terminal, count, number
from cliquetta.cli.executing import finish, run_grid
from cliquetta.errors import UserError
from cliquetta.evaluation.grid_files import find_grid
from cliquetta.evaluation.metric_table import METRICS
from cliquetta.model.names import choose_model

if TYPE_CHECKING:
    from cliquetta.evaluation.record import Record
    from cliquetta.evaluation.sweep import RunResult

EXAMPLES = """
cliquetta evaluate --dataset bundled@fog:3 --method tda,scap --seeds 0,1,2
cliquetta evaluate --dataset 'bundled@fog:3>bundled@contrast:4' --method scap --limit 512
cliquetta evaluate --dataset bundled@fog:3 --method domain_norm --order uneven --present 3
cliquetta evaluate --dataset bundled@fog:3 --order keff --present 1-4 --seeds 0,1,2
cliquetta evaluate --dataset bundled@fog:3 --order long-tail --imbalance 20
cliquetta evaluate --dataset bundled --classes cat,dog,frog,ship --unknown bundled
cliquetta evaluate --dataset bundled --method domain_norm,domain_norm/domains=1 --seeds 0,1,2
cliquetta evaluate --dataset folder:photos --method scap:paper-views --model ViT-B/16 --device cuda
cliquetta evaluate --dataset pets,dtd --root ~/data --model ViT-B/16 --templates openai-80
cliquetta evaluate --dataset imagenet --root ~/data --model ViT-B/16 --features ~/features
cliquetta evaluate --dataset features:photos.npz --text-features classes.npz --method tda,moon
cliquetta evaluate --dataset pets,dtd --root ~/data --model ViT-B/16 --ray auto --ray-gpus 0.5
"""


def evaluate(
    common: Common,
    dataset: Annotated[
        str | None, "Dataset ids, comma-separated; a>b streams b after a."
    ] = None,
    method: Annotated[
        str | None, "NAME, NAME:PRESET or NAME/FIELD=VALUE, comma-separated."
    ] = None,
    grid_file: Annotated[
        Path | None,
        typer.Option(
            "--grid",
            help="JSON file of grids, or a known one (ood, cross-domain, components, "
            "combination, leaderboard), "
            "instead of --dataset and --method.",
        ),
    ] = None,
    shard: Annotated[
        str, "With --grid: shard I of N of the streams, written I/N."
    ] = "1/1",
    model: Model = None,
    seeds: Seeds = "0",
    out: Out = RUNS,
    settings: Settings = None,
    fitted: Fitted = None,
    batch_size: BatchSize = 64,
    order: Annotated[
        str,
        "shuffled, sequential, correlated, separate, uneven, keff, long-tail, "
        "recurring (a>b>a), long, mixed (a+b).",
    ] = "shuffled",
    gamma: Annotated[
        float, "Order correlated: Dirichlet concentration; small is bursty."
    ] = 0.1,
    present: Annotated[
        str, "Number of classes in the stream (uneven) or in a batch (keff): 3, 1-4."
    ] = "3",
    imbalance: Annotated[
        float, "Order long-tail: most frequent class over the rarest."
    ] = 10.0,
    length: Annotated[int, Bounds(1), "Order long: images of the stream."] = 10_000,
    limit: Limit = None,
    view_seed: Annotated[
        int | None, Bounds(0), "Seed of the views of all runs. (default: the run's)"
    ] = None,
    templates: Templates = None,
    classes: Annotated[
        str | None, "Another class list (file, a,b,c or a known list), matched by name."
    ] = None,
    unknown: Annotated[
        str | None, "Open set: mix in this dataset's images of other classes."
    ] = None,
    text_features: Annotated[
        Path | None,
        "Text embeddings by class name (.npz, .safetensors): text stays fixed.",
    ] = None,
    root: Root = None,
    workers: Workers = None,
    baseline: Annotated[
        bool, typer.Option(help="Run zero_shot as well, to compare with.")
    ] = True,
    evidence: Annotated[
        bool,
        typer.Option(help="Keep cliques, attention maps and thumbnails for `report`."),
    ] = False,
    features: Annotated[
        Path | None, "Directory of cached features, for methods that need no more."
    ] = None,
    hold: Annotated[
        bool | None,
        typer.Option(
            "--hold/--no-hold",
            help="Keep pixels on the device for all runs; by default where there is room.",
        ),
    ] = None,
    ray: Annotated[
        str | None, "Run on a Ray cluster: its address, auto, or local."
    ] = None,
    ray_gpus: Annotated[
        float | None, Bounds(0), "With --ray: share of a GPU for each run."
    ] = None,
) -> None:
    """Run methods over datasets and score them.

    Every run is a folder with its record. An interrupted command continues where it
    stopped when it is run again; completed runs are reused.
    """
    if (grid_file is None) == (dataset is None):
        raise UserError(
            "give either --dataset, or --grid with a file that names datasets"
        )
    if grid_file is not None:
        find_grid(grid_file)
    check_methods(method, settings=settings or ())
    check_file(fitted, "--fitted")
    check_file(text_features, "--text-features")
    check_classes(classes, templates)
    if dataset is not None:
        ids = split_list(dataset, "datasets")
        check_datasets(ids, root, order=order)
        check_datasets([] if unknown is None else [unknown], root)
        features_only = text_features is not None and dataset.startswith("features:")
        if not features_only:
            model = choose_model(model, [*ids, *([] if unknown is None else [unknown])])
    if model is not None:
        check_model(model)

    from cliquetta.data.samplers import parse_present
    from cliquetta.evaluation.grid import RunSpec, grid, read_grid, shard_of
    from cliquetta.evaluation.sweep import RunContext
    from cliquetta.prompts.catalogue import read_prompts, read_templates

    if grid_file is not None:
        if method or fitted or settings:
            raise UserError(
                "--grid names the methods: leave out --method, --fitted and --set"
            )
        changes = {} if limit is None else {"limit": limit}
        listed = read_grid(find_grid(grid_file), root=str(root or ""), **changes)
        number, shards = read_shard(shard)
        specs = shard_of(listed, number, shards)
    else:
        assert dataset is not None
        base = RunSpec(
            "",
            "",
            model or "",
            batch_size=batch_size,
            order=order,
            gamma=gamma,
            present=parse_present(present),
            imbalance=imbalance,
            length=length,
            limit=limit,
            view_seed=view_seed,
            templates=read_templates(templates) if templates else None,
            classes=read_prompts(classes).names if classes else None,
            unknown=unknown,
            text_features=None if text_features is None else str(text_features),
            dtype=common.dtype,
        )
        specs = grid(
            read_cells(base, method, fitted, settings or ()),
            datasets=ids,
            seeds=read_seeds(seeds),
            baseline=baseline,
        )
    if features is not None and features.is_file():
        raise UserError(
            f"--features names a folder: evaluate with --dataset features:{features}"
        )
    device = common.device if ray else common.checked_device()

    context = RunContext(
        out=out,
        root=root,
        device=device,
        workers=workers,
        features=features,
        evidence=evidence,
        hold=hold,
    )
    results = run_grid(specs, context, common.terminal, ray=ray, gpus=ray_gpus)
    _report(results, out, common.terminal)
    finish(results, common.terminal)


def _report(results: "Sequence[RunResult]", out: Path, terminal: Terminal) -> None:
    """Print a row per dataset and method, and what could not be read."""
    groups: dict[tuple[str, str], list[Record]] = {}
    done = []
    for result in results:
        if result.record is not None:
            done.append(result.record)
            key = (result.record.dataset, result.spec.label)
            groups.setdefault(key, []).append(result.record)

    extra = _extra_metrics(done)
    columns = (
        "dataset",
        "method",
        "seeds",
        METRICS["top1"].heading,
        "vs zero_shot",
        *(METRICS[metric].heading for metric in extra),
        "images/s",
    )
    rows = []
    for (dataset, name), records in groups.items():
        rate = statistics.mean(r.throughput["images_per_second"] for r in records)
        row = (
            dataset,
            name,
            str(len(records)),
            _spread(records, "top1"),
            _difference(records, groups.get((dataset, "zero_shot"))),
            *(_spread(records, metric) for metric in extra),
            number(rate, 0),
        )
        rows.append(row)
    if rows:
        terminal.table(columns, rows, right=columns[2:])
    skipped = {entry["key"] for record in done for entry in record.skipped}
    if skipped:
        terminal.warn(
            f"{count(len(skipped), 'image')} could not be read: see the records"
        )
    if done:
        terminal.say(f"{count(len(done), 'run')} recorded in {out}")
    terminal.document([_plain(result, out) for result in results])


def _extra_metrics(records: "Sequence[Record]") -> list[str]:
    """Choose what is shown beside accuracy: calibration, or what a special stream asks for."""
    extra = []
    if any(record.settings["stream"]["order"] == "long-tail" for record in records):
        extra.append("macro_f1")
    if any("auroc" in record.metrics for record in records):
        extra += ["auroc", "fpr95"]
    return extra or ["ece"]


def _spread(records: "Sequence[Record]", metric: str) -> str:
    """Average over seeds, with the standard deviation where there are several."""
    values = [record.metrics[metric] for record in records if metric in record.metrics]
    mean = statistics.mean(values) if values else None
    sd = statistics.stdev(values) if len(values) > 1 else None
    return number(mean, sd=sd)


def _difference(records: "Sequence[Record]", plain: "Sequence[Record] | None") -> str:
    """Average the difference of top-1 to zero-shot, in points, over seeds that both have."""
    if not plain or plain[0].method == records[0].method:
        return "–"

    plain_top1 = {record.seed: record.metrics.get("top1") for record in plain}
    gains = []
    for record in records:
        top1 = record.metrics.get("top1")
        before = plain_top1.get(record.seed)
        if top1 is not None and before is not None:
            gains.append(top1 - before)
    return number(statistics.mean(gains) if gains else None, signed=True)


def _plain(result: "RunResult", out: Path) -> dict[str, Any]:
    """Write a result as JSON types."""
    record = result.record
    names = ("dataset", "method", "preset", "seed")
    outcome = {name: getattr(result.spec, name) for name in names}
    outcome["error"] = result.error or None
    if record is None:
        return outcome
    return outcome | {
        "record": str(out / record.id / "record.json"),
        "images": record.images,
        "skipped": len(record.skipped),
        "metrics": {k: v for k, v in record.metrics.items() if k != "per_class"},
        "images_per_second": record.throughput["images_per_second"],
    }
