"""ImageNet's validation images, its four shifted versions and Tiny-ImageNet."""

from __future__ import annotations

import csv

from cliquetta.data.benchmarks.benchmark import Benchmark
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
_TERMS = "ILSVRC-2012 (Russakovsky et al., 2015), non-commercial research"


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


def _variant(
    id: str,
    summary: str,
    folders: tuple[str, ...],
    images: int,
    get: str,
    terms: str,
    class_list: str,
    traps: tuple[str, ...],
) -> Benchmark:
    """A version of ImageNet with one folder for each WordNet id."""
    hint = f"{id} has {len(wnids(class_list))} of them, named by WordNet id"
    layout = Layout(
        "one folder a WordNet id",
        class_folders(by_wnid(class_list), hint=hint),
        shows=(_WNID,),
    )
    return Benchmark(
        id, summary, folders, (layout,), {"test": images}, get, terms, class_list, traps
    )


_READ_V2 = class_folders(
    first_of(by_number(1000), by_wnid("imagenet")), hint="ImageNetV2 has folders 0 to 999"
)
_SUBSET = (
    "its 200 classes are a subset of ImageNet's 1,000 and differ from those of the other 200-class "
    "versions: labels follow the WordNet ids of its own list, and the class list has 200 names"
)

IMAGENET = (
    Benchmark(
        "imagenet",
        "ImageNet validation images",
        (
            "imagenet",
            "imagenet-1k",
            "imagenet2012",
            "ilsvrc2012",
            "imagenet-val",
            "imagenet-object-localization-challenge",
        ),
        (
            Layout(
                "val/ with one folder a WordNet id (or class number)",
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
        {"val": 50_000},
        "Get ILSVRC2012_img_val.tar from image-net.org (an account is needed) and extract it to "
        "imagenet/images/val/.",
        _TERMS,
        "imagenet",
        (
            "ILSVRC2012_validation_ground_truth.txt of the development kit counts classes in "
            "another order than everybody's labels: it is not used",
            "two names stand twice in the curated list (657 and 744, 836 and 837)",
        ),
    ),
    Benchmark(
        "imagenet-v2",
        "a second test set for ImageNet, taken as the first was",
        ("imagenetv2", "imagenet-v2"),
        (
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
        {"matched-frequency": 10_000, "threshold0.7": 10_000, "top-images": 10_000},
        "Get imagenetv2-matched-frequency.tar.gz (github.com/modestyachts/ImageNetV2, or "
        "huggingface.co/datasets/vaishaal/ImageNetV2) and extract it to imagenetv2/.",
        "Recht et al., 2019; MIT",
        "imagenet",
        (
            "folders 0 ... 999 sorted as strings (0, 1, 10, 100, ...) give nearly every class a "
            "wrong label: they are read as numbers",
        ),
    ),
    _variant(
        "imagenet-a",
        "natural adversarial examples",
        ("imagenet-a", "imagenet-adversarial/imagenet-a", "imagenet-adversarial"),
        7_500,
        "Get imagenet-a.tar from github.com/hendrycks/natural-adv-examples and extract it.",
        "Hendrycks et al., 2021; MIT",
        "imagenet-a",
        (_SUBSET,),
    ),
    _variant(
        "imagenet-r",
        "renditions: art, cartoons, toys, tattoos ...",
        ("imagenet-r", "imagenet-rendition/imagenet-r", "imagenet-rendition"),
        30_000,
        "Get imagenet-r.tar from github.com/hendrycks/imagenet-r and extract it.",
        "Hendrycks et al., 2021; MIT",
        "imagenet-r",
        (_SUBSET,),
    ),
    _variant(
        "imagenet-sketch",
        "sketches of ImageNet's classes",
        ("imagenet-sketch/images", "imagenet-sketch/sketch", "imagenet-sketch", "sketch"),
        50_889,
        "Get ImageNet-Sketch.zip from github.com/HaohanWang/ImageNet-Sketch and extract it to "
        "imagenet-sketch/.",
        "Wang et al., 2019; MIT",
        "imagenet",
        ("papers round its 50,889 images to 50,000",),
    ),
    Benchmark(
        "tiny-imagenet",
        "200 classes of ImageNet at 64 px, validation images",
        ("tiny-imagenet-200", "tiny-imagenet", "tiny-imagenet/tiny-imagenet-200"),
        (
            Layout(
                "val/images/",
                _read_tiny,
                inside=("{split}/images",),
                shows=("*.JPEG",),
                files=(_TINY,),
                splits=("val",),
            ),
            Layout(
                "val/ or train/ with one folder a WordNet id",
                class_folders(by_wnid("tiny-imagenet"), hint="Tiny-ImageNet has 200"),
                inside=("{split}",),
                shows=(_WNID,),
            ),
        ),
        {"val": 10_000, "train": 100_000},
        "Get tiny-imagenet-200.zip from cs231n.stanford.edu and extract it.",
        "Stanford CS231n, from ImageNet; non-commercial research",
        "tiny-imagenet",
        ("wnids.txt is not sorted: labels follow the sorted WordNet ids, as class folders do",),
    ),
)
