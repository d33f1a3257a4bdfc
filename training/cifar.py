"""CIFAR-10 and CIFAR-100 with the finer nouns of their original file names.

Both sets were drawn from 80 Million Tiny Images, and the original file names still say
which noun each picture was found under: ``train/bird/cassowary_s_000034.png`` is a bird
and a cassowary. Those nouns (over a thousand) are what the captions of the ``micro``
model are made of.

Two public copies keep the names, as folders of PNG files
``{train,test}/CLASS/NOUN_s_NUMBER.png``: github.com/cyizhuo/CIFAR-10-dataset and
github.com/cyizhuo/CIFAR-100-dataset. This program reads them and writes packs: lossless
WebP mosaics of 2,500 pictures each and the list of the file names, small enough to be
carried to another machine::

    python training/cifar.py CIFAR-10-dataset CIFAR-100-dataset --out packs

Needs numpy and Pillow only.
"""

import argparse
import gzip
import json
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Images = NDArray[np.uint8]
"""Pictures of one size, (N, H, W, 3)."""

SIDE = 32
TILES = 2_500
"""Pictures in one pack file: about 4 MB each, so that files can be grouped to any parcel size."""
COLUMNS = 50
LABELS = "labels.json.gz"


@dataclass(frozen=True)
class Split:
    """One half of one set, ordered by key."""

    images: Images
    """(N, 32, 32, 3) RGB."""
    keys: tuple[str, ...]
    """``class/file`` without the ending, unique in the split: ``bird/cassowary_s_000034``."""

    def __post_init__(self) -> None:
        if len(self.images) != len(self.keys):
            raise ValueError(f"{len(self.images)} images but {len(self.keys)} keys")

    @property
    def class_names(self) -> list[str]:
        """The class of each picture as words: ``aquarium fish``."""
        return [key.split("/")[0].replace("_", " ") for key in self.keys]

    @property
    def noun_names(self) -> list[str]:
        """The finer noun of each picture as words: ``fighter aircraft``."""
        return [fine_noun(key.split("/")[1]) for key in self.keys]


@dataclass(frozen=True)
class Cifar:
    """The training halves of both sets as one, and the test halves."""

    images: Images
    """(100000, 32, 32, 3) training pictures: CIFAR-10's 50,000, then CIFAR-100's."""
    label: NDArray[np.int64]
    """(100000,) index into ``classes``."""
    noun: NDArray[np.int64]
    """(100000,) index into ``nouns``."""
    source: NDArray[np.int64]
    """(100000,) 10 or 100: the set of each training picture."""
    classes: tuple[str, ...]
    """110 names: the 10 of CIFAR-10 in its order, then the 100 of CIFAR-100 in its order."""
    nouns: tuple[str, ...]
    """Finer nouns of the training pictures, sorted."""
    test10_images: Images
    """(10000, 32, 32, 3)."""
    test10_label: NDArray[np.int64]
    """(10000,) index into ``classes``: 0 to 9."""
    test100_images: Images
    """(10000, 32, 32, 3), or (0, 32, 32, 3) where that pack was left out."""
    test100_label: NDArray[np.int64]
    """Index into ``classes``: 10 to 109."""


def fine_noun(stem: str) -> str:
    """The noun in an original file name: ``fighter_aircraft_s_000415`` -> ``fighter aircraft``.

    A few CIFAR-100 pictures were added by hand under names such as ``manual-skunk015``.
    """
    found = re.fullmatch(r"(.+)_s_\d+", stem) or re.fullmatch(
        r"manual\d*-([a-z_]+?)\d+", stem
    )
    if found is None:
        raise ValueError(
            f"{stem!r} is not an original CIFAR name such as 'cassowary_s_000034'"
        )
    return found[1].replace("_", " ")


def read_folder(root: Path | str) -> dict[str, Split]:
    """Read one public copy: ``{"train": Split, "test": Split}``, ordered by class, then file."""
    return {name: _read_split(Path(root) / name) for name in ("train", "test")}


def _read_split(folder: Path) -> Split:
    files = sorted(folder.glob("*/*.png"))
    if not files:
        raise FileNotFoundError(
            f"no CLASS/NAME.png under {folder}: is it a copy of CIFAR as PNG?"
        )
    images = np.empty((len(files), SIDE, SIDE, 3), np.uint8)
    for i, file in enumerate(files):
        with Image.open(file) as image:
            images[i] = np.asarray(image.convert("RGB"))
    return Split(images, tuple(f"{file.parent.name}/{file.stem}" for file in files))


def join(cifar10: dict[str, Split], cifar100: dict[str, Split]) -> Cifar:
    """Both sets under one list of classes and one list of nouns."""
    train = (cifar10["train"], cifar100["train"])
    classes = tuple(
        name for split in train for name in dict.fromkeys(split.class_names)
    )
    # The sets share no class name (CIFAR-10's truck is CIFAR-100's "pickup truck"), so
    # one index serves both; a copy that breaks this would silently merge classes.
    if len(set(classes)) != len(classes):
        raise ValueError("the two sets share a class name")
    names = [noun for split in train for noun in split.noun_names]
    nouns = tuple(sorted(set(names)))
    return Cifar(
        images=np.concatenate([split.images for split in train]),
        label=_index([name for split in train for name in split.class_names], classes),
        noun=_index(names, nouns),
        source=np.repeat([10, 100], [len(split.keys) for split in train]),
        classes=classes,
        nouns=nouns,
        test10_images=cifar10["test"].images,
        test10_label=_index(cifar10["test"].class_names, classes),
        test100_images=cifar100["test"].images,
        test100_label=_index(cifar100["test"].class_names, classes),
    )


def _index(names: Iterable[str], among: Sequence[str]) -> NDArray[np.int64]:
    place = {name: i for i, name in enumerate(among)}
    return np.array([place[name] for name in names], np.int64)


def mosaic(images: Images, columns: int = COLUMNS) -> Images:
    """Tile (N, H, W, 3) row by row into one picture; missing tiles of the last row are black."""
    count, height, width, _ = images.shape
    rows = -(-count // columns)
    tiles = np.zeros((rows * columns, height, width, 3), np.uint8)
    tiles[:count] = images
    grid = tiles.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    return grid.reshape(rows * height, columns * width, 3)


def cut_mosaic(picture: Images, count: int, side: int = SIDE) -> Images:
    """The first ``count`` tiles of a mosaic: the inverse of :func:`mosaic`."""
    rows, columns = picture.shape[0] // side, picture.shape[1] // side
    if count > rows * columns:
        raise ValueError(
            f"the mosaic holds {rows * columns} tiles, {count} were asked for"
        )
    tiles = picture.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return tiles.reshape(-1, side, side, 3)[:count].copy()


def save_packs(splits: dict[str, Split], folder: Path | str) -> list[Path]:
    """Write ``NAME-00.webp``... for each split, and ``labels.json.gz`` with every key.

    ``splits`` names them ``train10``, ``test10``, ``train100``, ``test100``. Returns
    the files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (folder / f"{name}-{number:02d}.webp", split.images[start : start + TILES])
        for name, split in splits.items()
        for number, start in enumerate(range(0, len(split.images), TILES))
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: save_mosaic(*job), jobs))
    keys = {name: split.keys for name, split in splits.items()}
    (folder / LABELS).write_bytes(gzip.compress(json.dumps(keys).encode(), mtime=0))
    return [*(file for file, _ in jobs), folder / LABELS]


def save_mosaic(
    file: Path, images: Images, columns: int = COLUMNS, effort: int = 60
) -> None:
    """One lossless WebP (a fifth smaller than PNG); ``effort`` 100 saves 1 % and takes 25 x."""
    picture = Image.fromarray(mosaic(images, columns))
    picture.save(
        file, "WEBP", lossless=True, quality=effort, method=6 if effort == 100 else 4
    )


def load_packs(folder: Path | str) -> Cifar:
    """Read what :func:`save_packs` wrote, from ``folder`` or any folders below it.

    The files of ``test100`` may be absent; any other missing file is an error that
    names it.
    """
    found = {file.name: file for file in Path(folder).rglob("*") if file.is_file()}
    if LABELS not in found:
        raise FileNotFoundError(
            f"no {LABELS} under {folder}: write it with training/cifar.py"
        )
    stored = json.loads(gzip.decompress(found[LABELS].read_bytes()))
    keys = {name: tuple(listed) for name, listed in stored.items()}
    if "test100-00.webp" not in found:
        keys["test100"] = ()
    splits = {
        name: Split(_load_images(found, name, len(k)), k) for name, k in keys.items()
    }
    return join(
        {"train": splits["train10"], "test": splits["test10"]},
        {"train": splits["train100"], "test": splits["test100"]},
    )


def _load_images(found: dict[str, Path], name: str, count: int) -> Images:
    starts = range(0, count, TILES)
    needed = [f"{name}-{number:02d}.webp" for number in range(len(starts))]
    if missing := [file for file in needed if file not in found]:
        raise FileNotFoundError(f"packs are missing: {', '.join(missing)}")
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(_load_pack, found, images), needed, starts))
    return images


def _load_pack(found: dict[str, Path], images: Images, file: str, start: int) -> None:
    target = images[start : start + TILES]
    with Image.open(found[file]) as picture:
        target[:] = cut_mosaic(np.asarray(picture.convert("RGB")), len(target))


def main() -> None:
    """Command line: read the two folders, write the packs, report the sizes."""
    parser = argparse.ArgumentParser(
        description="Pack CIFAR-10 and CIFAR-100 for training."
    )
    parser.add_argument(
        "root10", type=Path, help="copy of CIFAR-10: SPLIT/CLASS/NAME.png"
    )
    parser.add_argument("root100", type=Path, help="copy of CIFAR-100, likewise")
    parser.add_argument("--out", type=Path, required=True, help="folder for the packs")
    args = parser.parse_args()
    start = time.perf_counter()
    splits = {
        f"{name}{size}": split
        for size, root in ((10, args.root10), (100, args.root100))
        for name, split in read_folder(root).items()
    }
    print(f"read {sum(len(s.keys) for s in splits.values()):,} pictures", end=" ")
    print(f"in {time.perf_counter() - start:.0f} s")
    files = save_packs(splits, args.out)
    total = sum(file.stat().st_size for file in files)
    print(f"wrote {len(files)} files, {total / 1e6:.1f} MB, to {args.out}")
    start = time.perf_counter()
    data = load_packs(args.out)
    print(
        f"read back in {time.perf_counter() - start:.1f} s: {len(data.nouns):,} nouns"
    )


if __name__ == "__main__":
    main()
