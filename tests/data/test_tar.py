"""Tar shards: classes, keys and what cannot be read."""

import json
from pathlib import Path

import pytest

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.images import ImageError
from cliquetta.data.listing import list_images
from cliquetta.data.tar import tar_dataset
from tests._helpers.trees import encoded, make_tar, write


def test_webdataset_shards_with_numbers(tmp_path: Path) -> None:
    """Layout of CLIP-benchmark: shards in ``test/``, class names and templates above."""
    for shard in range(2):
        first, second = encoded(10 * shard), encoded(10 * shard + 1)
        members = {"000.png": first, "000.cls": b"%d" % shard, "001.left.png": second}
        make_tar(tmp_path / f"test/{shard}.tar", members | {"001.cls": b"1"})
    write(tmp_path / "classnames.txt", "ant\nbee\n")
    write(tmp_path / "zeroshot_classification_templates.txt", "a photo of a {c}.\n")
    dataset = get_dataset(f"tar:{tmp_path / 'test'}")
    assert dataset.keys == ("0.tar/000", "0.tar/001", "1.tar/000", "1.tar/001")
    assert dataset.labels.tolist() == [0, 1, 1, 1] and dataset.templates == (
        "a photo of a {}.",
    )
    shades = [dataset.load(row).getpixel((0, 0)) for row in range(4)]
    assert shades == [(s, s, s) for s in (0, 1, 10, 11)]
    same = tar_dataset(tmp_path / "test" / "{0..1}.tar")
    assert same.fingerprint == dataset.fingerprint


def test_classes_of_json_of_names_and_of_folders(tmp_path: Path) -> None:
    record = json.dumps({"caption": "x", "label": "cat"}).encode()
    json_tar = make_tar(
        tmp_path / "a.tar", {"0.png": encoded(0), "0.json": record, "0.txt": b"hm"}
    )
    assert tar_dataset(json_tar).names == ("cat",)
    named = make_tar(tmp_path / "b.tar", {"0.png": encoded(0), "0.cls": b"dog\n"})
    assert tar_dataset(named).names == ("dog",)
    folders = {
        "./birds/wren/1.png": encoded(0),
        "./birds/crow/1.png": encoded(1),
        "./._x.png": b"",
    }
    dataset = tar_dataset(make_tar(tmp_path / "c.tar", folders))
    assert dataset.names == ("crow", "wren") and dataset.keys == (
        "birds/wren/1",
        "birds/crow/1",
    )
    assert dataset.labels.tolist() == [1, 0]


def test_no_image_of_a_plain_tar_is_lost(tmp_path: Path) -> None:
    names = ["a.png", "a.bmp", "b.v2.png", "b.v3.png", "c.png", "sub/a.png"]
    path = make_tar(
        tmp_path / "a.tar", {f"x/{n}": encoded(i) for i, n in enumerate(names)}
    )
    listing = list_images([path])
    assert [entry.path for entry in listing.entries(0, 9)] == [
        f"{path}/x/{n}" for n in names
    ]
    dataset = tar_dataset(path)
    assert [dataset.load(row).getpixel((0, 0)) for row in range(6)] == [
        (i, i, i) for i in range(6)
    ]
    assert dataset.keys == (*(f"x/{n}" for n in names[:4]), "x/c", "x/sub/a")


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
