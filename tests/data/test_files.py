"""Anybody's own data: tables, tar shards and tables of Hugging Face."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.files import RelabelledDataset, number_labels
from cliquetta.data.huggingface import HuggingFaceDataset, parse_name
from cliquetta.data.images import ImageError
from cliquetta.data.listing import list_images
from cliquetta.data.shifts import Shift, ShiftedDataset
from cliquetta.data.stream import Stream
from cliquetta.data.tar import find_shards, tar_dataset
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model.preprocess import Preprocess
from tests._helpers.streaming import made_up_dataset
from tests._helpers.trees import picture, pictures, write


def encoded(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade,) * 3).save(file, "PNG")
    return file.getvalue()


def make_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


# Labels


def test_names_are_put_in_natural_order() -> None:
    names, labels = number_labels(["room 10", "room 2", None, "room 2"], None, "x")
    assert names == ("room 2", "room 10") and labels == [1, 0, UNKNOWN, 0]


def test_numbers_count_the_class_list_from_zero() -> None:
    """Also where the names are numbers themselves: "1" is the second class."""
    assert number_labels(["1", "2"], ["1", "2", "3"], "x")[1] == [1, 2]
    with pytest.raises(ValueError, match="class '3' is not in the class list of 3"):
        number_labels(["3"], ["a", "b", "c"], "x")
    with pytest.raises(ValueError, match=r"labels are numbers.*classnames.txt"):
        number_labels(["0", "1"], None, "x")


def test_a_class_that_is_not_listed_is_refused() -> None:
    assert number_labels(["Polar_Bear"], ["cat", "polar bear"], "x")[1] == [1]
    with pytest.raises(ValueError, match="class 'dog' is not in the class list"):
        number_labels(["dog"], ["cat", "polar bear"], "x")


# Tables


def test_a_table_of_paths_and_names(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png", "sub/b.png", "c.png"])
    write(tmp_path / "list.csv", "\ufeffPath, Class\nc.png,dog\nsub/b.png,cat\na.png,\n")
    dataset = get_dataset(f"csv:{tmp_path / 'list.csv'}")
    assert dataset.keys == ("c.png", "sub/b.png", "a.png")
    assert dataset.names == ("cat", "dog")
    assert dataset.labels is not None and dataset.labels.tolist() == [1, 0, UNKNOWN]
    assert dataset.load(1).getpixel((0, 0)) == (1, 1, 1)


def test_a_table_with_numbers_takes_names_and_templates_from_beside_it(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png", "b.png"])
    write(tmp_path / "classnames.txt", "zebra\nant\n")
    write(tmp_path / "templates.txt", "a sketch of a {}.\n")
    write(tmp_path / "list.tsv", "file\tlabel\na.png\t1\nb.png\t0\n")
    dataset = get_dataset(f"csv:{tmp_path / 'list.tsv'}")
    assert dataset.names == ("zebra", "ant")
    assert dataset.labels is not None and dataset.labels.tolist() == [1, 0]
    assert dataset.templates == ("a sketch of a {}.",)


def test_tables_that_contradict_themselves(tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    write(table, "path,class\na.png,cat\na.png,cat\n")
    assert get_dataset(f"csv:{table}").keys == ("a.png",)
    write(table, "path,class\na.png,cat\na.png,dog\n")
    with pytest.raises(ValueError, match=r"a.png twice, with different classes"):
        get_dataset(f"csv:{table}")
    write(table, "name,class\na.png,cat\n")
    with pytest.raises(ValueError, match="no column of paths"):
        get_dataset(f"csv:{table}")
    write(table, "path,class\n")
    with pytest.raises(ValueError, match="lists no images"):
        get_dataset(f"csv:{table}")
    with pytest.raises(ValueError, match="no such file"):
        get_dataset(f"csv:{tmp_path / 'gone.csv'}")


# Tar shards


def test_webdataset_shards_with_numbers(tmp_path: Path) -> None:
    """Layout of CLIP-benchmark: shards in ``test/``, class names and templates above."""
    for shard in range(2):
        make_tar(
            tmp_path / f"test/{shard}.tar",
            {
                "000.png": encoded(10 * shard),
                "000.cls": str(shard).encode(),
                "001.left.png": encoded(10 * shard + 1),
                "001.cls": b"1",
            },
        )
    write(tmp_path / "classnames.txt", "ant\nbee\n")
    write(tmp_path / "zeroshot_classification_templates.txt", "a photo of a {c}.\n")
    dataset = get_dataset(f"tar:{tmp_path / 'test'}")
    assert dataset.keys == ("0.tar/000", "0.tar/001", "1.tar/000", "1.tar/001")
    assert dataset.labels is not None and dataset.labels.tolist() == [0, 1, 1, 1]
    assert dataset.templates == ("a photo of a {}.",)
    shades = [dataset.load(row).getpixel((0, 0)) for row in range(4)]
    assert shades == [(s, s, s) for s in (0, 1, 10, 11)]
    same = tar_dataset(tmp_path / "test" / "{0..1}.tar")
    assert same.fingerprint == dataset.fingerprint


def test_classes_of_json_of_names_and_of_folders(tmp_path: Path) -> None:
    record = json.dumps({"caption": "x", "label": "cat"}).encode()
    json_tar = make_tar(tmp_path / "a.tar", {"0.png": encoded(0), "0.json": record, "0.txt": b"hm"})
    assert tar_dataset(json_tar).names == ("cat",)
    named = make_tar(tmp_path / "b.tar", {"0.png": encoded(0), "0.cls": b"dog\n"})
    assert tar_dataset(named).names == ("dog",)
    folders = {"./birds/wren/1.png": encoded(0), "./birds/crow/1.png": encoded(1), "./._x.png": b""}
    dataset = tar_dataset(make_tar(tmp_path / "c.tar", folders))
    assert dataset.names == ("crow", "wren") and dataset.keys == ("birds/wren/1", "birds/crow/1")
    assert dataset.labels is not None and dataset.labels.tolist() == [1, 0]


def test_no_image_of_a_plain_tar_is_lost(tmp_path: Path) -> None:
    names = ["a.png", "a.bmp", "b.v2.png", "b.v3.png", "c.png", "sub/a.png"]
    path = make_tar(tmp_path / "a.tar", {f"x/{n}": encoded(i) for i, n in enumerate(names)})
    listing = list_images([path])
    assert [entry.path for entry in listing.entries(0, 9)] == [f"{path}/x/{n}" for n in names]
    dataset = tar_dataset(path)
    assert [dataset.load(row).getpixel((0, 0)) for row in range(6)] == [(i, i, i) for i in range(6)]
    assert dataset.keys == (*(f"x/{n}" for n in names[:4]), "x/c", "x/sub/a")


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tgz"])
def test_compressed_archives_get_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match="unpack it"):
        list_images([tmp_path / name])


def test_tar_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compressed.*uncompress it"):
        tar_dataset(make_tar(tmp_path / "a.tar", {"x/0.png": encoded(0)}, "w:gz"))
    with pytest.raises(ValueError, match="no images in"):
        tar_dataset(make_tar(tmp_path / "b.tar", {"0.txt": b"x"}))
    with pytest.raises(ValueError, match="there are no labels"):
        tar_dataset(make_tar(tmp_path / "c.tar", {"0.png": encoded(0)}))
    with pytest.raises(ValueError, match=r"no tar file .*x-2.tar"):
        make_tar(tmp_path / "x-1.tar", {})
        find_shards(tmp_path / "x-{1..2}.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tar files in"):
        find_shards(tmp_path / "empty")


def test_a_bad_image_in_a_shard_is_reported_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = {f"ant/{i}.png": encoded(i) for i in range(4)} | {"ant/9.png": b"no picture"}
    dataset = tar_dataset(make_tar(tmp_path / "a.tar", members))
    with pytest.raises(ImageError, match=r"a.tar/ant/9: not an image"):
        dataset.load(4)
    stream = Stream(dataset, Preprocess(size=8), batch_size=2)
    for _ in range(2):
        batches = list(stream)
        assert sum(len(batch) for batch, _ in batches) == 4
        assert [skipped.key for skipped in stream.skipped] == ["ant/9"]
    assert len([record for record in caplog.records if "ant/9" in record.message]) == 1


def test_a_shard_that_goes_away_is_a_bad_image_too(tmp_path: Path) -> None:
    dataset = tar_dataset(make_tar(tmp_path / "a.tar", {"ant/0.png": encoded(0)}))
    (tmp_path / "a.tar").unlink()
    with pytest.raises(ImageError, match="no such file"):
        dataset.load(0)


# Hugging Face


class _Rows:
    """A table with the few things that are used of ``datasets.Dataset``."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features = features
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]


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
    assert dataset.labels is not None and dataset.labels.tolist() == [1, UNKNOWN, 0]
    assert [dataset.load(i).getpixel((0, 0)) for i in (0, 1)] == [(3, 3, 3), (7, 7, 7)]
    with pytest.raises(ImageError, match="hf:x, row 2: not an image"):
        dataset.load(2)
    with pytest.raises(UnknownNameError, match="column of hf:x"):
        HuggingFaceDataset("hf:x", _Rows(features, rows), "img", "lable")


def test_names_of_hugging_face_datasets() -> None:
    assert parse_name("a/b?split=valid&label=fine") == ("a/b", {"split": "valid", "label": "fine"})
    with pytest.raises(UnknownNameError, match="did you mean 'split'"):
        parse_name("a/b?spilt=valid")
    with pytest.raises(ValueError, match="needs the name"):
        parse_name("?split=test")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"cliquetta\[hf-datasets\]"):
        get_dataset("hf:uoft-cs/cifar10")


def test_labels_find_their_names_in_a_wider_class_list() -> None:
    base = ShiftedDataset(made_up_dataset(30), Shift("gaussian_noise", 3))
    wide = ("zebra", *reversed(base.names))
    asked = RelabelledDataset(base, wide)
    assert [wide[label] for label in asked.labels] == [base.names[label] for label in base.labels]
    assert np.array_equal(np.asarray(asked.load(3)), np.asarray(base.load(3)))
    again = np.asarray(asked.redrawn(2).load(3))
    assert np.array_equal(again, np.asarray(base.redrawn(2).load(3)))
    assert (asked.contents(), asked.id) == (base.contents(), base.id)
    assert asked.fingerprint != base.fingerprint
    with pytest.raises(UserError, match="is not in the class list"):
        RelabelledDataset(base, wide[:3])
