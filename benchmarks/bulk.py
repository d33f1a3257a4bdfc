"""Bulk prediction beside plain encoding by the same readers, and its memory over time.

    python -m benchmarks.bulk                                   # micro on the CPU
    python -m benchmarks.bulk --model tiny --images 100000 --size 32    # memory over a long list
    python -m benchmarks.bulk --ray --actors 2                  # the same through Ray Data
    python -m benchmarks.bulk --model ViT-B/16 --device cuda --dtype bf16 --size 384 --workers 16

Images are JPEGs of noise made for the run: 1000 of them under as many names as are asked for. One
run reads a share of the list and only encodes it, then predicts the whole list into a table. Of the
prediction, the share of time is told in which the methods waited for images, and the memory of this
process and all its children, sampled while it went on. ``ViT-B/16`` and ``tiny`` (two blocks) have
random weights.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.scap_speed import vit_b16
from cliquetta.data.listing import list_images
from cliquetta.evaluation.answers import Answers
from cliquetta.evaluation.bulk import predict
from cliquetta.evaluation.bulk_ray import RayCluster
from cliquetta.evaluation.inference import Predictor
from cliquetta.evaluation.reading import ImageSource
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.model.config import CLIPConfig, TextConfig, VisionConfig
from cliquetta.model.factory import create_model, pick_device, pick_dtype
from cliquetta.model.initialise import initialise
from cliquetta.prompts.catalogue import class_names
from cliquetta.types import Batch

DISTINCT = 1000
ENCODED = 0.1
"""Share of the list that is also encoded alone, at most 20,000 images."""


def tiny() -> CLIP:
    """A CLIP that takes no time."""
    vision = VisionConfig(32, 8, width=32, layers=2, heads=2, hidden=64)
    text = TextConfig(77, 49408, width=32, layers=1, heads=2, hidden=64)
    return initialise(CLIP(CLIPConfig(32, vision, text), id="random tiny"))


def make_images(folder: Path, count: int, size: int) -> None:
    """JPEGs of smooth noise; from the thousandth on, further names of the same files."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number // DISTINCT:05d}" / f"{number % DISTINCT:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        if number < DISTINCT:
            coarse = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(path)
        else:
            os.link(folder / "00000" / path.name, path)


def family(root: int) -> Iterator[int]:
    """A process and its descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += parents.get(process, [])


def resident(process: int) -> int:
    """Memory of a process in bytes, without what it shares with others; 0 once it is gone."""
    try:
        _, whole, shared = Path(f"/proc/{process}/statm").read_text().split()[:3]
    except OSError:
        return 0
    return (int(whole) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class MemoryWatch(threading.Thread):
    """Samples memory, with the number of images that are done."""

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self.seconds = seconds
        self.done = 0
        self.over = threading.Event()
        self.samples: list[tuple[int, int]] = []
        """Images done and bytes."""

    def run(self) -> None:
        while not self.over.wait(self.seconds):
            self.samples.append((self.done, sum(map(resident, family(os.getpid())))))

    def table(self, images: int) -> list[str]:
        """The largest memory in each tenth of the run."""
        lines = []
        for tenth in range(10):
            low, high = images * tenth // 10, images * (tenth + 1) // 10
            seen = [size for done, size in self.samples if low < done <= high]
            if seen:
                lines.append(f"  up to {high:>9,} images: {max(seen) / 2**20:8.0f} MB")
        return lines


def encode(model: CLIP, predictor: Predictor, source: ImageSource, images: int) -> float:
    """Images/s of reading and encoding alone."""
    begun = time.perf_counter()
    for read in predictor.reader.batches(source, 0, images):
        (batch,) = read.by_views.values()
        assert isinstance(batch, Batch)
        model.encode_image(batch.to(model.device).images).cpu()
    return images / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--size", type=int, default=64, help="pixels along a side")
    parser.add_argument("--model", default="micro")
    parser.add_argument("--method", default="domain_norm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="between samples of memory")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = pick_device(given.device)
    if given.model in ("ViT-B/16", "tiny"):
        made = vit_b16() if given.model == "ViT-B/16" else tiny()
        model = made.to(device=device, dtype=pick_dtype(given.dtype))
        model.logit_scale.data = torch.tensor(100.0, device=device).log()
    else:
        model = create_model(given.model, device=str(device), dtype=given.dtype)
    names = class_names("imagenet")[: given.classes]
    adapter = create_method(given.method, model, names)
    answers = Answers((given.method,), adapter.prompts.names)
    plain = Predictor({given.method: adapter}, answers, given.batch_size, 0, given.workers)
    place = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    now, load = datetime.now(timezone.utc), os.getloadavg()[0]
    print(f"{now:%Y-%m-%d %H:%M} UTC, {place}, {os.cpu_count()} CPU cores, load {load:.1f}")
    print(f"{vars(given)}")
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        make_images(photos, given.images, given.size)
        source = ImageSource(list_images([photos]), answers)
        share = min(20_000, max(given.batch_size, int(ENCODED * given.images)))
        encode(model, plain, source, min(share, 4 * given.batch_size))  # warm up
        encoded = encode(model, plain, source, share)
        watch = MemoryWatch(given.seconds)

        def note(done: int, total: int, skipped: int) -> None:
            watch.done = done

        watch.start()
        run = predict(
            [photos],
            method=adapter,
            batch_size=given.batch_size,
            workers=given.workers,
            out=Path(folder) / "out.csv",
            on_progress=note,
            cluster=RayCluster(actors=given.actors) if given.ray else None,
        )
        watch.over.set()
        watch.join()
    assert run.images == given.images and not run.skipped
    rate = run.images / run.seconds
    print(f"encoding alone, same readers: {encoded:8.1f} images/s")
    print(
        f"predict --method {given.method}: {rate:8.1f} images/s, {rate / encoded:.2f} of encoding"
    )
    waited = 100 * run.waited / (run.busy + run.waited)
    print(f"methods waited for images: {waited:.1f} % of their time")
    print("memory of all processes, largest in each tenth of the list:")
    print("\n".join(watch.table(given.images)))


if __name__ == "__main__":
    main()
