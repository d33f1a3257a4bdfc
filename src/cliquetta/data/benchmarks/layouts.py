"""Readers by the names that the layouts in ``facts.json`` call them."""

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cliquetta.data.benchmarks.benchmark import Layout, Listing, Location, squeeze
from cliquetta.data.benchmarks.readers import (
    LabelOf,
    Read,
    Rows,
    RowsOf,
    by_name,
    by_wnid,
    by_wnid_or_number,
    cifar_pickles,
    cifar_records,
    class_folders,
    coop_rows,
    each_line,
    from_list,
    load_pair,
    numbered_arrays,
    numbered_rows,
    several,
    words,
)
from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.files import walk_images
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import text_lines

# --- lists: key and class of every line ---------------------------------------------------------


def _imagenet(list_id: str, location: Location, file: Path) -> Rows:
    """Read WordNet ids by Kaggle or in the order of images; else Caffe's class numbers."""
    if file.name == "LOC_val_solution.csv":
        with file.open(newline="", encoding="utf-8") as opened:
            for row in csv.DictReader(opened):
                yield f"{row['ImageId']}.JPEG", row["PredictionString"].split()[0]
    elif file.name == "imagenet_2012_validation_synset_labels.txt":
        for number, wnid in enumerate(text_lines(file), start=1):
            yield f"ILSVRC2012_val_{number:08d}.JPEG", wnid
    else:
        for line in text_lines(file):
            name, _, label = line.partition(" ")
            yield name, label.strip()


@each_line
def _tiny(line: str) -> tuple[str, str]:
    """Read ``val_0.JPEG n03444034 0 32 44 62``."""
    name, wnid, *_ = line.split()
    return name, wnid


@each_line
def _pet(line: str) -> tuple[str, str]:
    """Read ``yorkshire_terrier_10 37 2 25``: the class is in the file's name."""
    name = line.split()[0]
    return f"{name}.jpg", name.rpartition("_")[0]


@each_line
def _plane(line: str) -> tuple[str, str]:
    """Read ``1514522 707-320``: a number and a variant."""
    number, _, variant = line.partition(" ")
    return f"{number}.jpg", variant


@each_line
def _scene(line: str) -> tuple[str, str]:
    """Read ``/a/abbey/sun_x.jpg``; a qualifier comes first in the name."""
    key = line.removeprefix("/")
    folders = key.split("/")[1:-1]
    return key, " ".join(reversed(folders))


def _ucf(list_id: str, location: Location, file: Path) -> Rows:
    """Read lines ``YoYo/v_YoYo_g01_c01.avi``, of which the middle frame is there."""
    folders = {
        squeeze(folder.name): folder.name for folder in location.images.iterdir()
    }
    for line in text_lines(file):
        action, _, video = line.split()[0].partition("/")

        # Folders are spelled with underscores, as Yo_Yo.
        usual = "_".join(re.findall("[A-Z][^A-Z]*", action))
        folder = folders.get(squeeze(action), usual)
        yield f"{folder}/{Path(video).stem}.jpg", action


ROWS: dict[str, RowsOf] = {
    "coop": coop_rows,
    "numbered": numbered_rows,
    "imagenet": _imagenet,
    "tiny-imagenet": _tiny,
    "pets": _pet,
    "aircraft": _plane,
    "sun397": _scene,
    "ucf101": _ucf,
}
LABELS: dict[str, Callable[[str], LabelOf]] = {
    "name": by_name,
    "words": lambda list_id: by_name(list_id, words),
    "wnid": by_wnid,
    "wnid or number": by_wnid_or_number,
}


# --- readers: each of a class list, with what the layout says ------------------------------------


def _folders(list_id: str, by: str = "name", hint: str = "") -> Read:
    """Read one folder per class, identified ``by`` one of :data:`LABELS`."""
    return class_folders(LABELS[by](list_id), hint=hint)


def _list(
    list_id: str, rows: str, by: str = "name", hint: str = "", anywhere: bool = False
) -> Read:
    """Read a folder of images and a list of them, the latter by one of :data:`ROWS`."""
    return from_list(
        list_id, ROWS[rows], LABELS[by](list_id), hint=hint, anywhere=anywhere
    )


def _severities(list_id: str) -> Read:
    """Read CIFAR-10-C: ``fog.npy`` with severities 1 to 5 in a row, one ``labels.npy`` for all."""

    def read(location: Location) -> Listing:
        name, _, severity = location.split.partition("/")
        file = location.images / f"{name}.npy"
        images, labels = load_pair(file, location.images / "labels.npy")
        size, rest = divmod(len(images), 5)
        if rest:
            raise UserError(
                f"{file} has {len(images)} images: five severities of the same"
            )
        end = int(severity) * size

        rows = slice(end - size, end)
        return numbered_arrays(location, images[rows], labels[rows], list_id)

    return read


def _unlabelled(list_id: str) -> Read:
    """Read images of classes that do not matter: unknown ones of an open set."""

    def read(location: Location) -> Listing:
        paths = list(walk_images(location.images))
        keys = [path.relative_to(location.images).as_posix() for path in paths]
        return Listing(keys, [UNKNOWN] * len(keys), paths)

    return read


def _cifar101(list_id: str) -> Read:
    """Read CIFAR-10.1: ``cifar10.1_v6_data.npy`` (N, 32, 32, 3) and its labels."""

    def read(location: Location) -> Listing:
        stem = f"cifar10.1_{location.split}"
        folder = location.images
        images, labels = load_pair(
            folder / f"{stem}_data.npy", folder / f"{stem}_labels.npy"
        )
        return numbered_arrays(location, images, labels, list_id, digits=4)

    return read


def _svhn(list_id: str) -> Read:
    """Read ``test_32x32.mat``: pictures (32, 32, 3, N) and labels in which 10 stands for 0."""

    def read(location: Location) -> Listing:
        try:
            from scipy.io import loadmat
        except ImportError:
            remedy = "pip install scipy to read them"
            raise UserError(f"the files of SVHN are MATLAB's: {remedy}") from None
        path = location.images / f"{location.split}_32x32.mat"
        try:
            content = loadmat(path)
            images = content["X"]
            labels = content["y"].ravel()
        except (ValueError, KeyError, OSError) as error:
            raise UserError(f"{path} is not a file of SVHN ({error})") from None

        pictures = np.moveaxis(images, 3, 0)
        return numbered_arrays(location, pictures, labels % 10, list_id)

    return read


READERS: dict[str, Callable[..., Read]] = {
    "folders": _folders,
    "domains": several,
    "list": _list,
    "unlabelled": _unlabelled,
    "severities": _severities,
    "cifar pickles": cifar_pickles,
    "cifar records": cifar_records,
    "cifar10.1": _cifar101,
    "svhn": _svhn,
}


def read_layout(list_id: str, entry: Mapping[str, Any]) -> Layout:
    """Read a layout of ``facts.json``: its reader with its options, and where to look."""
    options = dict(entry["read"])
    reader = READERS[options.pop("kind")]
    fields = {**entry, "read": reader(list_id, **options)}
    return Layout(**fields)
