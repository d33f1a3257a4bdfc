"""Layouts of ImageNet's validation images, its four shifted versions and Tiny-ImageNet."""

from __future__ import annotations

import csv

from cliquetta.data.benchmarks.place import Layout, Listing, Place
from cliquetta.data.benchmarks.readers import (
    by_number,
    by_wnid,
    class_folders,
    first_of,
    listed,
)
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import text_lines, wnids

_WNID = "n[0-9]*"
_SYNSETS = "imagenet_2012_validation_synset_labels.txt"
_KAGGLE = "LOC_val_solution.csv"
_CAFFE = "val.txt"
_TINY = "val_annotations.txt"
_VAL = (
    "images/val",
    "val",
    "validation",
    "ILSVRC/Data/CLS-LOC/val",
    "Data/CLS-LOC/val",
    "ILSVRC2012_img_val",
    ".",
)


def _read_flat(place: Place) -> Listing:
    """Validation images in one folder, their classes in a list."""
    number = {wnid: label for label, wnid in enumerate(wnids("imagenet"))}
    rows: list[tuple[str, int]]
    if path := place.file(_KAGGLE):
        with path.open(newline="", encoding="utf-8") as file:
            found = [(row["ImageId"], row["PredictionString"]) for row in csv.DictReader(file)]
        rows = [(f"{name}.JPEG", number[said.split()[0]]) for name, said in found]
    elif path := place.file(_SYNSETS):
        rows = [
            (f"ILSVRC2012_val_{i:08d}.JPEG", number[wnid])
            for i, wnid in enumerate(text_lines(path), start=1)
        ]
    else:
        rows = _caffe_list(place)
    return listed(rows, place.images.joinpath)


def _caffe_list(place: Place) -> list[tuple[str, int]]:
    path = place.need(_CAFFE)
    pairs = [line.split() for line in text_lines(path)]
    if any(len(pair) != 2 or not pair[1].isdecimal() for pair in pairs):
        raise UserError(f"{path} must hold a file name and a class number on each line")
    rows = [(name, int(label)) for name, label in pairs]
    # Kaggle's list of the same name counts images instead of naming classes.
    if max(label for _, label in rows) >= len(wnids("imagenet")):
        raise UserError(
            f"{path} numbers the images, not their classes: put {_KAGGLE} or {_SYNSETS} beside it"
        )
    return rows


def _read_tiny(place: Place) -> Listing:
    """Validation images in one folder, their classes in ``val_annotations.txt``."""
    path = place.need(_TINY)
    number = {wnid: label for label, wnid in enumerate(wnids("tiny-imagenet"))}
    pairs = (line.split()[:2] for line in text_lines(path))
    return listed([(name, number[wnid]) for name, wnid in pairs], place.images.joinpath)


def _by_folder(id: str, class_list: str) -> Layout:
    """One folder per WordNet id."""
    hint = f"{id} has {len(wnids(class_list))} of them, named by WordNet id"
    read = class_folders(by_wnid(class_list), hint=hint)
    return Layout("one folder per WordNet id", read, shows=(_WNID,))


_READ_V2 = class_folders(
    first_of(by_number(1000), by_wnid("imagenet")), hint="ImageNetV2 has folders 0 to 999"
)
IMAGENET: dict[str, tuple[Layout, ...]] = {
    "imagenet": (
        Layout(
            "val/ with one folder per WordNet id (or class number)",
            class_folders(
                first_of(by_wnid("imagenet"), by_number(1000)), hint="ImageNet has 1,000"
            ),
            inside=_VAL,
            shows=("[n0-9][0-9]*/*",),
        ),
        Layout(
            "val/ILSVRC2012_val_*.JPEG",
            _read_flat,
            inside=_VAL,
            shows=("ILSVRC2012_val_*",),
            files=(_KAGGLE, _SYNSETS, _CAFFE),
        ),
    ),
    "imagenet-v2": (
        Layout(
            "imagenetv2-SPLIT-format-val/ with folders 0 ... 999",
            _READ_V2,
            inside=("imagenetv2-{split}-format-val", "imagenetv2-{split}", "{split}"),
            shows=("[n0-9]*/*",),
        ),
        Layout(
            "the same without a folder around it",
            _READ_V2,
            shows=("[n0-9]*/*",),
            folders=("imagenetv2-{split}-format-val", "imagenetv2-{split}"),
        ),
        Layout(
            "folders 0 ... 999",
            _READ_V2,
            shows=("[n0-9]*/*",),
            splits=("matched-frequency",),
        ),
    ),
    "imagenet-a": (_by_folder("imagenet-a", "imagenet-a"),),
    "imagenet-r": (_by_folder("imagenet-r", "imagenet-r"),),
    "imagenet-sketch": (_by_folder("imagenet-sketch", "imagenet"),),
    "tiny-imagenet": (
        Layout(
            "val/images/",
            _read_tiny,
            inside=("{split}/images",),
            shows=("*.JPEG",),
            files=(_TINY,),
            splits=("val",),
        ),
        Layout(
            "val/ or train/ with one folder per WordNet id",
            class_folders(by_wnid("tiny-imagenet"), hint="Tiny-ImageNet has 200"),
            inside=("{split}",),
            shows=(_WNID,),
        ),
    ),
}
