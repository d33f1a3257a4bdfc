"""Answers of candidate prompts on the development streams, kept to choose settings from them.

    python benchmarks/domain_study.py --world micro --device cuda --out DIR \
        --methods scap_domain/vote=0 scap_domain/vote=0/teachers=1

Only development shifts occur: the bundled set with Gaussian noise, defocus blur, contrast and JPEG;
edges and cue-conflict, and CIFAR images with those four shifts, on the real tower. For each stream
the file ``WORLD-PART.npz`` holds labels, plain features, early features (what a domain may be told
by) and the log-probabilities of every candidate and seed. How answers are mixed, voted on or chosen
between can then be studied without the tower (docs/research/domain-prompt.md).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison.contestants import parse_methods
from comparison.held import Held, Segment, cut_stream
from comparison.worlds import MicroWorld, RealWorld, World
from torch import Tensor

from cliquetta.errors import UnknownNameError
from cliquetta.methods.registry import create_method
from cliquetta.methods.scap_domain.domains import signature
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.prompts.catalogue import class_names
from cliquetta.prompts.classes import ClassPrompts

HALF = np.float16
SIGNED = 64
"""Images of a stream whose early features are kept."""


@dataclass(frozen=True)
class Study:
    """One development stream."""

    name: str
    set: str
    kind: str = "iid"
    batch: int = 64
    limit: int = 1280
    present: int = 3
    other: str | None = None
    distractors: bool = False
    """Ask among CIFAR-100's names, too."""


MICRO = (
    *(Study(f"gauss{s}", f"gaussian_noise:{s}") for s in (1, 3, 5)),
    *(Study(f"defoc{s}", f"defocus_blur:{s}") for s in (2, 5)),
    *(Study(f"contr{s}", f"contrast:{s}") for s in (2, 5)),
    *(Study(f"jpeg{s}", f"jpeg_compression:{s}") for s in (1, 5)),
    Study("gauss3-corr", "gaussian_noise:3", "correlated"),
    Study("defoc5-corr", "defocus_blur:5", "correlated"),
    Study("contr2-corr", "contrast:2", "correlated"),
    Study("gauss3-3of10", "gaussian_noise:3", "uneven", limit=2000),
    Study("defoc5-3of10", "defocus_blur:5", "uneven", limit=2000),
    Study("jpeg5-3of10", "jpeg_compression:5", "uneven", limit=2000),
    Study("contr2-3of10", "contrast:2", "uneven", limit=2000),
    Study("defoc4-10of110", "defocus_blur:4", distractors=True),
    Study("jpeg3-10of110", "jpeg_compression:3", distractors=True),
    Study("gauss3-b8", "gaussian_noise:3", batch=8, limit=640),
    Study("jpeg5-b8", "jpeg_compression:5", batch=8, limit=640),
    Study("gauss3-b256", "gaussian_noise:3", batch=256, limit=2000),
    Study("gauss3-contr2", "gaussian_noise:3", "change", other="contrast:2"),
    Study("jpeg1-defoc5", "jpeg_compression:1", "change", other="defocus_blur:5"),
    Study("gauss3-long", "gaussian_noise:3", "long", limit=7680),
    Study("contr2-long", "contrast:2", "long", limit=7680),
)
REAL = (
    Study("edges", "edges"),
    Study("edges-16of80", "edges/80"),
    Study("cue", "cue-conflict", limit=640),
    Study("cue-16of80", "cue-conflict/80", limit=640),
    Study("cue-5of80", "cue-conflict/80", "uneven", present=5),
    Study("cue-5of16", "cue-conflict", "uneven", present=5),
    Study("cue-corr", "cue-conflict", "correlated", limit=640),
    Study("cifar-gauss3", "cifar10-8@gaussian_noise:3", limit=768),
    Study("cifar-defoc5", "cifar10-8@defocus_blur:5", limit=768),
    Study("cifar-contr5", "cifar10-8@contrast:5", limit=768),
    Study("cifar-jpeg3", "cifar10-8@jpeg_compression:3", limit=768),
    Study("cifar-gauss3-8of80", "cifar10-8/80@gaussian_noise:3", limit=768),
    Study("cifar-jpeg3-8of80", "cifar10-8/80@jpeg_compression:3", limit=768),
    Study("cifar-gauss3-3of8", "cifar10-8@gaussian_noise:3", "uneven", limit=1024),
    Study("cifar-jpeg3-corr", "cifar10-8@jpeg_compression:3", "correlated", limit=768),
)


class Sets:
    """Sets on the device, read once."""

    def __init__(self, world: World) -> None:
        self.world, self._held = world, dict[tuple[str, int | None, int], Held]()

    def hold(self, id: str, limit: int, cycles: int = 1) -> Held:
        """The first ``limit`` pictures of a set, or all of it as often as ``cycles`` says."""
        key = (id, limit if cycles == 1 else None, cycles)
        if key not in self._held:
            self._held[key] = Held(
                id,
                lambda cycle: self.world.draw(id, cycle),
                self.world.model,
                limit=key[1],
                cycles=cycles,
                workers=8,
            )
        return self._held[key]

    def cut(self, study: Study, seed: int) -> list[Segment]:
        """The stream of a study."""
        long = study.kind == "long"
        held = self.hold(study.set, study.limit, -(-study.limit // 2000) if long else 1)
        other = None if study.other is None else self.hold(study.other, study.limit)
        return cut_stream(study.kind, held, other, seed, limit=study.limit, present=study.present)


def prompts_of(world: World, segment: Segment, study: Study) -> ClassPrompts:
    """The class list of a stream."""
    prompts = world.prompts(segment.held.parts[0])
    if not study.distractors:
        return prompts
    more = [name for name in class_names("cifar100") if name not in prompts.names]
    return ClassPrompts((*prompts.names, *more), templates=prompts.templates)


@torch.no_grad()
def features(model: CLIP, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Plain unit features, and what the domain is told by."""
    tower = model.require_vit()
    early = tower.run(tower.embed(pixels), 0, 1)
    return l2_normalize(tower.pool(tower.run(early, 1))), signature(early)


def stream_batches(segments: list[Segment], batch: int) -> list[tuple[Held, Any]]:
    """Held set and rows of every batch."""
    return [
        (s.held, s.rows[at : at + batch]) for s in segments for at in range(0, len(s.rows), batch)
    ]


def choose(streams: Sequence[Study], wanted: str, part: str) -> list[Study]:
    """The streams named, or all; of them part ``i/n``."""
    names = [study.name for study in streams]
    for name in filter(None, wanted.split(",")):
        if name not in names:
            raise UnknownNameError("development stream", name, names)
    chosen = [study for study in streams if not wanted or study.name in wanted.split(",")]
    this, parts = map(int, part.split("/"))
    if not 1 <= this <= parts:
        raise SystemExit(f"--part is i/n with i from 1 to n, got {part}")
    return chosen[this - 1 :: parts]


def run(study: Study, seed: int, sets: Sets, candidates: Any, *, light: bool) -> dict[str, Any]:
    """Everything that is kept of one stream; its accuracies are printed."""
    world, began = sets.world, time.perf_counter()
    segments = sets.cut(study, seed)
    batches = stream_batches(segments, study.batch)
    labels = torch.cat([held.labels[rows] for held, rows in batches])
    prompts = prompts_of(world, segments[0], study)
    kept: dict[str, Any] = {"labels": labels.numpy(), "batch": [len(rows) for _, rows in batches]}
    if not light:
        found = [features(world.model, held.batch(rows, None).images) for held, rows in batches]
        plain, early = (torch.cat(parts).float().cpu() for parts in zip(*found, strict=True))
        kept |= {"plain": plain.numpy().astype(HALF), "early": early[:SIGNED].numpy().astype(HALF)}
    right = []
    for one in candidates:
        adapter = create_method(one.name, world.model, prompts, one.config, seed=seed)
        answers = [adapter.predict(held.batch(rows, None)).logits.cpu() for held, rows in batches]
        logits = torch.cat(answers)
        kept[one.label] = logits.log_softmax(-1).numpy().astype(HALF)
        right.append(100 * float((logits.argmax(-1) == labels).float().mean()))
    gains = " ".join(f"{value - right[0]:+6.2f}" for value in right[1:])
    seconds = time.perf_counter() - began
    name = f"{study.name}|{seed}"
    print(f"{name:22} {len(labels):5} {right[0]:6.2f} {gains}  {seconds:.0f}s", flush=True)
    return {f"{name}|{what}": value for what, value in kept.items()}


def main() -> None:
    options = parse_arguments()
    dtype = options.dtype or ("fp32" if options.world == "micro" else "bf16")
    streams = choose(MICRO if options.world == "micro" else REAL, options.streams, options.part)
    world: World
    if options.world == "micro":
        world = MicroWorld(options.device, dtype)
    else:
        world = RealWorld(options.shared, options.real, options.device, dtype)
    candidates = parse_methods(options.methods, options, world)[0]
    sets, kept = Sets(world), dict[str, Any]()
    options.out.mkdir(parents=True, exist_ok=True)
    for study in streams:
        for seed in range(options.seeds):
            kept |= run(study, seed, sets, candidates, light=options.light)
        np.savez(options.out / f"{options.world}-{options.part.partition('/')[0]}.npz", **kept)
    print("#", [one.label for one in candidates])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=("micro", "real"), default="micro")
    parser.add_argument("--methods", nargs="+", required=True, help="as accuracy.py takes them")
    parser.add_argument("--streams", default="", help="comma-separated; all if not given")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--part", default="1/1", help="which part of the streams, as 2/3")
    parser.add_argument("--shared", type=Path, help="real: as for accuracy.py")
    parser.add_argument("--real", type=Path, help="real: as for accuracy.py")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="micro fp32, real bf16")
    parser.add_argument("--light", action="store_true", help="keep no features")
    parser.add_argument("--out", type=Path, required=True, help="WORLD-PART.npz")
    options = parser.parse_args()
    if options.world == "real" and (options.shared is None or options.real is None):
        parser.error("--world real needs --shared DIR and --real DIR")
    # What accuracy.py lets choose and parse_methods reads: all images, each method's own views.
    options.limits, options.views, options.view_kind = "", None, "own"
    return options


if __name__ == "__main__":
    main()
