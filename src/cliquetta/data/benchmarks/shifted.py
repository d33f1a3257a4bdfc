"""Layouts of shifted versions: corrupted copies, several domains, and images of no known class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cliquetta.data.benchmarks.cifar import load_array
from cliquetta.data.benchmarks.place import Layout, Listing, Place
from cliquetta.data.benchmarks.readers import by_name, by_wnid, class_folders, listed, several
from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.files import walk_images
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import class_names, text_lines

_GROUPS = ("noise", "blur", "weather", "digital", "extra")
"""Archives of ImageNet-C, each a folder of corruptions."""


def _corrupted_arrays(list_id: str) -> Layout:
    """CIFAR-10-C: ``fog.npy`` with severities 1 to 5 in a row, ``labels.npy`` for all of them."""

    def read(place: Place) -> Listing:
        name, _, severity = place.split.partition("/")
        if not (place.images / f"{name}.npy").is_file():
            raise UserError(f"no {name}.npy in {place.images}")
        images = load_array(place.images / f"{name}.npy")
        labels = load_array(place.images / "labels.npy")
        if images.shape[1:] != (32, 32, 3) or labels.shape != images.shape[:1] or len(images) % 5:
            raise UserError(
                f"{place.images / name}.npy and labels.npy have shapes {images.shape} and "
                f"{labels.shape}: five severities of the same images are wanted"
            )
        size = len(images) // 5
        rows = slice((int(severity) - 1) * size, int(severity) * size)
        if labels.max() >= len(class_names(list_id)):
            raise UserError(f"{place.images / 'labels.npy'} holds no labels of {list_id}")
        return Listing(
            keys=[f"{place.split}/{number:05d}" for number in range(size)],
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
    return Layout(f"{', '.join(n[0] for n in named.values())} with one folder per class", read,
                  shows=(shows,), splits=("all", *named))  # fmt: skip


def _listed(file: str, list_id: str, splits: tuple[str, ...]) -> Layout:
    """Lists of ``domain/class/file label``; the folder's name must be that of the label."""
    label_of = by_name(list_id)

    def read(place: Place) -> Listing:
        path = place.need(file.format(split=place.split.removesuffix("-test")))
        rows: list[tuple[str, int]] = []
        for line in text_lines(path):
            key, _, number = line.rpartition(" ")
            if not number.isdecimal() or label_of(Path(key).parent.name) != int(number):
                raise UserError(f"{path}: {line!r} contradicts our class list of {list_id}")
            rows.append((key, int(number)))
        return listed(rows, place.images.joinpath)

    names = tuple(file.format(split=split.removesuffix("-test")) for split in splits)
    return Layout(f"domain/class/ with {file.format(split='DOMAIN')}", read,
                  shows=("*/*/*",), files=names, splits=splits)  # fmt: skip


def _unlabelled(name: str, *inside: str) -> Layout:
    """Images of classes that do not matter: unknown ones of an open set."""

    def read(place: Place) -> Listing:
        paths = list(walk_images(place.images))
        keys = [path.relative_to(place.images).as_posix() for path in paths]
        return Listing(keys, [UNKNOWN] * len(keys), paths)

    return Layout(name, read, (*inside, "."), ("*",))


def _read_svhn(place: Place) -> Listing:
    """``test_32x32.mat``: pictures (32, 32, 3, N) and labels in which 10 stands for 0."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError("the files of SVHN are MATLAB's: pip install scipy to read them") from None
    path = place.images / f"{place.split}_32x32.mat"
    try:
        content = loadmat(path)
        images, labels = content["X"], content["y"].ravel()
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{path} is not a file of SVHN ({error})") from None
    pictures = np.ascontiguousarray(np.moveaxis(images, 3, 0), dtype=np.uint8)
    keys = [f"{place.split}/{number:05d}" for number in range(len(pictures))]
    return Listing(keys, (labels % 10).astype(int).tolist(), images=pictures)


_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
SHIFTED: dict[str, tuple[Layout, ...]] = {
    "cifar10-c": (_corrupted_arrays("cifar10"),),
    "cifar100-c": (_corrupted_arrays("cifar100"),),
    "imagenet-c": (_corrupted_tree(*_GROUPS),),
    "imagenet-c-bar": (_corrupted_tree(),),
    "vlcs": (
        _domains("vlcs", "*/bird", caltech101="Caltech101", labelme="LabelMe", sun09="SUN09",
                 voc2007="VOC2007"),
    ),
    "office-home": (
        _domains("office-home", "*/Alarm_Clock", art="Art", clipart="Clipart", product="Product",
                 real_world="Real World|Real_World|RealWorld|Real"),
    ),
    "terra-incognita": (
        _domains("terra-incognita", "*/bobcat", location_100="location_100",
                 location_38="location_38", location_43="location_43", location_46="location_46"),
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
        _unlabelled("NINCO_OOD_classes/ with one folder per class", "NINCO/NINCO_OOD_classes",
                    "NINCO_OOD_classes"),
    ),
}  # fmt: skip
