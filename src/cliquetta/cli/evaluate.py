"""``cliquetta evaluate``: methods on labelled data sets, recorded and resumable."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import FAILED, SKIPPED, Common, command
from cliquetta.cli.console import Terminal, count, number
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.record import Record
    from cliquetta.evaluation.sweep import RunResult

_EXAMPLES = """
cliquetta evaluate --dataset bundled@fog:3 --method tda,scap --seeds 0,1,2

cliquetta evaluate --dataset 'bundled@fog:3>bundled@contrast:4' --method scap --limit 512

cliquetta evaluate --dataset folder:photos --method scap:paper-views --model ViT-B/16 --device cuda

cliquetta evaluate --dataset pets,dtd --root ~/data --method zero_shot --templates openai-80

cliquetta evaluate --dataset imagenet --root ~/data --method tda,dmn --features ~/features

cliquetta evaluate --dataset pets,dtd,cars --method scap --seeds 0,1,2 --ray auto --ray-gpus 0.5
"""


def add_to(app: typer.Typer) -> None:
    """Enter the command."""
    command(app, "evaluate", examples=_EXAMPLES)(evaluate)


def evaluate(
    common: Common,
    dataset: Annotated[
        str, typer.Option(help="Ids, several with commas; a>b for one after the other in a stream.")
    ],
    method: Annotated[
        str | None,
        typer.Option(help="Names, several with commas; name:preset for a preset."),
    ] = None,
    model: Annotated[str, typer.Option(help="See `cliquetta models`, or a path.")] = "micro",
    seeds: Annotated[str, typer.Option(help="Seeds of order, views and methods: 0,1,2.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder of runs; finished ones are kept.")] = Path(
        "runs"
    ),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value of the one method's config; repeat."),
    ] = None,
    fitted: Annotated[
        Path | None, typer.Option(help="A file of `cliquetta fit`, instead of --method.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    order: Annotated[
        str,
        typer.Option(
            help="shuffled, sequential, correlated, uneven, recurring (a>b>a), long, mixed (a+b)."
        ),
    ] = "shuffled",
    gamma: Annotated[
        float, typer.Option(help="Order correlated: Dirichlet concentration; small is bursty.")
    ] = 0.1,
    present: Annotated[
        str, typer.Option(help="Order uneven: number of classes that occur, or a range 1-4.")
    ] = "3",
    length: Annotated[int, typer.Option(min=1, help="Order long: images of the stream.")] = 10_000,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many images.")] = None,
    templates: Annotated[
        list[str] | None,
        typer.Option(help="A text with {}, a file, or a set; the data set's own if not given."),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where data sets of yours lie.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Threads that decode images.")] = 2,
    baseline: Annotated[bool, typer.Option(help="Run zero_shot as well, to compare with.")] = True,
    evidence: Annotated[
        bool, typer.Option(help="Keep cliques, attention and small pictures for `report`.")
    ] = False,
    features: Annotated[
        Path | None,
        typer.Option(help="Folder of encoded features: made once, then read by the methods."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Run on a Ray cluster: its address, auto, or local.")
    ] = None,
    ray_gpus: Annotated[
        float | None, typer.Option(min=0, help="With --ray: share of a GPU for each run.")
    ] = None,
) -> None:
    """Run methods over data sets and score them; one folder per run, with its record.

    A command that was broken off continues where it stopped when it is given again, and runs
    that are finished already are read, not repeated.
    """
    from cliquetta.cli.executing import choose_executor, run_cells
    from cliquetta.cli.options import split_list
    from cliquetta.data.samplers import get_sampler, parse_present
    from cliquetta.evaluation.sweep import RunContext, RunSpec, grid
    from cliquetta.prompts.catalogue import read_templates

    base = _base(method, fitted, settings or ())
    spec = RunSpec(
        **base,
        dataset="",
        model=model,
        batch_size=batch_size,
        order=get_sampler(order)[0],
        gamma=gamma,
        present=parse_present(present),
        length=length,
        limit=limit,
        templates=read_templates(templates) if templates else None,
        dtype=common.dtype,
    )
    specs = grid(
        spec,
        datasets=split_list(dataset, "data sets"),
        methods=split_list(method or base["method"], "methods"),
        seeds=read_seeds(seeds),
        baseline=baseline,
    )
    device = common.device if ray else common.place()
    context = RunContext(out, root, device, workers, features=features, evidence=evidence)
    with choose_executor(context, common.terminal, ray=ray, gpus=ray_gpus) as choice:
        for first in {cell.dataset: cell for cell in reversed(specs)}.values():
            choice.checked.prepare(first)  # bad names end the command before the first run
        results = run_cells(specs, choice.context, choice.terminal, choice.executor)
    if not choice.leads:
        return
    _report(results, out, common.terminal)
    if any(result.record is None for result in results):
        raise typer.Exit(FAILED)
    if any(result.record and result.record.skipped for result in results):
        raise typer.Exit(SKIPPED)


def read_seeds(given: str) -> list[int]:
    """The whole numbers of ``0,1,2``."""
    from cliquetta.cli.options import split_list

    try:
        return [int(seed) for seed in split_list(given, "seeds")]
    except ValueError:
        raise UserError(f"--seeds takes whole numbers such as 0,1,2, got {given!r}") from None


def _base(method: str | None, fitted: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """The fields of a run that belong to one method only; ``--set`` needs to know which."""
    from cliquetta.cli.options import read_method, split_list

    names = [] if method is None else split_list(method, "methods")
    if len(names) > 1 and (settings or fitted):
        raise UserError(f"--set and --fitted are for one method, got {', '.join(names)}")
    name, _, preset = names[0].partition(":") if names else ("", "", "")
    choice = read_method(name or None, preset or None, settings, fitted)
    pairs = [setting.partition("=") for setting in settings]
    return {
        "method": choice.name,
        "preset": preset or None,
        "options": tuple((key.strip(), value.strip()) for key, _, value in pairs),
        "fitted": None if fitted is None else str(fitted),
    }


def _report(results: Sequence[RunResult], out: Path, terminal: Terminal) -> None:
    done = [(result.spec, result.record) for result in results if result.record is not None]
    groups: dict[tuple[str, str], list[Record]] = {}
    for spec, record in done:
        name = spec.method + (f":{spec.preset}" if spec.preset else "")
        groups.setdefault((record.dataset, name), []).append(record)
    columns = ("data set", "method", "seeds", "top-1 %", "vs zero_shot", "ECE %", "images/s")
    rows = [
        (
            dataset,
            name,
            str(len(records)),
            _spread(records, "top1"),
            _difference(records, groups.get((dataset, "zero_shot"))),
            _spread(records, "ece"),
            number(statistics.mean(r.throughput["images_per_second"] for r in records), 0),
        )
        for (dataset, name), records in groups.items()
    ]
    if rows:
        terminal.table(columns, rows, right=columns[2:])
    warn_of_doubts([record for _, record in done], terminal)
    skipped = {entry["key"] for _, record in done for entry in record.skipped}
    if skipped:
        terminal.warn(f"{count(len(skipped), 'image')} could not be read: see the records")
    if done:
        terminal.say(f"{count(len(done), 'run')} recorded in {out}")
    terminal.document([_plain(result, out) for result in results])


def warn_of_doubts(records: Sequence[Record], terminal: Terminal) -> None:
    """Warn where zero-shot is so low that labels are more likely wrong than the model."""
    from cliquetta.evaluation.sanity import near_chance

    plain = {r.dataset: r for r in reversed(records) if r.method == "zero_shot"}
    for dataset, first in reversed(plain.items()):
        if "top1" not in first.metrics or "@" in dataset:
            continue
        classes = int(first.settings["prompts"]["classes"])
        doubt = near_chance(first.metrics["top1"] / 100, classes=classes, images=first.images)
        if doubt:
            terminal.warn(f"{dataset}: {doubt}")


def _spread(records: Sequence[Record], metric: str) -> str:
    """Mean over seeds, with the standard deviation where there are several."""
    values = [record.metrics[metric] for record in records if metric in record.metrics]
    if not values:
        return "–"
    mean = number(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {number(statistics.stdev(values))}"


def _difference(records: Sequence[Record], plain: Sequence[Record] | None) -> str:
    """Mean difference of top-1 to zero-shot, in points, over the seeds that both have."""
    if not plain or plain[0].method == records[0].method:
        return "–"
    before = {record.seed: record.metrics.get("top1") for record in plain}
    pairs = [(record.metrics.get("top1"), before.get(record.seed)) for record in records]
    gains = [now - then for now, then in pairs if now is not None and then is not None]
    return f"{statistics.mean(gains):+.2f}" if gains else "–"


def _plain(result: RunResult, out: Path) -> dict[str, Any]:
    """An result as JSON types."""
    record = result.record
    answer: dict[str, Any] = {
        "dataset": result.spec.dataset,
        "method": result.spec.method,
        "preset": result.spec.preset,
        "seed": result.spec.seed,
        "error": result.error or None,
    }
    if record is None:
        return answer
    return answer | {
        "record": str(out / record.id / "record.json"),
        "images": record.images,
        "skipped": len(record.skipped),
        "metrics": {k: v for k, v in record.metrics.items() if k != "per_class"},
        "images_per_second": record.throughput["images_per_second"],
    }
