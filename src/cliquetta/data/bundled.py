"""The pictures that come with the package: a slice of CIFAR-10 (credit: ``bundled/README.md``)."""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import features

from cliquetta.data.images import cut_mosaic, open_image
from cliquetta.errors import UnknownNameError

BundledSplit = Literal["test", "few-shot"]
SPLITS: tuple[BundledSplit, ...] = ("test", "few-shot")
_SIDE = 32


@dataclass(frozen=True, eq=False)
class BundledImages:
    """Pictures with their labels, ordered by class, then by original file name."""

    images: NDArray[np.uint8]  # (N, 32, 32, 3) RGB, read-only: copy before writing to it
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    keys: tuple[str, ...]  # a stable name for each picture: `cifar10/test/bird/cassowary_s_000034`

    def __len__(self) -> int:
        return len(self.keys)


@functools.cache
def load_bundled(split: BundledSplit = "test") -> BundledImages:
    """The 2,000 test pictures, or 160 few-shot ones of the training set; read once, shared."""
    if split not in SPLITS:
        raise UnknownNameError("bundled split", split, SPLITS)
    folder = resources.files("cliquetta.data") / "bundled"
    record = json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))
    labels = np.asarray(record["labels"], np.int64)
    if not features.check("webp"):
        raise RuntimeError(
            "this build of Pillow cannot read WebP, in which the bundled pictures are stored: "
            "install Pillow from its wheels (pip install --force-reinstall pillow)"
        )
    sheet = open_image((folder / f"{split}.webp").read_bytes())
    images = cut_mosaic(sheet, _SIDE, len(labels))
    images.flags.writeable = labels.flags.writeable = False
    return BundledImages(images, labels, tuple(record["names"]), tuple(record["keys"]))
