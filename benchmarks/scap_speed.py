"""How fast SCAP is: the literal loop, the engine and its pieces, in one run and one table.

    python -m benchmarks.scap_speed                              # micro on the CPU, float32
    python -m benchmarks.scap_speed --device cuda --dtype bf16   # a ViT-B/16 of random weights

Cliques are planted (random images have none), so that their number is the same for
everybody; all else is the adapter as users run it. Times are medians; the machine's own
matrix-product rate is measured in the same run.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.scap import SCAP, SCAPConfig
from cliquetta.methods.scap.cliques import Cliques
from cliquetta.model.clip import CLIP, initialise
from cliquetta.model.config import CLIPConfig, TextConfig, VisionConfig
from cliquetta.model.cuda import Fetched
from cliquetta.model.factory import create_model
from cliquetta.prompts.catalogue import class_names
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def vit_b16() -> CLIP:
    """A ViT-B/16 CLIP of random weights."""
    vision = VisionConfig(224, 16, width=768, layers=12, heads=12, hidden=3072)
    text = TextConfig(77, 49408, width=512, layers=12, heads=8, hidden=2048)
    return initialise(CLIP(CLIPConfig(512, vision, text), id="random ViT-B/16"))


def plant(
    batch: int, memberships: int, classes: int, seed: int
) -> tuple[Tensor, Cliques]:
    """Top-3 classes and about ``memberships / 3`` distinct cliques of 2 to 4 images."""
    generator = torch.Generator().manual_seed(seed)
    pool = min(classes, max(3, batch // 3))
    some = torch.randperm(classes, generator=generator)[:pool]
    top = torch.stack(
        [some[torch.randperm(pool, generator=generator)[:3]] for _ in range(batch)]
    )
    labels: list[int] = []
    rows: list[Tensor] = []
    seen: set[tuple[int, ...]] = set()
    total = tries = 0
    while total < memberships and tries < 40 * memberships:
        tries += 1
        label = int(some[torch.randint(pool, (), generator=generator)])
        members = (top == label).any(dim=1).nonzero()[:, 0]
        size = 2 + int(torch.randint(3, (), generator=generator))
        if len(members) < size:
            continue
        chosen = (
            members[torch.randperm(len(members), generator=generator)[:size]]
            .sort()
            .values
        )
        if tuple(chosen.tolist()) in seen:
            continue
        seen.add(tuple(chosen.tolist()))
        row = torch.zeros(batch, dtype=torch.bool)
        row[chosen] = True
        labels.append(label)
        rows.append(row)
        total += size
    order = torch.tensor(labels).argsort(stable=True)
    sets = torch.stack(rows)[order]
    return top, Cliques(torch.tensor(labels)[order], torch.arange(len(sets)), sets)


class Planted(SCAP):
    """SCAP whose mining result is given; mining itself still runs and is paid for."""

    planted: tuple[Tensor, Cliques]

    def _mine(self, related: Fetched) -> tuple[Tensor, Cliques]:
        super()._mine(related)
        return self.planted


class Clock:
    """Medians of wall time between device synchronisations, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: dict[str, list[float]] = defaultdict(list)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        self.wait()
        start = time.perf_counter()
        result = call()
        self.wait()
        self.times[name].append(time.perf_counter() - start)
        return result

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.time(
            name, lambda: function(*args, **kwargs)
        )

    def median(self, name: str) -> float:
        return statistics.median(self.times[name]) if self.times[name] else 0.0


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large matrix product."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    clock = Clock(device)
    for _ in range(3):
        a @ b
    for _ in range(10):
        clock.time("matmul", lambda: a @ b)
    return 2 * n**3 / clock.median("matmul") / 1e12


def image_flops(model: CLIP) -> float:
    """Operations of one image forward pass, multiply-add = 2."""
    vision = model.require_vit().config
    tokens = vision.patches + 1
    width = vision.width
    block = tokens * (4 * width**2 + 2 * width * vision.hidden) + 2 * tokens**2 * width
    return 2.0 * (
        vision.layers * block + vision.patches * width * 3 * vision.patch_size**2
    )


def measure(
    model: CLIP,
    batch: int,
    memberships: int,
    classes: int,
    *,
    jacobian: bool,
    repeats: int,
) -> dict[str, Any]:
    """One row of the table: engine, whole and in pieces."""
    device = model.device
    prompts = ClassPrompts(class_names("imagenet")[:classes], allow_duplicates=True)
    adapter = Planted(model, prompts, SCAPConfig(), seed=0)
    adapter.planted = plant(batch, memberships, classes, seed=0)
    if adapter.text is not None:
        if jacobian:
            adapter.text.build_jacobian()
        else:
            adapter.text.build_jacobian = lambda: None  # type: ignore[method-assign]
    size = model.image_size
    images = torch.randn(
        batch, 3, size, size, generator=torch.Generator().manual_seed(0)
    )
    images = images.to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    for _ in range(2):
        adapter.predict(Batch(images))
    for _ in range(repeats):
        clock.time("total", lambda: adapter.predict(Batch(images)))
    total = clock.median("total")
    adapter._encode = clock.wrap("encode", adapter._encode)  # type: ignore[method-assign]
    adapter._mine = clock.wrap("mine", adapter._mine)  # type: ignore[method-assign]
    learner = adapter.learner
    learner.learn = clock.wrap("learn", learner.learn)  # type: ignore[method-assign]
    learner._text_gradient = clock.wrap("learn text", learner._text_gradient)  # type: ignore[method-assign]
    adapter._retain = clock.wrap("retain", adapter._retain)  # type: ignore[method-assign]
    adapter._logits = clock.wrap("infer", adapter._logits)  # type: ignore[method-assign]
    adapter._compose = clock.wrap("compose", adapter._compose)  # type: ignore[method-assign]
    for _ in range(max(2, repeats // 2)):
        adapter.predict(Batch(images))
    cliques = adapter.planted[1]
    rows = int(cliques.sets.sum())
    prompted = 3 * batch
    flops = image_flops(model) * (2 * batch + rows + prompted)
    row = {
        "batch": batch,
        "N": classes,
        "cliques": len(cliques),
        "memberships": rows,
        "text gradient": "jacobian" if jacobian else "vjp",
        "ms": 1000 * total,
        "images/s": batch / total,
        "TFLOP/s": flops / total / 1e12,
        "encode": 1000 * clock.median("encode"),
        "mine": 1000 * clock.median("mine"),
        "learn visual": 1000 * (clock.median("learn") - clock.median("learn text")),
        "learn text": 1000 * clock.median("learn text"),
        "retain": 1000 * clock.median("retain"),
        "infer": 1000 * (clock.median("infer") + clock.median("compose")),
    }
    if device.type == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def measure_domain(
    model: CLIP, batch: int, classes: int, repeats: int
) -> dict[str, Any]:
    """``domain_norm`` on a batch of the same size."""
    prompts = ClassPrompts(class_names("imagenet")[:classes], allow_duplicates=True)
    adapter = DomainNorm(model, prompts, DomainNormConfig(), seed=0)
    size = model.image_size
    images = torch.randn(
        batch, 3, size, size, generator=torch.Generator().manual_seed(0)
    )
    images = images.to(model.device)
    clock = Clock(model.device)
    for _ in range(2):
        adapter.predict(Batch(images))
    for _ in range(repeats):
        clock.time("total", lambda: adapter.predict(Batch(images)))
    return {
        "ms": 1000 * clock.median("total"),
        "images/s": batch / clock.median("total"),
    }


def measure_reference(
    model: CLIP, batch: int, memberships: int, classes: int
) -> dict[str, Any]:
    """The literal loop of tests/reference on the same planted batch."""
    from tests.reference import scap_equations
    from tests.reference.scap_reference import ReferenceSCAP

    prompts = ClassPrompts(class_names("imagenet")[:classes], allow_duplicates=True)
    adapter = SCAP(model, prompts, SCAPConfig(), seed=0)
    top, cliques = plant(batch, memberships, classes, seed=0)
    listed = [
        (int(label), frozenset(row.nonzero()[:, 0].tolist()))
        for label, row in zip(cliques.classes, cliques.members, strict=True)
    ]
    scap_equations.mine = lambda *args, **kwargs: listed
    scap_equations.top_classes = lambda *args: top.tolist()
    assert adapter.text is not None
    start = adapter.memory["start_prompt"], adapter.text.start
    oracle = ReferenceSCAP(model, prompts, scap_equations.ReferenceSettings(), *start)
    size = model.image_size
    images = torch.randn(
        batch, 3, size, size, generator=torch.Generator().manual_seed(0)
    )
    images = images.to(model.device, model.dtype)
    clock = Clock(model.device)
    clock.time("total", lambda: oracle.predict(images))
    return {
        "ms": 1000 * clock.median("total"),
        "images/s": batch / clock.median("total"),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """A plain table."""
    names = list(rows[0])
    cells = [
        [
            f"{row.get(n, ''):.4g}"
            if isinstance(row.get(n), float)
            else str(row.get(n, ""))
            for n in names
        ]
        for row in rows
    ]
    widths = [max(len(n), *(len(c[i]) for c in cells)) for i, n in enumerate(names)]
    print("  ".join(n.rjust(w) for n, w in zip(names, widths, strict=True)))
    for cell in cells:
        print("  ".join(c.rjust(w) for c, w in zip(cell, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--full", action="store_true", help="the whole grid on the CPU, too"
    )
    parser.add_argument(
        "--short", action="store_true", help="two rows, no literal loop"
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    dtype = DTYPES[options.dtype]
    if cuda:
        model = vit_b16().to(device)
    else:
        model = create_model(ROOT / "src/cliquetta/model/data/micro.safetensors")
    model.logit_scale.data = model.logit_scale.data.float()
    scale = model.logit_scale.data.clone()
    model = model.to(dtype)
    model.logit_scale.data = scale
    rate = matmul_rate(device, dtype)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {options.threads} threads"
    print(f"{model.id}, {options.dtype}, {name}, torch {torch.__version__}")
    print(f"matrix product: {rate:.4g} TFLOP/s")

    cases = [(64, 300, 200, True), (64, 300, 1000, True)]
    if not options.short:
        cases.append((64, 300, 200, False))
    if (cuda and not options.short) or options.full:
        cases += [
            (64, 300, 10, True),
            (16, 100, 200, True),
            (128, 600, 200, True),
            (256, 1000, 200, True),
            (256, 2000, 200, True),
            (64, 100, 200, True),
            (64, 500, 200, True),
        ]
    if not cuda:
        cases = [
            (b, m, min(n, 100), j) for b, m, n, j in cases if options.full or n <= 200
        ]
    repeats = 8 if cuda else 4
    rows = [
        measure(model, b, m, n, jacobian=j, repeats=repeats) for b, m, n, j in cases
    ]
    for row in rows:
        row["of matmul"] = row["TFLOP/s"] / rate
    show(rows)
    b, m, n, _ = cases[0]
    domain = measure_domain(model, b, n, repeats)
    print(
        f"\ndomain_norm, batch {b}, N={n}: {domain['ms']:.1f} ms ({domain['images/s']:.4g} "
        f"images/s), {domain['ms'] / rows[0]['ms']:.2f} times preset paper"
    )
    if options.short:
        return
    reference = measure_reference(model, b, m, n)
    ratio = reference["ms"] / rows[0]["ms"]
    print(
        f"\nreference loop, batch {b}, {rows[0]['memberships']} memberships, N={n}: "
        f"{reference['ms']:.0f} ms ({reference['images/s']:.3g} images/s)"
    )
    print(f"engine / reference: {ratio:.1f} times as fast")
    if options.out:
        options.out.write_text(
            json.dumps(
                {
                    "device": name,
                    "rate": rate,
                    "rows": rows,
                    "domain_norm": domain,
                    "reference": reference,
                    "ratio": ratio,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
