"""Tables of Hugging Face as datasets."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.huggingface import HuggingFaceDataset, parse_name
from cliquetta.data.images import ImageError
from cliquetta.errors import UnknownNameError
from tests._helpers.trees import encoded, picture


class _Rows:
    """A table with the few things that are used of ``datasets.Dataset``."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features = features
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self.rows]
        return self.rows[key]


def test_a_table_of_hugging_face(tmp_path: Path) -> None:
    file = picture(tmp_path / "b.png", 7)
    rows = [
        {"img": {"bytes": encoded(3), "path": "a.png"}, "label": 1},
        {"img": {"bytes": None, "path": str(file)}, "label": -1},
        {"img": {"bytes": b"broken", "path": None}, "label": 0},
    ]
    features = {"img": object(), "label": SimpleNamespace(names=["ant", "bee"])}
    dataset = HuggingFaceDataset("hf:x", _Rows(features, rows), "img", "label")
    assert dataset.names == ("ant", "bee")
    assert dataset.labels.tolist() == [1, UNKNOWN, 0]
    assert dataset.load(0).getpixel((0, 0)) == (3, 3, 3)
    assert dataset.load(1).getpixel((0, 0)) == (7, 7, 7)

    with pytest.raises(ImageError, match="hf:x, row 2"):
        dataset.load(2)
    with pytest.raises(UnknownNameError):
        HuggingFaceDataset("hf:x", _Rows(features, rows), "img", "lable")


def test_names_of_hugging_face_datasets() -> None:
    assert parse_name("a/b?split=valid&label=fine") == (
        "a/b",
        {"split": "valid", "label": "fine"},
    )
    for name, message in (("a/b?spilt=x", "'split'"), ("?split=x", "name")):
        with pytest.raises(ValueError, match=message):
            parse_name(name)


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"cliquetta\[hf-datasets\]"):
        get_dataset("hf:uoft-cs/cifar10")
