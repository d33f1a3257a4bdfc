"""How long TDA, Zero and MTA take over a dataset of ImageNet's size whose features are kept.

Features are made up: unit vectors around 1000 directions, written through the feature
cache and read back from it by the same runner as any other run, metrics and predictions
on disk included.

    python -m benchmarks.cached_features                       # TDA, 50,000 images
    python -m benchmarks.cached_features --method zero --images 5000 --views 64
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from cliquetta.data.dataset import Dataset
from cliquetta.data.feature_cache import FeatureBlock
from cliquetta.data.prepared import FeatureStream
from cliquetta.data.stream import Stream
from cliquetta.evaluation.runner import evaluate
from cliquetta.methods.building.registry import create_method, method_config
from cliquetta.model.clip import CLIP, initialise
from cliquetta.model.config import CLIPConfig, VisionConfig
from cliquetta.prompts.classes import ClassPrompts

WIDTH = 512
"""Entries of a feature, as those of ViT-B/16."""


class Nowhere(Dataset):
    """Labelled images that nobody may look at."""

    def __init__(self, images: int, classes: int, seed: int = 0) -> None:
        labels = np.random.default_rng(seed).integers(0, classes, images)
        super().__init__(
            "made-up",
            names=[f"class {n}" for n in range(classes)],
            keys=[f"{i:07d}" for i in range(images)],
            labels=torch.from_numpy(labels),
        )

    def load(self, index: int) -> Image.Image:
        raise AssertionError(
            f"image {index} was opened, its features should have been read"
        )


class MadeUpFeatures(FeatureStream):
    """Features that are drawn where others would be encoded."""

    def __init__(
        self, stream: Stream, model: CLIP, root: Path, centres: np.ndarray
    ) -> None:
        super().__init__(stream, model, root)
        self.centres = centres

    def _encode(self, number: int, blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        labels = self.stream.domains[number].labels
        assert labels is not None
        views = 1 if self.views is None else self.views.count
        for rows in blocks:
            generator = np.random.default_rng(rows.start)
            own = self.centres[labels[rows.start : rows.stop].numpy()][:, None]
            # As with CLIP: images are far from their class's text, views near one
            # another.
            image = own + 6.0 * generator.standard_normal(own.shape) / np.sqrt(WIDTH)
            noise = (
                2.0
                * generator.standard_normal((len(rows), views, WIDTH))
                / np.sqrt(WIDTH)
            )
            features = image + noise
            features /= np.linalg.norm(features, axis=-1, keepdims=True)
            yield FeatureBlock(features.astype(np.float32))


def build_model() -> CLIP:
    """A CLIP whose towers are never used; its logit scale is that of the releases."""
    vision = VisionConfig(
        image_size=32, patch_size=16, width=32, layers=1, heads=2, hidden=32
    )
    model = initialise(CLIP(CLIPConfig(WIDTH, vision, None), id="made-up"), 0)
    model.logit_scale.data.fill_(float(np.log(100.0)))
    return model


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    generator = np.random.default_rng(1)
    centres = generator.standard_normal((options.classes, WIDTH))
    centres /= np.linalg.norm(centres, axis=-1, keepdims=True)
    model = build_model()
    data = Nowhere(options.images, options.classes)
    text = torch.from_numpy(centres.astype(np.float32))
    prompts = ClassPrompts(data.names, features=text)
    changes = {} if options.views is None else {"views": options.views}
    config = method_config(options.method, None, changes)
    adapter = create_method(options.method, model, prompts, config)
    stream = Stream(data, model.preprocess, options.batch_size, views=adapter.views)
    features = MadeUpFeatures(stream, model, folder / "cache", centres)
    start = time.perf_counter()
    next(iter(features.batches()))
    written = time.perf_counter() - start
    features = MadeUpFeatures(stream, model, folder / "cache", centres)
    start = time.perf_counter()
    busy = time.process_time()
    record = evaluate(adapter, features, out=folder / "runs")
    return {
        "method": options.method,
        "images": record.images,
        "classes": options.classes,
        "views": 1 if adapter.views is None else adapter.views.count,
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - busy, 1),
        "in_the_method": round(record.throughput["seconds"], 1),
        "seconds_to_write_the_cache": round(written, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "top1": round(record.metrics["top1"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--method", default="tda")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument(
        "--views", type=int, help="views per image, where the method has them"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
