"""Run the grids of ImageNet with many processes that share one GPU.

    python -m benchmarks.imagenet_board run --root ROOT --out RUNS --features KEPT --processes 10
    python -m benchmarks.imagenet_board pack --root ROOT --out RUNS --to FOLDER

``run`` does what ``cliquetta reproduce leaderboard --run --grid leaderboard-imagenet`` does with
``--shard``, but a process that has finished a stream takes the next one, in the order of the grid
file, so that what comes first there is recorded first and no process waits for another. With
``--seconds`` it starts no run after that time. A second ``run`` over the same folder goes on.
``pack`` writes the finished records as ``leaderboard-imagenet.json``, which belongs into
``docs/results``, and ``leaderboard-imagenet.npz``: of every run the predicted classes of its images
by their sorted names. Records get the numbers of images ``repaired`` and ``broken`` against
zero-shot on the same stream, of which the error of a gain is computed. ``--grid`` names another
grid, such as ``published-imagenet``. ``benchmarks.real_data`` makes ROOT.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cliquetta.evaluation.comparison import grouped
from cliquetta.evaluation.grid import ROOT, RunSpec, packaged_grid, read_grid
from cliquetta.evaluation.pairing import add_changes
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.record import list_records, pack_records
from cliquetta.evaluation.sweep import RunContext

GRID = "leaderboard-imagenet"


@dataclass(frozen=True)
class Plan:
    """What every process is told."""

    grid: str  # name of a packaged grid, or a file
    root: Path
    out: Path
    features: Path | None
    device: str
    workers: int  # readers of each process
    deadline: float  # time after which no run is started
    only: str  # runs in whose text this occurs; empty for all


def read_streams(plan: Plan) -> list[list[RunSpec]]:
    """List the runs of the grid by stream, in the order of the grid file."""
    path = Path(plan.grid) if plan.grid.endswith(".json") else packaged_grid(plan.grid)
    specs = read_grid(path, root=str(plan.root))
    chosen = [spec for spec in specs if plan.only in describe(spec, plan)]
    streams = grouped(chosen, lambda spec: (spec.dataset, spec.order, spec.batch_size, spec.limit))
    return list(streams.values())


def describe(spec: RunSpec, plan: Plan) -> str:
    """Name a run in a line."""
    name = str(spec).replace(f"tar:{plan.root}/tar/", "")
    return f"{spec.order} batch {spec.batch_size} {name}"


def work(plan: Plan, number: int, taken: Any) -> None:
    """Run streams until none is left or the time is over.

    Args:
        plan: What to run.
        number: Number of this process, for its lines.
        taken: Counter of the streams that were taken by any process.

    """
    torch.set_num_threads(1)
    context = RunContext(
        out=plan.out,
        device=plan.device,
        workers=plan.workers,
        features=plan.features,
    )
    streams = read_streams(plan)
    while True:
        with taken.get_lock():
            index = taken.value
            taken.value += 1
        if index >= len(streams):
            return
        # Pixels of the stream are held for all of its runs.
        context.expect(streams[index])
        for spec in streams[index]:
            if time.time() > plan.deadline:
                return
            print(f"{number:2d} {run_one(context, spec)} {describe(spec, plan)}", flush=True)


def run_one(context: RunContext, spec: RunSpec) -> str:
    """Run one cell and say what came of it; one that fails does not stop the others."""
    began = time.monotonic()
    try:
        record = context.run(spec)
        outcome = f"top-1 {record.metrics['top1']:.2f}"
    except Exception as error:
        outcome = f"FAILED {type(error).__name__}: {error}"
    return f"{time.monotonic() - began:6.1f} s {outcome}"


def run(plan: Plan, processes: int) -> None:
    """Run the grid with some processes."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    workers = [
        context.Process(target=work, args=(plan, number, taken)) for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{time.monotonic() - began:.0f} s in all")


def pack(grid: str, root: Path, out: Path, to: Path) -> None:
    """Write finished records and predicted classes."""
    to.mkdir(parents=True, exist_ok=True)
    records = [record for record in list_records(out) if record.status == "finished"]
    packed = pack_records(add_changes(records, out)).replace(json.dumps(str(root))[1:-1], ROOT)
    (to / f"{grid}.json").write_text(packed, encoding="utf-8")
    classes: dict[str, Any] = {}
    for record in records:
        predictions = load_predictions(out / record.id)
        order = np.argsort(predictions.keys)
        classes[record.id] = predictions.classes[order, 0].astype(np.uint16)
    np.savez_compressed(to / f"{grid}.npz", **classes)
    print(f"{len(records)} records in {to}")


def main() -> None:
    """Run the grid, or pack what was run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "pack"])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=Path("build"))
    parser.add_argument("--grid", default=GRID)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.grid, options.root, options.out, options.to)
        return
    plan = Plan(
        grid=options.grid,
        root=options.root,
        out=options.out,
        features=options.features,
        device=options.device,
        workers=options.workers,
        deadline=time.time() + options.seconds,
        only=options.only,
    )
    run(plan, options.processes)


if __name__ == "__main__":
    main()
