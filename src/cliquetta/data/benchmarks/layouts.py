"""Layouts of the known datasets: where the images and lists of each may be, and who reads them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cliquetta.data.benchmarks.location import COOP, Layout, Listing, Location
from cliquetta.data.benchmarks.readers import (
    AIRCRAFT_LIST,
    PETS_LIST,
    SUN_LIST,
    UCF_LISTS,
    by_name,
    by_number,
    by_wnid,
    by_words,
    class_folders,
    coop_split,
    first_of,
    listed,
    load_array,
    read_aircraft,
    read_cifar10_pickles,
    read_cifar10_records,
    read_cifar100_pickles,
    read_cifar100_records,
    read_cifar101,
    read_pets,
    read_sun,
    read_ucf,
    several,
)
from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.files import walk_images
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import class_names, text_lines, wnids

# --- ImageNet, its shifted versions and Tiny-ImageNet -------------------------------------------

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


def _read_flat(location: Location) -> Listing:
    """Validation images in one folder, their classes in a list."""
    number = {wnid: label for label, wnid in enumerate(wnids("imagenet"))}
    rows: list[tuple[str, int]]
    if path := location.file(_KAGGLE):
        with path.open(newline="", encoding="utf-8") as file:
            found = [(row["ImageId"], row["PredictionString"]) for row in csv.DictReader(file)]
        rows = [(f"{name}.JPEG", number[stated.split()[0]]) for name, stated in found]
    elif path := location.file(_SYNSETS):
        rows = [
            (f"ILSVRC2012_val_{i:08d}.JPEG", number[wnid])
            for i, wnid in enumerate(text_lines(path), start=1)
        ]
    else:
        rows = _caffe_list(location)
    return listed(rows, location.images.joinpath)


def _caffe_list(location: Location) -> list[tuple[str, int]]:
    path = location.need(_CAFFE)
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


def _read_tiny(location: Location) -> Listing:
    """Validation images in one folder, their classes in ``val_annotations.txt``."""
    path = location.need(_TINY)
    number = {wnid: label for label, wnid in enumerate(wnids("tiny-imagenet"))}
    pairs = (line.split()[:2] for line in text_lines(path))
    return listed([(name, number[wnid]) for name, wnid in pairs], location.images.joinpath)


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
        Layout("folders 0 ... 999", _READ_V2, shows=("[n0-9]*/*",), splits=("matched-frequency",)),
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


# --- the ten cross-domain datasets, on CoOp's test splits ----------------------------------------


def _coop(name: str, split: str, list_id: str, *inside: str, shows: str = "*") -> Layout:
    """CoOp's layout: a folder of images and a split file."""
    file = f"{COOP}{split}.json"
    return Layout(name, coop_split(file, list_id), inside, (shows,), (file,))


def _by_file_name(location: Location) -> Callable[[str], Path]:
    """Finds pictures below class folders by file name alone."""
    paths = {path.name: path for path in walk_images(location.images)}
    return lambda key: paths.get(Path(key).name, location.images / key)


_FLOWERS = f"{COOP}OxfordFlowers.json"
CROSS_DOMAIN: dict[str, tuple[Layout, ...]] = {
    "caltech101": (
        _coop(
            "101_ObjectCategories/",
            "Caltech101",
            "caltech101",
            "101_ObjectCategories",
            "caltech-101/101_ObjectCategories",
            shows="Faces",
        ),
    ),
    "flowers102": (
        _coop(
            "jpg/image_*.jpg",
            "OxfordFlowers",
            "flowers102",
            "jpg",
            "images",
            ".",
            shows="image_*.jpg",
        ),
        Layout(
            "train/, valid/, test/ with folders 1 ... 102",
            coop_split(_FLOWERS, "flowers102", locate=_by_file_name),
            ("flowers", "dataset", "."),
            ("*/*/image_*.jpg",),
            (_FLOWERS,),
        ),
    ),
    "pets": (
        _coop("images/", "OxfordPets", "pets", "images", shows="*_*.jpg"),
        Layout("images/", read_pets, ("images",), ("*_*.jpg",), (PETS_LIST,), splits=("test",)),
    ),
    "cars": (
        _coop("cars_test/", "StanfordCars", "cars", ".", shows="cars_test/*.jpg"),
        Layout(
            "test/ or train/ with one folder per model",
            class_folders(by_words("cars"), hint="folders are named by make, model and year"),
            ("{split}", "car_data/{split}", "car_data/car_data/{split}"),
            ("* */*.jpg",),
            splits=("test",),
        ),
    ),
    "sun397": (
        _coop("SUN397/a ... z", "SUN397", "sun397", "SUN397", ".", shows="a/abbey"),
        Layout(
            "SUN397/a ... z", read_sun, ("SUN397", "."), ("a/abbey",), (SUN_LIST,), splits=("test",)
        ),
    ),
    "eurosat": (
        _coop(
            "2750/ with one folder per class",
            "EuroSAT",
            "eurosat",
            "2750",
            "EuroSAT_RGB",
            ".",
            shows="AnnualCrop",
        ),
    ),
    "food101": (_coop("images/", "Food101", "food101", "images", shows="apple_pie"),),
    "dtd": (_coop("images/", "DescribableTextures", "dtd", "images", shows="banded"),),
    "ucf101": (
        _coop("UCF-101-midframes/", "UCF101", "ucf101", "UCF-101-midframes", ".", shows="Apply*"),
        Layout(
            "UCF-101-midframes/",
            read_ucf,
            ("UCF-101-midframes", "."),
            ("Apply*",),
            UCF_LISTS,
            splits=("test",),
        ),
    ),
    "aircraft": (
        Layout("images/", read_aircraft, ("images", "data/images"), ("*.jpg",), (AIRCRAFT_LIST,)),
    ),
}


# --- CIFAR, PACS, texture against shape ---------------------------------------------------------

_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
_STIMULI = {
    "edges": ("edges",),
    "silhouettes": ("filled-silhouettes",),
    "cue-conflict": ("style-transfer-preprocessed-512",),
}


def _png_copy(list_id: str) -> Layout:
    return Layout(
        "test/ and train/ with one folder per class",
        class_folders(by_name(list_id)),
        inside=("{split}",),
        shows=("*/*.png",),
    )


SMALL: dict[str, tuple[Layout, ...]] = {
    "cifar10": (
        Layout(
            "cifar-10-batches-py/ (pickles)",
            read_cifar10_pickles,
            (".", "cifar-10-batches-py"),
            ("test_batch", "data_batch_1"),
        ),
        Layout(
            "cifar-10-batches-bin/ (binary)",
            read_cifar10_records,
            (".", "cifar-10-batches-bin"),
            ("test_batch.bin", "data_batch_1.bin"),
        ),
        _png_copy("cifar10"),
    ),
    "cifar100": (
        Layout(
            "cifar-100-python/ (pickles)",
            read_cifar100_pickles,
            (".", "cifar-100-python"),
            ("meta", "{split}"),
        ),
        Layout(
            "cifar-100-binary/", read_cifar100_records, (".", "cifar-100-binary"), ("{split}.bin",)
        ),
        _png_copy("cifar100"),
    ),
    "cifar10.1": (
        Layout(
            "cifar10.1_SPLIT_data.npy and cifar10.1_SPLIT_labels.npy",
            read_cifar101,
            shows=("cifar10.1_{split}_data.npy", "cifar10.1_{split}_labels.npy"),
        ),
    ),
    "pacs": (
        Layout(
            f"{', '.join(_DOMAINS)} with one folder per class each",
            several({domain: (domain,) for domain in _DOMAINS}, "pacs"),
            shows=("*/dog",),
        ),
    ),
    "texture-vs-shape": (
        Layout(
            "stimuli/ with edges, filled-silhouettes, style-transfer-preprocessed-512",
            several(_STIMULI, "texture-vs-shape"),
            (".", "stimuli"),
            ("*/airplane",),
        ),
    ),
}


# --- corrupted copies, several domains, images of no known class ---------------------------------

_GROUPS = ("noise", "blur", "weather", "digital", "extra")
"""Archives of ImageNet-C, each a folder of corruptions."""


def _corrupted_arrays(list_id: str) -> Layout:
    """CIFAR-10-C: ``fog.npy`` with severities 1 to 5 in a row, ``labels.npy`` for all of them."""

    def read(location: Location) -> Listing:
        name, _, severity = location.split.partition("/")
        if not (location.images / f"{name}.npy").is_file():
            raise UserError(f"no {name}.npy in {location.images}")
        images = load_array(location.images / f"{name}.npy")
        labels = load_array(location.images / "labels.npy")
        if images.shape[1:] != (32, 32, 3) or labels.shape != images.shape[:1] or len(images) % 5:
            raise UserError(
                f"{location.images / name}.npy and labels.npy have shapes {images.shape} and "
                f"{labels.shape}: five severities of the same images are wanted"
            )
        size = len(images) // 5
        rows = slice((int(severity) - 1) * size, int(severity) * size)
        if labels.max() >= len(class_names(list_id)):
            raise UserError(f"{location.images / 'labels.npy'} holds no labels of {list_id}")
        return Listing(
            keys=[f"{location.split}/{number:05d}" for number in range(size)],
            labels=labels[rows].astype(int).tolist(),
            images=np.ascontiguousarray(images[rows], dtype=np.uint8),
        )

    return Layout("CORRUPTION.npy and labels.npy", read, shows=("labels.npy",))


def _corrupted_tree(*groups: str) -> Layout:
    """ImageNet-C: corruption, severity, WordNet id."""
    inside = ("{split}", *(f"{group}/{{split}}" for group in groups))
    read = class_folders(by_wnid("imagenet"), hint="ImageNet has 1,000, named by WordNet id")
    return Layout("CORRUPTION/SEVERITY/ with one folder per WordNet id", read, inside, ("n[0-9]*",))


def _domains(list_id: str, shows: str, **folders: str) -> Layout:
    """A folder per domain with one folder per class each; a domain may have several names."""
    named = {split.replace("_", "-"): tuple(names.split("|")) for split, names in folders.items()}
    read = several(named, list_id)
    return Layout(
        f"{', '.join(n[0] for n in named.values())} with one folder per class",
        read,
        shows=(shows,),
        splits=("all", *named),
    )


def _listed(file: str, list_id: str, splits: tuple[str, ...]) -> Layout:
    """Lists of ``domain/class/file label``; the folder's name must be that of the label."""
    label_of = by_name(list_id)

    def read(location: Location) -> Listing:
        path = location.need(file.format(split=location.split.removesuffix("-test")))
        rows: list[tuple[str, int]] = []
        for line in text_lines(path):
            key, _, number = line.rpartition(" ")
            if not number.isdecimal() or label_of(Path(key).parent.name) != int(number):
                raise UserError(f"{path}: {line!r} contradicts our class list of {list_id}")
            rows.append((key, int(number)))
        return listed(rows, location.images.joinpath)

    names = tuple(file.format(split=split.removesuffix("-test")) for split in splits)
    return Layout(
        f"domain/class/ with {file.format(split='DOMAIN')}",
        read,
        shows=("*/*/*",),
        files=names,
        splits=splits,
    )


def _unlabelled(name: str, *inside: str) -> Layout:
    """Images of classes that do not matter: unknown ones of an open set."""

    def read(location: Location) -> Listing:
        paths = list(walk_images(location.images))
        keys = [path.relative_to(location.images).as_posix() for path in paths]
        return Listing(keys, [UNKNOWN] * len(keys), paths)

    return Layout(name, read, (*inside, "."), ("*",))


def _read_svhn(location: Location) -> Listing:
    """``test_32x32.mat``: pictures (32, 32, 3, N) and labels in which 10 stands for 0."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError("the files of SVHN are MATLAB's: pip install scipy to read them") from None
    path = location.images / f"{location.split}_32x32.mat"
    try:
        content = loadmat(path)
        images, labels = content["X"], content["y"].ravel()
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{path} is not a file of SVHN ({error})") from None
    pictures = np.ascontiguousarray(np.moveaxis(images, 3, 0), dtype=np.uint8)
    keys = [f"{location.split}/{number:05d}" for number in range(len(pictures))]
    return Listing(keys, (labels % 10).astype(int).tolist(), images=pictures)


_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
SHIFTED: dict[str, tuple[Layout, ...]] = {
    "cifar10-c": (_corrupted_arrays("cifar10"),),
    "cifar100-c": (_corrupted_arrays("cifar100"),),
    "imagenet-c": (_corrupted_tree(*_GROUPS),),
    "imagenet-c-bar": (_corrupted_tree(),),
    "vlcs": (
        _domains(
            "vlcs",
            "*/bird",
            caltech101="Caltech101",
            labelme="LabelMe",
            sun09="SUN09",
            voc2007="VOC2007",
        ),
    ),
    "office-home": (
        _domains(
            "office-home",
            "*/Alarm_Clock",
            art="Art",
            clipart="Clipart",
            product="Product",
            real_world="Real World|Real_World|RealWorld|Real",
        ),
    ),
    "terra-incognita": (
        _domains(
            "terra-incognita",
            "*/bobcat",
            location_100="location_100",
            location_38="location_38",
            location_43="location_43",
            location_46="location_46",
        ),
    ),
    "domainnet": (
        _listed("{split}_test.txt", "domainnet", tuple(f"{d}-test" for d in _DOMAINNET)),
        _domains("domainnet", "*/aircraft_carrier", **{d: d for d in _DOMAINNET}),
    ),
    "domainnet-126": (
        _listed("{split}_list.txt", "domainnet-126", ("clipart", "painting", "real", "sketch")),
    ),
    "visda": (
        Layout(
            "train/ and validation/ with one folder per class",
            class_folders(by_name("visda")),
            ("{split}",),
            ("aeroplane",),
        ),
    ),
    "svhn": (
        Layout("test_32x32.mat and train_32x32.mat", _read_svhn, shows=("{split}_32x32.mat",)),
    ),
    "places-unknown": (_unlabelled("images/", "images"),),
    "inaturalist-unknown": (_unlabelled("images/", "images"),),
    "ninco": (
        _unlabelled(
            "NINCO_OOD_classes/ with one folder per class",
            "NINCO/NINCO_OOD_classes",
            "NINCO_OOD_classes",
        ),
    ),
}

LAYOUTS = IMAGENET | CROSS_DOMAIN | SMALL | SHIFTED
