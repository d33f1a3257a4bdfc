"""Accuracy of every method under shift, in one table, with zero-shot on the same images beside it.

    python benchmarks/accuracy.py --world micro --device cuda --seeds 0,1,2 --out DIR
    python benchmarks/accuracy.py --world micro --sets all15 --severities 3,5 --methods scap tent
    python benchmarks/accuracy.py --world real --shared DIR --real DIR --device cuda --out DIR
    python benchmarks/accuracy.py --world micro --stream correlated --batch 8 --methods all

``micro`` is the bundled model on bundled pictures; ``real`` is OpenAI's ViT-B/16 image tower with
fixed text (``real_sets.py`` says what must lie where). A method is written
``NAME[:PRESET][/FIELD=VALUE]...``; ``all`` stands for every registered one with its defaults. All
see the same pixels, templates and views: methods with several views get ``--views`` of one kind.

Each finished (set, method, seed) is a line of ``DIR/cells.jsonl`` at once; started again with the
same DIR, the program skips what is there. ``--deadline`` stops it before a cell that would not fit.
Labels reach the score only (and the order of a ``correlated`` or ``uneven`` stream).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from comparison.bench import Bench
from comparison.contestants import Contestant, parse_methods
from comparison.held import STREAMS, Held
from comparison.log import Log
from comparison.worlds import SHOTS, MicroWorld, RealWorld, World

from cliquetta.methods._shared.state import plain_config
from cliquetta.methods.registry import get_method


def partners(ids: Sequence[str], world: World) -> dict[str, str | None]:
    """For each set another one with the same class list to change to: the next, round the list."""
    names = {id: world.draw(id, 0).names for id in ids}
    found: dict[str, str | None] = {}
    for at, id in enumerate(ids):
        later = [*ids[at + 1 :], *ids[:at]]
        found[id] = next((other for other in later if names[other] == names[id]), None)
    return found


def setting_of(options: argparse.Namespace, world: World) -> str:
    """What all cells of one table share, in words."""
    stream = options.stream
    if stream == "uneven":
        stream += f" ({options.present} classes present)"
    if stream == "long":
        stream += f" ({options.length} images)"
    limit = f", {options.limit} images a set" if options.limit else ""
    views = f"view methods: {options.views or world.views} views, {options.view_kind}"
    return (
        f"{world.model.id}, {options.dtype}, stream {stream}, batch {options.batch}{limit}, {views}"
    )


class Comparison:
    """Every set, method and seed that is not recorded yet, until the deadline."""

    def __init__(
        self, bench: Bench, contestants: Sequence[Contestant], log: Log, deadline: float
    ) -> None:
        self.bench, self.contestants, self.log, self.deadline = bench, contestants, log, deadline
        self.setting = setting_of(bench.options, bench.world)
        self.made = made_with(bench.options, bench.world)
        self.slowest: dict[str, float] = {}
        for cell in log.cells.values():
            if cell["setting"] == self.setting:
                self._took(cell["method"], cell["seconds"])
        self.left = 0

    def run(self) -> None:
        options, world = self.bench.options, self.bench.world
        ids = world.sets(options.sets, options.severities)
        others = partners(ids, world) if options.stream == "change" else dict.fromkeys(ids)
        for id in ids:
            other = others[id]
            if options.stream == "change" and other is None:
                print(f"# {id}: no other set has its class list, nothing to change to", flush=True)
                continue
            name = id if other is None else f"{id} > {other} > {id}"
            todo = self._missing(name)
            if todo and time.perf_counter() < self.deadline:
                held, *rest = self.bench.hold(*(x for x in (id, other) if x is not None))
                for one, seed, key in todo:
                    about = {"key": key, "set": name, "kind": world.kind(id)}
                    self._run_cell(one, seed, about, held, rest[0] if rest else None)
                self.log.tables()
            else:
                self.left += len(todo)

    def _took(self, label: str, seconds: float) -> None:
        self.slowest[label] = max(seconds, self.slowest.get(label, 0))

    def _missing(self, name: str) -> list[tuple[Contestant, int, str]]:
        """Method, seed and key of the cells of a set that are still to be run."""
        options = self.bench.options
        found = []
        for one in self.contestants:
            epochs = options.fit_epochs if get_method(one.name).fit is not None else None
            for seed in options.seeds:
                what = [self.setting, name, one.label, one.limit, seed, epochs]
                what.append(plain_config(one.config))
                key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
                if key not in self.log.cells:
                    found.append((one, seed, key))
        return found

    def _run_cell(
        self, one: Contestant, seed: int, about: dict[str, Any], held: Held, other: Held | None
    ) -> None:
        """Run, record and print one cell; a failure is printed and the others go on."""
        name, start = about["set"], time.perf_counter()
        if start + self.slowest.get(one.label, 0) > self.deadline:
            self.left += 1
            return
        try:
            scores = self.bench.run(one, held, other, seed)
        except Exception as error:
            print(f"! {name} {one.label} {seed}: {type(error).__name__}: {error}", flush=True)
            self.log.skipped[f"{one.label} on {name}"] = f"{type(error).__name__}: {error}"
            return
        seconds = time.perf_counter() - start
        self._took(one.label, seconds)
        about |= {"setting": self.setting, "method": one.label, "seed": seed, "made": self.made}
        self.log.add({**about, **scores, "seconds": seconds, "config": plain_config(one.config)})
        print(
            f"{name:24} {one.label:24} seed {seed}  {scores['top1']:6.2f} {scores['gain']:+6.2f}  "
            f"ECE {scores['ece']:5.1f}  {scores['images_per_s']:8.0f} images/s  {seconds:5.1f} s",
            flush=True,
        )


def made_with(options: argparse.Namespace, world: World) -> str:
    """Date, hardware and command of a run; folders are nobody's business."""
    cuda = world.model.device.type == "cuda"
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    folders = {str(f) for f in (options.shared, options.real, options.out) if f is not None}
    words = " ".join("DIR" if word in folders else word for word in sys.argv[1:])
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    fitted = ""
    if world.examples is not None:
        fitted = f" Few-shot methods: fitted once, on {SHOTS} clean training images a class."
    return (
        f"{today}, {machine}, torch {torch.__version__}: "
        f"`python benchmarks/accuracy.py {words}`.{fitted}"
    )


def main() -> int:
    options = parse_arguments()
    began = time.perf_counter()
    world: World
    if options.world == "micro":
        world = MicroWorld(options.device, options.dtype)
    else:
        world = RealWorld(options.shared, options.real, options.device, options.dtype)
    contestants, skipped = parse_methods(options.methods, options, world)
    log = Log(options.out)
    log.skipped.update(skipped)
    for name, reason in skipped.items():
        print(f"# not run: {name}: {reason}", flush=True)
    comparison = Comparison(Bench(world, options), contestants, log, began + options.deadline)
    comparison.run()
    print(log.tables())
    if comparison.left:
        print(f"# {comparison.left} cells left at the deadline: run again with the same --out")
    print(f"# {time.perf_counter() - began:.0f} s in all")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    words = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    parser.add_argument("--world", choices=("micro", "real"), default="micro")
    parser.add_argument("--methods", nargs="+", default=["all"], help="NAME[:PRESET][/FIELD=VALUE]")
    parser.add_argument("--sets", "--shifts", type=words, default=[], help="comma-separated")
    parser.add_argument("--severities", type=numbers, default=[3], help="of shifts without one")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--stream", choices=STREAMS, default="iid", help=str(STREAMS))
    parser.add_argument("--present", type=int, default=3, help="classes of an uneven stream")
    parser.add_argument("--length", type=int, default=10_000, help="images of a long stream")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, help="images of each set; all if not given")
    parser.add_argument("--limits", default="", help="fewer for slow methods: dart=128,watt=512")
    parser.add_argument("--views", type=int, help="of view methods; 16 on micro, 64 on real")
    parser.add_argument("--view-kind", default="resized-crop", help="for all, or each its 'own'")
    parser.add_argument("--fit-epochs", type=int, help="of few-shot methods; the authors' if unset")
    parser.add_argument("--shared", type=Path, help="real: weights, text bank, dev.npz, dev.json")
    parser.add_argument("--real", type=Path, help="real: index.json and packs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="micro fp32, real bf16")
    parser.add_argument(
        "--workers", type=int, default=min(16, os.cpu_count() or 1), help="threads that read"
    )
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path, help="cells.jsonl, results.json, results.md")
    options = parser.parse_args()
    if options.world == "real" and options.shared is None:
        parser.error("--world real needs --shared DIR (weights, text bank) and --real DIR (packs)")
    if options.dtype is None:
        options.dtype = "fp32" if options.world == "micro" else "bf16"
    return options


if __name__ == "__main__":
    sys.exit(main())
