"""Users' own files: labels, tables, folders and other class lists."""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.corruptions import Shift, ShiftedDataset
from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.files import (
    RelabelledDataset,
    find_images,
    folder_dataset,
    number_labels,
    table_dataset,
    walk_images,
)
from cliquetta.data.images import natural_key
from cliquetta.errors import UserError
from tests._helpers.streaming import made_up_dataset
from tests._helpers.trees import pictures, write

# Labels


def test_names_are_put_in_natural_order() -> None:
    names, labels = number_labels(["room 10", "room 2", None, "room 2"], None, "x")
    assert names == ("room 2", "room 10")
    assert labels == [1, 0, UNKNOWN, 0]


def test_labels_are_names_or_count_the_class_list_from_zero() -> None:
    # "1" is the second class, although the first one is called so
    _, of_numbers = number_labels(["1", "2"], ["1", "2", "3"], "x")
    assert of_numbers == [1, 2]
    _, of_names = number_labels(["Polar_Bear"], ["cat", "polar bear"], "x")
    assert of_names == [1]


@pytest.mark.parametrize(
    ("stated", "listed", "message"),
    [
        (["3"], ["a", "b", "c"], "'3'"),
        (["0", "1"], None, "classnames.txt"),
        (["dog"], ["cat", "polar bear"], "'dog'"),
    ],
    ids=["a number too high", "numbers without a list", "a name that is not listed"],
)
def test_labels_of_no_class_are_refused(
    stated: list[str], listed: list[str] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        number_labels(stated, listed, "x")


# Tables


def test_a_table_of_paths_and_names(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png", "sub/b.png", "c.png"])
    # as spreadsheets write it: with a byte order mark
    table = tmp_path / "list.csv"
    write(table, "\ufeffPath, Class\nc.png,dog\nsub/b.png,cat\na.png,\n")
    dataset = get_dataset(f"csv:{table}")
    assert dataset.keys == ("c.png", "sub/b.png", "a.png")
    assert dataset.names == ("cat", "dog")
    assert dataset.labels.tolist() == [1, 0, UNKNOWN]
    assert dataset.load(1).getpixel((0, 0)) == (1, 1, 1)


def test_a_table_with_numbers_has_names_and_templates_beside_it(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png", "b.png"])
    write(tmp_path / "classnames.txt", "zebra\nant\n")
    write(tmp_path / "templates.txt", "a sketch of a {}.\n")
    write(tmp_path / "list.tsv", "file\tlabel\na.png\t1\nb.png\t0\n")
    dataset = get_dataset(f"csv:{tmp_path / 'list.tsv'}")
    assert dataset.names == ("zebra", "ant")
    assert dataset.labels.tolist() == [1, 0]
    assert dataset.templates == ("a sketch of a {}.",)


def test_the_format_of_a_table_is_told_by_its_suffix_in_any_case(
    tmp_path: Path,
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pictures(tmp_path, ["a.png", "b.png"])
    columns = {"path": ["b.png", "a.png"], "class": ["dog", "cat"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "LIST.PARQUET")
    for name in ("LIST.TSV", "LIST.Tab"):
        write(tmp_path / name, "path\tclass\nb.png\tdog\na.png\tcat\n")
    for name in ("LIST.PARQUET", "LIST.TSV", "LIST.Tab"):
        dataset = get_dataset(f"csv:{tmp_path / name}")
        assert dataset.keys == ("b.png", "a.png"), name
        assert dataset.names == ("cat", "dog"), name


def test_tables_that_contradict_themselves(tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    write(table, "path,class\na.png,cat\na.png,cat\n")
    assert get_dataset(f"csv:{table}").keys == ("a.png",)
    for text, message in (
        ("path,class\na.png,cat\na.png,dog\n", "twice"),
        ("name,class\na.png,cat\n", "column"),
        ("path,class\n", "no images"),
    ):
        write(table, text)
        with pytest.raises(ValueError, match=message):
            get_dataset(f"csv:{table}")
    with pytest.raises(ValueError, match="file"):
        get_dataset(f"csv:{tmp_path / 'gone.csv'}")
    with pytest.raises(UserError, match="write folder:"):
        get_dataset(f"csv:{tmp_path}")


def test_labels_find_their_names_in_a_wider_class_list() -> None:
    base: Any = ShiftedDataset(made_up_dataset(30), Shift("gaussian_noise", 3))
    wide = ("zebra", *reversed(base.names))
    asked: Any = RelabelledDataset(base, wide)
    found = [wide[label] for label in asked.labels]
    assert found == [base.names[label] for label in base.labels]
    assert asked.id == base.id
    assert asked.fingerprint != base.fingerprint
    with pytest.raises(UserError, match="list"):
        RelabelledDataset(base, wide[:3])


def test_other_labels_leave_images_as_they_are() -> None:
    base = ShiftedDataset(made_up_dataset(30), Shift("gaussian_noise", 3))
    asked = RelabelledDataset(base, ("zebra", *base.names))
    assert asked.contents() == base.contents()
    assert asked.load(3) == base.load(3)

    # in a second round as well, which has other noise
    assert asked.redrawn(2).load(3) == base.redrawn(2).load(3)


def test_sub_folders_are_classes_in_natural_order(tmp_path: Path) -> None:
    names = ["10/a.png", "2/b.PNG", "2/deep/c.jpg", ".cache/x.png", "2/.hidden.png"]
    pictures(tmp_path, names)
    write(tmp_path / "2/notes.txt", "no image")
    dataset = get_dataset(f"folder:{tmp_path}")
    assert dataset.names == ("2", "10")
    assert dataset.keys == ("2/b.PNG", "2/deep/c.jpg", "10/a.png")
    assert dataset.labels.tolist() == [0, 0, 1]


def test_given_names_fix_the_order_of_labels(tmp_path: Path) -> None:
    pictures(tmp_path, ["Golden_Retriever/a.png", "cat/b.png"])
    names = ["cat", "dog", "golden retriever"]
    assert folder_dataset(tmp_path).names == ("cat", "Golden Retriever")
    assert folder_dataset(tmp_path, names).labels.tolist() == [0, 2]

    without_cat = names[2:]
    with pytest.raises(ValueError, match="'cat'"):
        folder_dataset(tmp_path, without_cat)


def test_a_flat_folder_needs_names(tmp_path: Path) -> None:
    pictures(tmp_path, ["b2.png", "b10.png"])
    with pytest.raises(ValueError, match="names"):
        folder_dataset(tmp_path)
    assert folder_dataset(tmp_path, names=["cat"]).labels is None
    asked = get_dataset(f"folder:{tmp_path}", classes=["a", "b"])
    assert asked.names == ("a", "b")


def test_a_flat_folder_may_have_its_names_beside_it(tmp_path: Path) -> None:
    pictures(tmp_path, ["b2.png", "b10.png"])
    write(tmp_path / "classnames.txt", "cat\n# horse\ndog\n")
    dataset = get_dataset(f"folder:{tmp_path}")
    assert dataset.names == ("cat", "dog")
    assert dataset.labels is None


def test_images_are_found_in_natural_order(tmp_path: Path) -> None:
    pictures(tmp_path, ["b2.png", "b10.png"])
    assert [path.name for path in find_images(tmp_path)] == ["b2.png", "b10.png"]


@given(
    st.sets(
        st.lists(
            st.sampled_from(["a", "b1", "b10", "b2", "b 2", "b-"]), max_size=2
        ).map(lambda steps: "/".join([*steps, "x.png"]))
    )
)
@settings(max_examples=40, deadline=None)
def test_walking_sorts_like_full_paths(names: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pictures(Path(folder), sorted(names))
        found = list(walk_images(Path(folder)))
    result = [path.relative_to(folder).as_posix() for path in found]
    assert sorted(result) == sorted(names)
    keys = [natural_key(name) for name in result]
    assert keys == sorted(keys)


def test_links_are_followed_once_and_the_rest_is_counted(tmp_path: Path) -> None:
    pictures(tmp_path, ["in/a.png", "in/sub/b.png", "in/.hidden.png", "out/c.png"])
    (tmp_path / "in/notes.txt").write_text("x")
    (tmp_path / "in/sub/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/linked").symlink_to(tmp_path / "out")
    (tmp_path / "in/gone.png").symlink_to(tmp_path / "nowhere.png")
    unused: Counter[str] = Counter()
    result = [
        path.relative_to(tmp_path / "in")
        for path in walk_images(tmp_path / "in", unused)
    ]
    assert [path.as_posix() for path in result] == [
        "a.png",
        "linked/c.png",
        "sub/b.png",
    ]
    assert unused == {
        "hidden": 1,
        ".txt": 1,
        ".png": 1,
        "folders reached twice by links": 1,
    }


def test_folders_that_are_no_datasets_are_refused(tmp_path: Path) -> None:
    pictures(tmp_path, ["mixed/cat/a.png", "mixed/loose.png"])
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("empty", "no images"),
        ("gone", "no folder"),
        ("mixed", r"loose\.png"),
    ):
        with pytest.raises(ValueError, match=message):
            get_dataset(f"folder:{tmp_path / name}")


def test_parquet_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'cliquetta\[parquet\]'"):
        table_dataset(tmp_path / "list.parquet")
