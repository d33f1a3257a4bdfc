"""Decoding alone, the device alone, and `predict`, which should be as fast as the slower of them.

    python -m benchmarks.bulk --sizes 64x64 --workers 1,2                    # micro on the CPU
    python -m benchmarks.bulk --model ViT-B/16 --device cuda --dtype bf16    # one H200, 16 cores
    python -m benchmarks.bulk --memory 20000 --sizes 384x384 --workers 16    # memory over a list
    python -m benchmarks.bulk --ray --actors 2                               # through Ray Data

Photographs are made for the run: bundled pictures, enlarged, with noise until a JPEG of
quality 90 has as many bytes for each pixel as one of a camera; 128 of them under as
many names as are asked for. Each row has two rates: from the first batch to the last,
and with the start of the workers, whose seconds it gives, too; then the cores that this
process keeps busy, its workers not counted. ``ViT-B/16`` and ``tiny`` (two blocks) have
random weights.
"""

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.scap_speed import vit_b16
from cliquetta.data.bundled import load_bundled
from cliquetta.data.dataset import FileDataset
from cliquetta.data.images import Decode
from cliquetta.data.listing import list_images
from cliquetta.data.stream import Stream
from cliquetta.data.workers import usable_cores
from cliquetta.evaluation.runner import evaluate
from cliquetta.inference.bulk import predict
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.predictor import ImageSource, Reader
from cliquetta.inference.ray_driver import RayCluster
from cliquetta.inference.rows import RowFormat
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP, initialise
from cliquetta.model.config import CLIPConfig, TextConfig, VisionConfig
from cliquetta.model.factory import create_model, pick_device, pick_dtype
from cliquetta.prompts.catalogue import class_names
from cliquetta.types import Batch

DISTINCT = 128
LARGE = 448 * 448
"""Pixels from which JPEG's own downscaling changes something for an input of 224."""


def tiny() -> CLIP:
    """A CLIP that takes no time."""
    vision = VisionConfig(32, 8, width=32, layers=2, heads=2, hidden=64)
    text = TextConfig(77, 49408, width=32, layers=1, heads=2, hidden=64)
    return initialise(CLIP(CLIPConfig(32, vision, text), id="random tiny"))


def make_photograph(path: Path, number: int, width: int, height: int) -> int:
    """A JPEG with the entropy of a photograph; returns its size in bytes."""
    generator = np.random.default_rng([0, number])
    pictures = load_bundled().images
    tiles = pictures[generator.choice(len(pictures), 4, replace=False)]
    scene = tiles.reshape(2, 2, 32, 32, 3).swapaxes(1, 2).reshape(64, 64, 3)
    large = Image.fromarray(scene).resize((width, height), Image.Resampling.BICUBIC)
    noise = generator.standard_normal((height, width, 1), dtype=np.float32) * 9
    values = np.asarray(large, np.float32) + noise
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return path.stat().st_size


def make_photographs(folder: Path, width: int, height: int) -> int:
    """:data:`DISTINCT` photographs by all cores; returns their mean size in bytes."""
    folder.mkdir()
    with ThreadPoolExecutor(usable_cores()) as pool:
        sizes = pool.map(
            lambda n: make_photograph(folder / f"{n:03d}.jpg", n, width, height),
            range(DISTINCT),
        )
        return sum(sizes) // DISTINCT


def more_names(folder: Path, photographs: Path, count: int) -> Path:
    """A folder of ``count`` links to the photographs."""
    folder.mkdir()
    for number in range(count):
        os.link(
            photographs / f"{number % DISTINCT:03d}.jpg", folder / f"{number:06d}.jpg"
        )
    return folder


class Clock:
    """The rate of a run from its first batch to its last."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.times: list[float] = []
        self.busy: list[float] = []  # CPU seconds of this process, at the same times
        self.done = self.first = 0

    def add(self, images: int) -> None:
        """Count a batch."""
        self.times.append(time.perf_counter())
        self.busy.append(time.process_time())
        self.first = self.first or images
        self.done += images

    def note(self, done: int, total: int, skipped: int) -> None:
        """Progress of a prediction run."""
        self.add(done - self.done)

    def row(self, what: str, ceiling: float | None = None) -> str:
        """A row of the table; ``ceiling`` is the rate to compare with."""
        line = (
            f"{what:<22} {self.rate:>8,.0f} {self.overall:>10,.0f} {self.start:>5.1f}"
        )
        line = f"{line} {self.cores:>5.1f}"
        return line if ceiling is None else f"{line}  {self.rate / ceiling:.2f}"

    @property
    def cores(self) -> float:
        """Cores that this process kept busy after the first batch, its workers not counted."""
        return (self.busy[-1] - self.busy[0]) / (self.times[-1] - self.times[0])

    @property
    def rate(self) -> float:
        """Images/s after the first batch."""
        return (self.done - self.first) / (self.times[-1] - self.times[0])

    @property
    def overall(self) -> float:
        """Images/s of the run, its start included."""
        return self.done / (self.times[-1] - self.begun)

    @property
    def start(self) -> float:
        """Seconds until the first batch."""
        return self.times[0] - self.begun


def decoding(
    folder: Path, count: int, workers: int, decode: Decode, model: CLIP
) -> Clock:
    """Reading to bytes alone."""
    options = PredictOptions(workers=workers, decode=decode)
    row_format = RowFormat(("none",), ("a", "b"), options)
    device = model.device if decode == "gpu" else None
    reader = Reader(model.preprocess, (None,), options, device=device, model=model)
    source = ImageSource(list_images([folder]), row_format)
    clock = Clock()
    for read in reader.batches(source, 0, count):
        clock.add(len(read.keys))
    assert clock.done == count
    return clock


def device_alone(adapter: Adapter, seconds: float) -> float:
    """Images/s of a method from pixels in the device's memory."""
    size = adapter.model.preprocess.size
    device = adapter.model.device
    batches = [Batch(torch.randn(64, 3, size, size, device=device)) for _ in range(4)]
    for batch in batches * 3:
        adapter.predict(batch).logits.cpu()
    begun = time.perf_counter()
    done = 0
    while time.perf_counter() - begun < seconds:
        for batch in batches:
            adapter.predict(batch).logits.cpu()
            done += len(batch)
    return done / (time.perf_counter() - begun)


def predicting(
    folder: Path,
    adapter: Adapter,
    workers: int,
    decode: Decode,
    cluster: RayCluster | None,
) -> Clock:
    """A run into a table."""
    adapter.reset()
    clock = Clock()
    run = predict(
        [folder],
        method=adapter,
        workers=workers,
        decode=decode,
        out=folder.parent / "out.csv",
        overwrite=True,
        on_progress=clock.note,
        cluster=cluster,
    )
    assert not run.skipped
    return clock


def evaluating(folder: Path, adapter: Adapter, workers: int) -> Clock:
    """An evaluation of the same files."""
    paths = sorted(folder.iterdir())
    labels = [number % len(adapter.prompts) for number in range(len(paths))]
    data = FileDataset("photographs", paths, names=adapter.prompts.names, labels=labels)
    device = adapter.model.device
    stream = Stream(data, adapter.model.preprocess, workers=workers, device=device)
    clock = Clock()
    out = folder.parent / "runs"
    evaluate(
        adapter,
        stream,
        out=out,
        again=True,
        on_step=lambda step: clock.add(len(step.batch)),
    )
    return clock


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


def memory_of(process: int) -> int:
    """Memory of a process in bytes, its part of what it shares with others; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


class MemoryWatch(threading.Thread):
    """Samples memory, with the number of images that are done."""

    def __init__(self, seconds: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.seconds = seconds
        self.done = 0
        self.over = threading.Event()
        self.samples: list[tuple[int, int, int]] = []
        """Images done, bytes of this process and of the others."""

    def run(self) -> None:
        while not self.over.wait(self.seconds):
            sizes = [memory_of(process) for process in family(os.getpid())]
            self.samples.append((self.done, sizes[0], sum(sizes[1:])))

    def note(self, done: int, total: int, skipped: int) -> None:
        """Progress of a prediction run."""
        self.done = done

    def table(self, images: int) -> list[str]:
        """The largest memory in each fifth of the run."""
        lines = []
        for fifth in range(5):
            low = images * fifth // 5
            high = images * (fifth + 1) // 5
            seen = [
                (own + rest, own, rest)
                for done, own, rest in self.samples
                if low < done <= high
            ]
            if seen:
                whole, own, rest = (size / 2**20 for size in max(seen))
                line = f"  up to {high:>9,} images: {whole:8,.0f} MB"
                lines.append(
                    f"{line} ({own:,.0f} this process, {rest:,.0f} its workers)"
                )
        return lines


def load_model(name: str, device: torch.device, dtype: str) -> CLIP:
    """A model by name, with random weights where there are none."""
    if name not in ("ViT-B/16", "tiny"):
        return create_model(name, device=str(device), dtype=dtype)
    made = vit_b16() if name == "ViT-B/16" else tiny()
    model = made.to(device=device, dtype=pick_dtype(dtype))
    model.logit_scale.data = torch.tensor(100.0, device=device).log()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="384x384,500x375,1600x1200")
    parser.add_argument("--workers", default="1,4,8,16")
    parser.add_argument("--methods", default="zero_shot,domain_norm")
    parser.add_argument("--images", type=int, default=1024, help="for each worker")
    parser.add_argument("--model", default="micro")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--decode", default="", help="exact, fast or gpu (default: fast if large)"
    )
    parser.add_argument(
        "--evaluate", default="", help="method by which to time evaluate, too"
    )
    parser.add_argument(
        "--memory", type=int, default=0, help="images to watch memory over"
    )
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--actors", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = pick_device(given.device)
    model = load_model(given.model, device, given.dtype)
    names = class_names("imagenet")[: given.classes]
    adapters = {
        name: create_method(name, model, names) for name in given.methods.split(",")
    }
    cluster = RayCluster(actors=given.actors) if given.ray else None
    processor = (
        torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    )
    now = datetime.now(timezone.utc)
    load = os.getloadavg()[0]
    say = partial(print, flush=True)
    say(
        f"{now:%Y-%m-%d %H:%M} UTC, {processor}, {os.cpu_count()} CPU cores, load {load:.1f}"
    )
    say(f"{vars(given)}")
    alone = {name: device_alone(adapter, 2.0) for name, adapter in adapters.items()}
    for name, rate in alone.items():
        say(f"device alone, {name}: {rate:,.0f} images/s")
    own = memory_of(os.getpid()) / 2**20
    say(f"memory before any image is read: {own:,.0f} MB")
    say(
        f"{'photographs decode workers images what':<56} images/s with start start cores / min"
    )
    for size in given.sizes.split(","):
        width, height = map(int, size.split("x"))
        decode: Decode = given.decode or (
            "fast" if width * height >= LARGE else "exact"
        )
        with tempfile.TemporaryDirectory() as home:
            photographs = Path(home) / "photographs"
            weight = make_photographs(photographs, width, height)
            say(
                f"{size}: {weight / 1000:.0f} kB each, {weight / width / height:.2f} for a pixel"
            )
            for workers in map(int, given.workers.split(",")):
                count = given.images * max(1, workers)
                folder = more_names(Path(home) / f"names-{workers}", photographs, count)
                head = f"{size:>11} {decode:>6} {workers:>7} {count:>6}"
                read = decoding(folder, count, workers, decode, model)
                say(head, read.row("decoding"))
                for name, adapter in adapters.items():
                    ceiling = min(read.rate, alone[name])
                    clock = predicting(folder, adapter, workers, decode, cluster)
                    say(head, clock.row(f"predict {name}", ceiling))
                    if name == given.evaluate and decode == "exact":
                        clock = evaluating(folder, adapter, workers)
                        say(head, clock.row(f"evaluate {name}", ceiling))
            if given.memory:
                folder = more_names(Path(home) / "long", photographs, given.memory)
                watch = MemoryWatch()
                watch.start()
                name, adapter = next(iter(adapters.items()))
                out = Path(home) / "long.csv"
                most = max(map(int, given.workers.split(",")))
                predict(
                    [folder],
                    method=adapter,
                    workers=most,
                    out=out,
                    on_progress=watch.note,
                )
                watch.over.set()
                watch.join()
                say(f"memory of all processes, {name}, {most} workers, {size}:")
                say("\n".join(watch.table(given.memory)))
                given.memory = 0  # once is enough


if __name__ == "__main__":
    main()
