"""Layouts of the ten datasets of the cross-domain benchmark, on CoOp's test splits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cliquetta.data.benchmarks import official
from cliquetta.data.benchmarks.place import COOP, Layout, Place
from cliquetta.data.benchmarks.readers import (
    by_words,
    class_folders,
    coop_split,
)
from cliquetta.data.files import walk_images


def _split_file(name: str) -> str:
    return f"{COOP}{name}.json"


def _coop(name: str, split: str, list_id: str, *inside: str, shows: str = "*") -> Layout:
    """CoOp's layout: a folder of images and a split file."""
    file = _split_file(split)
    return Layout(name, coop_split(file, list_id), inside, (shows,), (file,))


def _by_file_name(place: Place) -> Callable[[str], Path]:
    """Finds pictures below class folders by file name alone."""
    paths = {path.name: path for path in walk_images(place.images)}
    return lambda key: paths.get(Path(key).name, place.images / key)


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
            coop_split(_split_file("OxfordFlowers"), "flowers102", locate=_by_file_name),
            ("flowers", "dataset", "."),
            ("*/*/image_*.jpg",),
            (_split_file("OxfordFlowers"),),
        ),
    ),
    "pets": (
        _coop("images/", "OxfordPets", "pets", "images", shows="*_*.jpg"),
        Layout(
            "images/",
            official.read_pets,
            ("images",),
            ("*_*.jpg",),
            (official.PETS_LIST,),
            splits=("test",),
        ),
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
            "SUN397/a ... z",
            official.read_sun,
            ("SUN397", "."),
            ("a/abbey",),
            (official.SUN_LIST,),
            splits=("test",),
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
            official.read_ucf,
            ("UCF-101-midframes", "."),
            ("Apply*",),
            official.UCF_LISTS,
            splits=("test",),
        ),
    ),
    "aircraft": (
        Layout(
            "images/",
            official.read_aircraft,
            ("images", "data/images"),
            ("*.jpg",),
            (official.AIRCRAFT_LIST,),
        ),
    ),
}
