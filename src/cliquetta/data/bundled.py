"""Pictures that come with the package: a slice of CIFAR-10 (credit: ``bundled/README.md``)."""

import functools
import json
from importlib import resources
from typing import Literal

from PIL import features

from cliquetta.data.dataset import ArrayDataset
from cliquetta.data.images import cut_mosaic, open_image
from cliquetta.errors import UnknownNameError

BundledSplit = Literal["test", "few-shot"]
SPLITS: tuple[BundledSplit, ...] = ("test", "few-shot")
_SIDE = 32


@functools.cache
def load_bundled(split: BundledSplit = "test") -> ArrayDataset:
    """Read the 2,000 test pictures, or 160 few-shot ones of the training set; once, shared.

    They are ordered by class, then by original file name; copy them before writing to
    them.
    """
    if split not in SPLITS:
        raise UnknownNameError("bundled split", split, SPLITS)
    folder = resources.files("cliquetta.data") / "bundled"
    record = json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))
    if not features.check("webp"):
        raise RuntimeError(
            "this build of Pillow cannot read WebP, in which the bundled pictures are stored: "
            "install Pillow from its wheels (pip install --force-reinstall pillow)"
        )
    sheet = open_image((folder / f"{split}.webp").read_bytes())
    images = cut_mosaic(sheet, _SIDE, len(record["keys"]))
    images.flags.writeable = False
    return ArrayDataset(
        "bundled" if split == "test" else "bundled-fewshot", images, **record
    )
