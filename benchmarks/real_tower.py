"""Zero-shot accuracy of the real ViT-B/16 image tower on 160 line drawings: a check of loading.

    python benchmarks/real_tower.py --shared DIR

``DIR`` holds what the project shares beside the repository: ``weights/`` (OpenAI's ViT-B/16 image
tower in 8 bits, OpenAI's key names), ``text/`` (embeddings of class names by its text tower, which
is not there itself: text stays fixed) and ``images/`` (pictures of Geirhos et al. 2019, CC BY 4.0).
Expected: 81 to 83 % on ``edges`` among its 16 classes.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts

BANK = "clip-vit-b16-text-bank.npz"
SOURCE = "coco-stuff171"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with weights/ ...")
    parser.add_argument("--set", default="edges", help="edges or cue-conflict")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    start = time.perf_counter()
    model = create_model(options.shared / "weights", device=options.device, dtype=options.dtype)
    loaded = time.perf_counter() - start
    pictures, labels, names = read_images(options.shared / "images", options.set)
    prompts = ClassPrompts(names, features=read_text(options.shared / "text" / BANK, names))
    classifier = model.classifier(prompts)
    right = 0
    with torch.inference_mode():
        for at in range(0, len(pictures), options.batch):
            pixels = model.preprocess.batch(pictures[at : at + options.batch]).to(model.device)
            logits = model.scale * model.encode_image(pixels, normalize=True) @ classifier.T
            right += int((logits.argmax(dim=1).cpu() == labels[at : at + options.batch]).sum())
    seconds = time.perf_counter() - start - loaded
    print(
        f"model {model.fingerprint}, {options.dtype} on {options.device}: loaded in {loaded:.1f} s"
    )
    print(
        f"{options.set}: {100 * right / len(pictures):.2f} % of {len(pictures)} images among "
        f"{len(names)} classes, {len(pictures) / seconds:.1f} images/s"
    )
    return 0


def read_images(folder: Path, wanted: str) -> tuple[list[Image.Image], Tensor, tuple[str, ...]]:
    """Pictures of one set with labels and class names."""
    index = json.loads((folder / "dev.json").read_text())
    packed = np.load(folder / "dev.npz")
    data, offsets = packed["data"], packed["off"]
    rows = [row for row, (name, _) in enumerate(index) if name == wanted]
    names = tuple(sorted({index[row][1] for row in rows}))
    pictures = [
        Image.open(io.BytesIO(data[offsets[row] : offsets[row + 1]].tobytes())) for row in rows
    ]
    return pictures, torch.tensor([names.index(index[row][1]) for row in rows]), names


def read_text(path: Path, names: tuple[str, ...]) -> Tensor:
    """The ensemble embeddings of the class names, (N, 512)."""
    bank = np.load(path)
    usable = (bank["template"] == "ensemble") & np.char.startswith(bank["source"], SOURCE)
    place = {str(bank["names"][row]): row for row in np.flatnonzero(usable)}
    return torch.tensor(bank["emb"][[place[name] for name in names]]).float()


if __name__ == "__main__":
    sys.exit(main())
