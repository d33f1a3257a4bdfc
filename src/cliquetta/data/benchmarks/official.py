"""Readers of official test lists that name the same images as CoOp's splits."""

from __future__ import annotations

import re
from pathlib import Path

from cliquetta.data.benchmarks.place import Listing, Place, squeeze
from cliquetta.data.benchmarks.readers import by_name, listed
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import text_lines

PETS_LIST = "annotations/test.txt"
AIRCRAFT_LIST = "images_variant_{split}.txt"
SUN_LIST = "Testing_01.txt"
UCF_LISTS = ("testlist01.txt", "ucfTrainTestlist/testlist01.txt")


def read_pets(place: Place) -> Listing:
    """The official test list; the class is in the file name, after the number's underscore."""
    path = place.need(PETS_LIST)
    label_of = by_name("pets")
    names = [line.split()[0] for line in text_lines(path)]
    rows = [(f"{name}.jpg", _known(label_of(name.rpartition("_")[0]), name)) for name in names]
    return listed(rows, place.images.joinpath)


def read_aircraft(place: Place) -> Listing:
    """``images_variant_SPLIT.txt``: a number and a variant on each line."""
    path = place.need(AIRCRAFT_LIST.format(split=place.split))
    label_of = by_name("aircraft")
    pairs = [line.split(" ", 1) for line in text_lines(path)]
    rows = [(f"{number}.jpg", _known(label_of(name), name)) for number, name in pairs]
    return listed(rows, place.images.joinpath)


def read_sun(place: Place) -> Listing:
    """``Testing_01.txt``: lines ``/a/abbey/sun_x.jpg``; a qualifier comes first in the name."""
    path = place.need(SUN_LIST)
    label_of = by_name("sun397")
    rows = []
    for line in text_lines(path):
        key = line.removeprefix("/")
        name = " ".join(reversed(key.split("/")[1:-1]))
        rows.append((key, _known(label_of(name), key)))
    return listed(rows, place.images.joinpath)


def read_ucf(place: Place) -> Listing:
    """``testlist01.txt``: lines ``YoYo/v_YoYo_g01_c01.avi``, of which the middle frame is kept."""
    path = place.need(*UCF_LISTS)
    label_of = by_name("ucf101")
    folders = {squeeze(folder.name): folder.name for folder in place.images.iterdir()}
    rows = []
    for line in text_lines(path):
        action, _, video = line.split()[0].partition("/")
        folder = folders.get(squeeze(action), "_".join(re.findall("[A-Z][^A-Z]*", action)))
        rows.append((f"{folder}/{Path(video).stem}.jpg", _known(label_of(action), line)))
    return listed(rows, place.images.joinpath)


def _known(label: int | None, said: str) -> int:
    if label is None:
        raise UserError(f"{said!r} is not one of the classes")
    return label
