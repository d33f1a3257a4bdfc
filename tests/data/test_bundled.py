"""The bundled slice: counts, balance, order and the pixels of known pictures."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.data.bundled import load_bundled
from cliquetta.errors import UnknownNameError
from training import cifar

NAMES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]


@pytest.mark.parametrize(("split", "per_class"), [("test", 200), ("few-shot", 16)])
def test_is_balanced_named_shared_and_read_only(split: str, per_class: int) -> None:
    data: Any = load_bundled(split)
    assert list(data.names) == NAMES
    assert data.images.shape == (10 * per_class, 32, 32, 3)
    assert data.images.dtype == np.uint8
    assert np.bincount(data.labels).tolist() == [per_class] * 10
    assert len(data) == 10 * per_class
    assert len(set(data.keys)) == len(data)

    # a key begins with the set, its part and the class
    origin = "train" if split == "few-shot" else split
    for key, label in zip(data.keys, data.labels, strict=True):
        assert key.startswith(f"cifar10/{origin}/{NAMES[label]}/")

    # one object for all callers, who cannot change it
    assert load_bundled(split) is data
    with pytest.raises(ValueError, match="read-only"):
        data.images[0] = 0


def test_a_split_that_is_not_bundled_is_refused_by_name() -> None:
    split: Any = "tests"
    with pytest.raises(
        UnknownNameError, match=r"unknown bundled split 'tests'.*'test'"
    ):
        load_bundled(split)


# Begin of the SHA-256 of 3,072 bytes, of PNG files of the original set read without
# this package.
@pytest.mark.parametrize(
    ("split", "index", "key", "digest"),
    [
        ("test", 0, "cifar10/test/airplane/aeroplane_s_000002", "8c0f21011607c7e7"),
        ("test", 777, "cifar10/test/cat/tabby_s_002157", "0d45a6264d13afb7"),
        ("test", 1999, "cifar10/test/truck/wrecker_s_002091", "00001ad3587a0b96"),
        ("few-shot", 0, "cifar10/train/airplane/airliner_s_000553", "589fe2c4b853577a"),
        (
            "few-shot",
            159,
            "cifar10/train/truck/trucking_rig_s_001371",
            "e05ea572ccbb020a",
        ),
    ],
)
def test_tiles_are_the_original_pictures(
    split: str, index: int, key: str, digest: str
) -> None:
    data = load_bundled(split)
    assert data.keys[index] == key
    pixels = data.images[index].tobytes()
    assert hashlib.sha256(pixels).hexdigest().startswith(digest)


def test_no_picture_twice() -> None:
    test = load_bundled("test").images
    few_shot = load_bundled("few-shot").images
    pictures = {picture.tobytes() for picture in [*test, *few_shot]}
    assert len(pictures) == 10 * 200 + 10 * 16


def test_packs_give_back_the_pictures(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)

    def split(classes: Any, count: int) -> Any:
        keys: list[str] = []
        for name in classes:
            keys += [f"{name}/some_noun{name}_s_{i:06d}" for i in range(count)]
        shape = (len(keys), 32, 32, 3)
        images = generator.integers(0, 256, shape, dtype=np.uint8)
        return cifar.Split(images, tuple(keys))

    splits = {
        "train10": split(["cat", "dog"], 1300),
        "test10": split(["cat", "dog"], 3),
        "train100": split(["aquarium_fish"], 4),
        "test100": split(["aquarium_fish"], 2),
    }
    files = cifar.save_packs(splits, tmp_path)
    assert {f.name for f in files} >= {
        "train10-00.webp",
        "train10-01.webp",
        "labels.json.gz",
    }
    (tmp_path / "parcel").mkdir()
    files[1].rename(tmp_path / "parcel" / files[1].name)
    data = cifar.load_packs(tmp_path)
    expected = np.concatenate([splits["train10"].images, splits["train100"].images])
    assert np.array_equal(data.images, expected)
    assert data.classes == ("cat", "dog", "aquarium fish")
    assert data.nouns == ("some nounaquarium fish", "some nouncat", "some noundog")
    assert data.label[[0, 1300, 2600]].tolist() == [0, 1, 2]
    assert data.noun[[0, 1300, 2600]].tolist() == [1, 2, 0]
    assert np.array_equal(data.test10_images, splits["test10"].images)
    assert data.test100_label.tolist() == [2, 2]
    (tmp_path / "parcel" / files[1].name).unlink()
    with pytest.raises(FileNotFoundError, match="train10-01"):
        cifar.load_packs(tmp_path)
