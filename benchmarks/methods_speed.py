"""Cost of every method beside plain encoding of the same images and views, in one run.

    python -m benchmarks.methods_speed                              # micro on the CPU, float32
    python -m benchmarks.methods_speed --device cuda --dtype bf16   # a ViT-B/16 of random weights

A batch is 64 images, or 8 images of 64 views each for methods with views (the CPU takes
fewer). Before each timed batch plain encoding of the same pixels is timed
(``encode_views``), so that a busy machine slows both. After a warm-up, batches are
timed in rounds of four; figures are means over the medians of the first, second, third
and fourth of them, since ``domain_norm`` learns from every fourth batch only. Pixels
and views are on the device. Few-shot methods get random tensors in the shape of fitted
ones (Tip-Adapter: 16 per class); SCAP gets planted cliques (about 100 with 300
memberships: random images have none) and a text Jacobian that is built already, as in
the middle of a stream; ``domain_norm`` (settled) is past the images after which it
learns less often, ``domain_norm:young`` is not, but past its first 256.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.scap_speed import Clock, Planted, plant, vit_b16
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import (
    create_method,
    get_method,
    method_config,
    method_entries,
)
from cliquetta.methods.maple import initial_parameters
from cliquetta.model.clip import CLIP, encode_views, l2_normalize
from cliquetta.model.factory import create_model, pick_dtype
from cliquetta.prompts.catalogue import class_names
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, ViewSpec

SHOTS = 16
MEMBERSHIPS = 300
MOST_EXTRA = 30.0
"""Percent that methods without training may add to encoding their views, one H200, N = 200."""
TPT_RATE = 8.0
"""Images/s of TPT with 64 views there, at least."""
CHUNK = 256
"""Views that go through the tower at once, the methods' own default."""
ROUND = 4
"""Batches of a round."""


def random_tensors(
    name: str, model: CLIP, config: Any, classes: int
) -> dict[str, Tensor]:
    """Draw at random what a fit of a few-shot method would have returned."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    E = model.embed_dim
    if name.startswith("tip_adapter"):
        labels = torch.arange(classes).repeat_interleave(SHOTS)
        return {"keys": l2_normalize(draw(len(labels), E)), "labels": labels}
    width = model.require_text().config.width
    if name == "coop":
        return {"context": draw(config.context_length, width)}
    if name == "cocoop":
        hidden = config.hidden_dim or E // 16
        return {
            "context": draw(config.context_length, width),
            "down.weight": draw(hidden, E),
            "down.bias": draw(hidden),
            "up.weight": draw(width, hidden),
            "up.bias": draw(width),
        }
    return initial_parameters(model, config, generator)


def build(
    label: str, model: CLIP, prompts: ClassPrompts, batch: int, views: int
) -> Adapter:
    """The adapter of ``NAME[:PRESET]``, ready for the middle of a stream."""
    name, _, preset = label.partition(":")
    if label == "domain_norm:young":
        preset = ""
    config = method_config(name, preset or None)
    if getattr(config, "views", 1) > 1:
        config = dataclasses.replace(config, views=views)
    if name == "scap":
        planted = Planted(model, prompts, config, seed=0)
        planted.planted = plant(batch, MEMBERSHIPS * batch // 64, len(prompts), seed=0)
        if planted.text is not None and planted.learner.learns_text:
            planted.text.build_jacobian()
        return planted
    if name == "domain_norm":
        young = label == "domain_norm:young"
        config = dataclasses.replace(config, settled_steps=10**6 if young else 1)
    fitted: Mapping[str, Tensor] | None = None
    if get_method(name).fit is not None:
        fitted = random_tensors(name, model, config, len(prompts))
    return create_method(name, model, prompts, config, seed=0, fitted=fitted)


class Pixels:
    """Random images and views on the device, the same for all methods."""

    def __init__(self, model: CLIP, images: int, view_images: int, views: int) -> None:
        generator = torch.Generator(model.device).manual_seed(0)
        S = model.image_size
        real = model.dtype

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=model.device).to(
                real
            )

        self.images = draw(images, 3, S, S)
        self.views = draw(view_images, views, 3, S, S)

    def batch(self, spec: ViewSpec | None) -> Batch:
        """The batch for a method that asks for ``spec``."""
        if spec is None:
            return Batch(self.images)
        return Batch(self.views[:, 0], views=self.views[:, : spec.count])


def per_batch(values: Sequence[float]) -> float:
    """Mean over the positions in a round of the median at each."""
    return statistics.fmean(
        statistics.median(values[i::ROUND] or values) for i in range(ROUND)
    )


def measure(
    label: str, model: CLIP, prompts: ClassPrompts, pixels: Pixels, most: float
) -> Any:
    """One row: a method beside the encoding of what it looks at; about ``most`` seconds."""
    wants = get_method(label.partition(":")[0]).adapter
    count = len(pixels.images)
    views = pixels.views.shape[1]
    adapter = build(label, model, prompts, count, views)
    batch = pixels.batch(adapter.views)
    seen = batch.images[:, None] if batch.views is None else batch.views
    clock = Clock(model.device)
    start = time.perf_counter()
    adapter.predict(batch)
    encode_views(model, seen, chunk=CHUNK)
    clock.wait()
    first = time.perf_counter() - start
    if first < most / 4:  # what is quick is warmed up twice
        adapter.predict(batch)
        clock.wait()
    start = time.perf_counter()
    while (done := len(clock.times["method"])) % ROUND or (
        done < ROUND or time.perf_counter() - start < min(most / 2, 1.0)
    ):
        clock.time("encode", lambda: encode_views(model, seen, chunk=CHUNK))
        clock.time("method", lambda: adapter.predict(batch))
        if time.perf_counter() - start > 3 * most:
            break
    encode, whole = (per_batch(clock.times[name]) for name in ("encode", "method"))
    ratios = zip(clock.times["method"], clock.times["encode"], strict=True)
    added = per_batch([m / e - 1 for m, e in ratios])
    return {
        "method": label,
        "batch_dependence": wants.batch_dependence.value,
        "images": len(batch),
        "views": seen.shape[1],
        "ms": 1000 * whole,
        "encode ms": 1000 * encode,
        "images/s": len(batch) / whole,
        "x encoding": whole / encode,
        "extra %": 100 * added,
        "batches": len(clock.times["method"]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(rows: list[dict[str, Any]], classes: int) -> list[str]:
    """Where the aims stand; they are stated for one H200, a ViT-B/16, bf16 and N = 200."""
    found = []
    for row in rows:
        name = row["method"].partition(":")[0]
        if "no training" in get_method(name).summary:
            met = "met" if row["extra %"] <= MOST_EXTRA else "MISSED"
            found.append(
                f"- {row['method']}: {row['extra %']:+.1f} % over encoding its views at "
                f"N={classes} (aim: at most {MOST_EXTRA:.0f} %): {met}"
            )
        if row["method"] == "tpt":
            met = "met" if row["images/s"] >= TPT_RATE else "MISSED"
            found.append(
                f"- tpt: {row['images/s']:.1f} images/s with {row['views']} views (aim: at least "
                f"{TPT_RATE:.0f}): {met}"
            )
    return found


def write(
    folder: Path | None, about: str, rows: list[dict[str, Any]], classes: int
) -> str:
    """The report; written after each row, so that a killed run keeps what it has."""
    aims = verdicts(rows, classes) if torch.cuda.is_available() else []
    text = "\n".join([about, "", table(rows), "", *aims, ""])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "methods_speed.md").write_text(text)
        values = {"about": about, "classes": classes, "rows": rows}
        (folder / "methods_speed.json").write_text(json.dumps(values, indent=1))
    return text


def main() -> int:
    options = parse_arguments()
    began = time.perf_counter()
    cuda = options.device.startswith("cuda")
    if options.model == "ViT-B/16":
        model = vit_b16().to(options.device, pick_dtype(options.dtype))
        model.logit_scale.data = torch.tensor(100.0, device=options.device).log()
    else:
        model = create_model("micro", device=options.device, dtype=options.dtype)
    prompts = ClassPrompts(
        class_names("imagenet")[: options.classes], allow_duplicates=True
    )
    pixels = Pixels(model, options.batch, options.view_batch, options.views)
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    about = (
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {machine}, torch {torch.__version__}: {model.id}, "
        f"{options.dtype}, N={options.classes}, `python -m benchmarks.methods_speed "
        f"{' '.join('DIR' if w == str(options.out) else w for w in sys.argv[1:])}`"
    )
    labels = options.methods or [*(e.name for e in method_entries()), "tda:views"]
    labels.sort(key=lambda label: label != "zero_shot")
    print(f"# {about}\n# ready after {time.perf_counter() - began:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for label in labels:
        if time.perf_counter() - began > options.deadline:
            print(f"# {label}: not run, the deadline has passed", flush=True)
            continue
        try:
            row = measure(label, model, prompts, pixels, options.seconds)
        except Exception as error:  # the other rows are worth having
            print(f"! {label}: {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(row)
        write(options.out, about, rows, options.classes)
        print(
            f"{label:16} {row['images']:3} x {row['views']:2} views {row['ms']:9.2f} ms  "
            f"{row['images/s']:8.1f} images/s  {row['x encoding']:6.2f} x encoding "
            f"({row['encode ms']:.2f} ms)",
            flush=True,
        )
    if rows:
        print(write(options.out, about, rows, options.classes))
    print(f"# {time.perf_counter() - began:.0f} s in all")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument(
        "--model",
        choices=("micro", "ViT-B/16"),
        help="random ViT-B/16, or micro on a CPU",
    )
    parser.add_argument("--classes", type=int, default=200)
    parser.add_argument(
        "--batch", type=int, help="images per batch; 64, or 16 on a CPU"
    )
    parser.add_argument(
        "--view-batch", type=int, help="of view methods; 8, or 2 on a CPU"
    )
    parser.add_argument("--views", type=int, help="64, or 8 on a CPU")
    parser.add_argument("--methods", nargs="*", help="NAME[:PRESET]; all if not given")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="for each method, about"
    )
    parser.add_argument(
        "--deadline", type=float, default=90.0, help="no method is begun later"
    )
    parser.add_argument("--out", type=Path, help="folder of methods_speed.md and .json")
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    options.model = options.model or ("ViT-B/16" if cuda else "micro")
    options.batch = options.batch or (64 if cuda else 16)
    options.view_batch = options.view_batch or (8 if cuda else 2)
    options.views = options.views or (64 if cuda else 8)
    return options


if __name__ == "__main__":
    sys.exit(main())
