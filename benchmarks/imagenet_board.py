"""Run the grids of ImageNet with many processes that share one GPU.

    python -m benchmarks.imagenet_board run --root ROOT --out RUNS --features KEPT --to FOLDER
    python -m benchmarks.imagenet_board pack --root ROOT --out RUNS --to FOLDER

``run`` does what ``python -m benchmarks.results leaderboard --run --grid leaderboard-imagenet``
does with ``--shard``, but a process that has finished a stream takes the next one, in
the order of the grid file, so that what comes first there is recorded first and no
process waits for another. With ``--seconds`` it starts no run after that time and ends
processes half a minute later. A second ``run`` over the same folder goes on.

Every minute, and at the end, finished records are packed (``pack`` does it alone) as
``leaderboard-imagenet.json``, which belongs into ``docs/results``, and as
``leaderboard-imagenet.npz``: of every run the predicted classes of its images by their
sorted names. ``--grid`` names another grid, such as ``published-imagenet``.
``benchmarks.real_data`` makes ROOT.
"""

import argparse
import io
import json
import multiprocessing
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results.grid_files import grid_file
from benchmarks.results.pairing import add_changes
from cliquetta.atomic import write_atomically
from cliquetta.evaluation.grid import BASELINE, ROOT, RunSpec, read_grid
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.record import Record, list_records, pack_records
from cliquetta.evaluation.sweep import RunContext

GRID = "leaderboard-imagenet"
PACK_SECONDS = 60
GRACE_SECONDS = 30
"""Time that runs have after the deadline."""


@dataclass(frozen=True)
class Plan:
    """What every process is told."""

    grid: str  # name of a grid, or a file
    root: Path
    out: Path
    features: Path | None
    device: str
    workers: int  # readers of each process
    deadline: float  # time after which no run is started
    only: str  # runs in whose text this occurs; empty for all


def read_streams(plan: Plan) -> list[list[RunSpec]]:
    """List the runs of the grid in its order, those of a stream that follow one another together.

    A stream comes again where a later block of the grid file has it, too: slow methods.
    """
    path = Path(plan.grid) if plan.grid.endswith(".json") else grid_file(plan.grid)
    specs = read_grid(path, root=str(plan.root))
    chosen = [spec for spec in specs if plan.only in describe(spec, plan)]

    def stream(spec: RunSpec) -> tuple[str, str, int, int | None]:
        return spec.dataset, spec.order, spec.batch_size, spec.limit

    return [list(runs) for _, runs in groupby(chosen, key=stream)]


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
            print(
                f"{number:2d} {run_one(context, spec)} {describe(spec, plan)}",
                flush=True,
            )


def run_one(context: RunContext, spec: RunSpec) -> str:
    """Run one cell and say what came of it; one that fails does not stop the others."""
    began = time.monotonic()
    try:
        record = context.run(spec)
        outcome = f"top-1 {record.metrics['top1']:.2f}"
    except Exception as error:
        outcome = f"FAILED {type(error).__name__}: {error}"
    return f"{time.monotonic() - began:6.1f} s {outcome}"


def run(plan: Plan, processes: int, packer: "Packer") -> None:
    """Run the grid with some processes, and pack what is finished every minute."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    workers = []
    for number in range(processes):
        workers.append(context.Process(target=work, args=(plan, number, taken)))
    for worker in workers:
        worker.start()

    packed = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        time.sleep(1)
        if time.monotonic() - packed > PACK_SECONDS:
            packer.update()
            packed = time.monotonic()
        if time.time() > plan.deadline + GRACE_SECONDS:
            for worker in workers:
                worker.terminate()
            break
    for worker in workers:
        worker.join()
    packer.update()
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)


@dataclass
class Packer:
    """Finished records of a folder of runs, in files that may be taken at any time."""

    grid: str
    root: Path
    out: Path
    to: Path
    records: dict[str, Record] = field(default_factory=dict)
    classes: dict[str, Any] = field(default_factory=dict)

    def update(self) -> None:
        """Add the runs that were finished since the last time, and write both files."""
        new = []
        for record in list_records(self.out):
            if record.status == "finished" and record.id not in self.records:
                new.append(record)
        plain = [
            record for record in self.records.values() if record.method == BASELINE
        ]
        for record in add_changes([*plain, *new], self.out):
            self.records[record.id] = record
        for record in new:
            predictions = load_predictions(self.out / record.id)
            order = np.argsort(predictions.keys)
            best = predictions.classes[order, 0]
            self.classes[record.id] = best.astype(np.uint16)

        self.to.mkdir(parents=True, exist_ok=True)
        packed = pack_records(self.records.values())
        packed = packed.replace(json.dumps(str(self.root))[1:-1], ROOT)
        write_atomically(self.to / f"{self.grid}.json", packed.encode())
        file = io.BytesIO()
        np.savez_compressed(file, **self.classes)
        write_atomically(self.to / f"{self.grid}.npz", file.getvalue())
        print(f"{len(self.records)} records in {self.to}", flush=True)


def main() -> None:
    """Run the grid, or pack what was run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "pack"])
    parser.add_argument("--root", type=Path, default=Path("root"))
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--to", type=Path, default=Path("build"))
    parser.add_argument("--grid", default=GRID)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    packer = Packer(
        grid=Path(options.grid).stem, root=options.root, out=options.out, to=options.to
    )
    if options.command == "pack":
        packer.update()
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
    run(plan, options.processes, packer)


if __name__ == "__main__":
    main()
