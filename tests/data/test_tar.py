"""Tar shards: classes, keys and what cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import Dataset
from cliquetta.data.images import ImageError
from cliquetta.data.listing import list_images
from cliquetta.data.tar import tar_dataset
from tests._helpers.trees import encoded, make_tar, write


def test_webdataset_shards_with_numbers(tmp_path: Path) -> None:
    """Layout of CLIP-benchmark: shards in ``test/``, class names and templates above."""
    shards = tmp_path / "test"
    for shard in range(2):
        members = {
            "000.png": encoded(10 * shard),
            "000.cls": b"%d" % shard,
            "001.left.png": encoded(10 * shard + 1),
            "001.cls": b"1",
        }
        make_tar(shards / f"{shard}.tar", members)
    write(tmp_path / "classnames.txt", "ant\nbee\n")
    write(tmp_path / "zeroshot_classification_templates.txt", "a photo of a {c}.\n")

    dataset = get_dataset(f"tar:{shards}")
    assert dataset.keys == ("0.tar/000", "0.tar/001", "1.tar/000", "1.tar/001")
    assert dataset.labels.tolist() == [0, 1, 1, 1]
    assert dataset.templates == ("a photo of a {}.",)
    assert shades(dataset) == [0, 1, 10, 11]
    same = tar_dataset(shards / "{0..1}.tar")
    assert same.fingerprint == dataset.fingerprint


def shades(dataset: Dataset) -> list[int]:
    """The shade of grey of every image."""
    result = []
    for row in range(len(dataset)):
        pixel: Any = dataset.load(row).getpixel((0, 0))
        red, green, blue = pixel
        assert red == green == blue
        result.append(red)
    return result


def test_classes_are_in_a_json_file(tmp_path: Path) -> None:
    record = json.dumps({"caption": "x", "label": "cat"}).encode()
    members = {"0.png": encoded(0), "0.json": record, "0.txt": b"hm"}
    path = make_tar(tmp_path / "a.tar", members)
    assert tar_dataset(path).names == ("cat",)


def test_classes_are_names(tmp_path: Path) -> None:
    members = {"0.png": encoded(0), "0.cls": b"dog\n"}
    path = make_tar(tmp_path / "b.tar", members)
    assert tar_dataset(path).names == ("dog",)


def test_classes_are_folders(tmp_path: Path) -> None:
    members = {
        "./birds/wren/1.png": encoded(0),
        "./birds/crow/1.png": encoded(1),
        "./._x.png": b"",  # by which macOS keeps attributes
    }
    path = make_tar(tmp_path / "c.tar", members)
    dataset = tar_dataset(path)
    assert dataset.names == ("crow", "wren")
    assert dataset.keys == ("birds/wren/1", "birds/crow/1")
    assert dataset.labels.tolist() == [1, 0]


def test_no_image_of_a_plain_tar_is_lost(tmp_path: Path) -> None:
    names = [
        "x/a.png",
        "x/a.bmp",
        "x/b.v2.png",
        "x/b.v3.png",
        "x/c.png",
        "x/sub/a.png",
    ]
    members = {name: encoded(shade) for shade, name in enumerate(names)}
    path = make_tar(tmp_path / "a.tar", members)
    listed = list_images([path]).entries(0, 9)
    assert [entry.path for entry in listed] == [f"{path}/{name}" for name in names]

    dataset = tar_dataset(path)
    assert shades(dataset) == [0, 1, 2, 3, 4, 5]
    # a suffix stays where a key without it would come twice
    assert dataset.keys == (*names[:4], "x/c", "x/sub/a")


def test_archives_that_cannot_be_used(tmp_path: Path) -> None:
    for name in ("a.zip", "a.tar.gz", "a.tgz"):
        (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(ValueError, match="unpack"):
            list_images([tmp_path / name])
    make_tar(tmp_path / "packed.tar", {"x/0.png": encoded(0)}, "w:gz")
    make_tar(tmp_path / "text.tar", {"0.txt": b"x"})
    make_tar(tmp_path / "flat-1.tar", {"0.png": encoded(0)})
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("packed.tar", "compressed"),
        ("text.tar", "images"),
        ("flat-1.tar", "labels"),
        ("flat-{1..2}.tar", "flat-2.tar"),
        ("empty", "tar files"),
    ):
        with pytest.raises(ValueError, match=message):
            tar_dataset(tmp_path / name)


def test_bad_images_of_a_shard_are_named(tmp_path: Path) -> None:
    members = {"ant/0.png": encoded(0), "ant/9.png": b"no picture"}
    dataset = tar_dataset(make_tar(tmp_path / "a.tar", members))
    with pytest.raises(ImageError, match="ant/9"):
        dataset.load(1)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(ImageError):
        dataset.load(0)
