"""Class lists and templates: counts, known entries, hashes, relations between lists."""

import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model.tokenizer import Tokenizer
from cliquetta.prompts import catalogue
from cliquetta.prompts.catalogue import (
    class_names,
    read_prompts,
    templates,
    wnids,
)

# id: (classes, first, last), from the papers of the datasets and CoOp's splits.
LISTS = {
    "imagenet": (1000, "tench", "toilet paper"),
    "imagenet-a": (200, "stingray", "acorn"),
    "imagenet-r": (200, "goldfish", "acorn"),
    "tiny-imagenet": (200, "goldfish", "acorn"),
    "cifar10": (10, "airplane", "truck"),
    "cifar100": (100, "apple", "worm"),
    "caltech101": (100, "face", "yin yang"),
    "pets": (37, "abyssinian", "yorkshire terrier"),
    "cars": (196, "2000 AM General Hummer SUV", "2012 smart fortwo Convertible"),
    "flowers102": (102, "pink primrose", "blackberry lily"),
    "food101": (101, "apple pie", "waffles"),
    "aircraft": (100, "707-320", "Yak-42"),
    "sun397": (397, "abbey", "youth hostel"),
    "dtd": (47, "banded", "zigzagged"),
    "eurosat": (10, "Annual Crop Land", "Sea or Lake"),
    "ucf101": (101, "Apply Eye Makeup", "Yo Yo"),
    "pacs": (7, "dog", "person"),
    "texture-vs-shape": (16, "airplane", "truck"),
    "vlcs": (5, "bird", "person"),
    "office-home": (65, "Alarm Clock", "Webcam"),
    "terra-incognita": (10, "bird", "squirrel"),
    "domainnet": (345, "The Eiffel Tower", "zigzag"),
    "domainnet-126": (126, "aircraft carrier", "zebra"),
    "visda": (12, "aeroplane", "truck"),
    "svhn": (10, "0", "9"),
    "coco-things": (80, "person", "toothbrush"),
}
SETS = {"single": 1, "openai-80": 80, "openai-7": 7, "watt-8": 8}
SETS |= {"scap-imagenet-a": 8, "scap-imagenet-r": 78, "scap-imagenet-sketch": 81}
SETS |= {"scap-imagenet-v2": 8}
CUSTOM = {
    "pets",
    "flowers102",
    "aircraft",
    "dtd",
    "eurosat",
    "food101",
    "ucf101",
    "cars",
}
CUSTOM |= {"sun397", "caltech101"}


def test_every_list_is_checked_here() -> None:
    assert set(catalogue.list_class_lists()) == set(LISTS)
    assert set(catalogue.list_templates()) == set(SETS) | CUSTOM


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: Any) -> None:
    count, first, last = LISTS[name]
    names = class_names(name)

    assert len(names) == count
    assert names[0] == first
    assert names[-1] == last
    # of ImageNet's names two occur twice
    assert len(set(names)) == (998 if name == "imagenet" else count)

    for each in names:
        assert each
        assert each == each.strip()
        assert "_" not in each


@pytest.mark.parametrize("kind", ["classes", "templates"])
def test_entries_have_a_source_and_the_hash_that_the_file_states(kind: str) -> None:
    name = "classnames" if kind == "classes" else "templates"
    path = files("cliquetta.prompts").joinpath(f"data/{name}.json")
    entries = json.loads(path.read_text(encoding="utf-8"))[
        "lists" if kind == "classes" else "sets"
    ]
    hashes = set()
    for id, entry in entries.items():
        names: list[Any] = (
            [class_names(id), entry.get("wnids", [])] if kind == "classes" else []
        )
        content = names or templates(id)
        text = json.dumps(content, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == entry["sha256"], id
        assert entry["source"]
        hashes.add(entry["sha256"])

    same = (
        3 if kind == "templates" else 0
    )  # cars, sun397 and caltech101 use the single template

    assert len(hashes) == len(entries) - same


def test_imagenet_names_hold_two_duplicates() -> None:
    names = class_names("imagenet")
    twice = {
        n: [i for i, m in enumerate(names) if m == n]
        for n in names
        if names.count(n) > 1
    }
    assert twice == {"missile": [657, 744], "sunglasses": [836, 837]}


def test_wnids() -> None:
    everything = wnids("imagenet")
    assert len(set(everything)) == 1000
    assert list(everything) == sorted(everything)
    assert all(re.fullmatch(r"n\d{8}", wnid) for wnid in everything)
    assert everything[0] == "n01440764"
    assert everything[999] == "n15075141"
    # Tabby cat and school bus, whose indices everybody knows.
    assert everything[281] == "n02123045"
    assert everything[779] == "n04146614"
    with pytest.raises(UnknownNameError):
        wnids("cifar10")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("imagenet-a", [6, 11, 13, 15, 17, 22, 23, 27, 30]),
        ("imagenet-r", [1, 2, 4, 6, 8, 9, 11, 13, 22, 23, 26, 29, 31, 39, 47, 63]),
        ("tiny-imagenet", [1, 25, 30, 32, 50]),
    ],
)
def test_subsets_of_imagenet(name: str, head: Any) -> None:
    indices = catalogue.indices(name)
    assert list(indices[: len(head)]) == head
    assert list(indices) == sorted(set(indices))
    assert len(indices) == 200

    all_wnids = wnids("imagenet")
    all_names = class_names("imagenet")
    for index, wnid in zip(indices, wnids(name), strict=True):
        assert wnid == all_wnids[index]
    for index, class_name in zip(indices, class_names(name), strict=True):
        assert class_name == all_names[index]

    assert catalogue.indices("imagenet") == tuple(range(1000))


@pytest.mark.parametrize("name", ["food101", "cifar100", "dtd"])
def test_lists_that_the_sources_sort(name: str) -> None:
    names = list(class_names(name))
    assert names == sorted(names)


def test_lists_that_the_sources_do_not_sort() -> None:
    assert class_names("eurosat")[3] == "Highway or Road"
    assert class_names("sun397")[8] == "outdoor apartment building"


def test_template_sets() -> None:
    eighty = templates("openai-80")
    assert (
        len(set(eighty)) == 80
    )  # those of open_clip: tests/parity/test_open_clip_tokenizer.py
    assert set(templates("openai-7")) < set(eighty)
    assert templates("watt-8")[2:] == templates("openai-7")[1:]
    assert templates("watt-8")[:2] == ("a photo of a {}", "itap of a {}")
    assert {name: len(templates(name)) for name in SETS} == SETS
    for name in catalogue.list_templates():
        assert all(t.count("{}") == 1 for t in templates(name))


def test_scap_sets_are_the_eighty_without_their_periods() -> None:
    bare = [t.removesuffix(".") for t in templates("openai-80")]
    for name in ("a", "r", "sketch", "v2"):
        assert set(templates(f"scap-imagenet-{name}")) <= set(bare)
    sketch = templates("scap-imagenet-sketch")
    rendition = templates("scap-imagenet-r")

    assert sketch == ("a sketch of a {}", *bare)
    assert set(bare) - set(rendition) == {
        "a bad photo of a {}", "a sculpture of a {}", "a tattoo of a {}",
    }  # fmt: skip
    assert rendition.count("a drawing of a {}") == 2


def test_choices_of_published_methods() -> None:
    choose = catalogue.template_choice
    assert choose("tda", "cars") == "openai-7"
    assert choose("tda", "imagenet-r") == "openai-80"
    assert templates(choose("tda", "dtd")) == ("{} texture.",)
    assert templates(choose("coop", "imagenet-v2")) == ("a photo of a {}.",)
    assert choose("scap", "imagenet-sketch") == "scap-imagenet-sketch"

    for scheme in ("tdaa", "scap"):
        with pytest.raises(UnknownNameError, match=scheme[:3]):
            choose(scheme, "pets")

    with pytest.raises(UnknownNameError, match="'cifar10'"):
        class_names("cifar-10")


def test_every_name_in_every_template_fits_the_context() -> None:
    tokenizer = Tokenizer()

    def longest(texts: Sequence[str]) -> int:
        return max(len(tokenizer.encode(text)) for text in texts)

    names = max(longest(class_names(name)) for name in catalogue.list_class_lists())
    assert names + longest(templates("openai-80")) + 2 < 77


@pytest.mark.parametrize("classes", [None, "", " , "])
def test_no_class_names_are_refused_with_what_to_give(classes: str | None) -> None:
    with pytest.raises(UserError, match="no class names: give --classes"):
        read_prompts(classes)
