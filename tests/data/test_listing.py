"""The list of a long run: every image once, in order, from folders, tables and lists."""

import os
from pathlib import Path

import pytest

from cliquetta.data.listing import ImageList, digest, list_images
from cliquetta.errors import UserError
from tests._helpers.trees import pictures, write


def names(listing: ImageList, folder: Path) -> list[str]:
    entries = listing.entries(0, len(listing))
    return [Path(entry.path).relative_to(folder).as_posix() for entry in entries]


def test_folders_files_and_tables_together(tmp_path: Path) -> None:
    pictures(tmp_path, ["in/2.png", "in/10.PNG", "in/.hidden.png", "a.png"])
    write(tmp_path / "in/notes.txt", "x")
    write(tmp_path / "list.tsv", "label\tFile\nx\tb,c.png\ny\t\nz\ta.png\n")
    sources = [tmp_path / name for name in ("in", "a.png", "list.tsv", "in/notes.txt")]
    listing = list_images(sources, tmp_path / "list.sqlite")
    unused = {"hidden": 1, ".txt": 1}
    assert names(listing, tmp_path) == [
        "in/2.png",
        "in/10.PNG",
        "a.png",
        "b,c.png",
        "in/notes.txt",
    ]
    assert listing.repeated == 1
    assert listing.unused == unused
    (entry,) = listing.entries(3, 4)
    assert entry[:2] == (str(tmp_path / "b,c.png"), {"label": "x", "File": "b,c.png"})
    listing.close()
    again = ImageList(tmp_path / "list.sqlite")
    assert names(again, tmp_path)[1:3] == ["in/10.PNG", "a.png"]
    assert again.columns == ["label", "File"]
    assert again.repeated == 1
    assert again.unused == unused


@pytest.mark.parametrize(
    "separator", [b"\n", b"\r\n", b"\0"], ids=["lines", "Windows lines", "zeros"]
)
def test_lists_of_any_length_and_any_bytes(tmp_path: Path, separator: bytes) -> None:
    # the first name is no UTF-8
    wanted = [b"caf\xe9.png"]
    wanted += [b"%09d.png" % number for number in range(20_000)]
    path = tmp_path / "list"
    path.write_bytes(separator.join(wanted) + separator)

    listing = list_images(["-"], stdin=path)
    entries = listing.entries(0, len(listing))
    assert [os.fsencode(entry.path) for entry in entries] == wanted


def test_tables_without_paths_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "list.csv", "path\n")
    with pytest.raises(UserError, match="no images"):
        list_images([tmp_path / "list.csv"])


def test_digest_sees_tables_and_lists_but_not_folders(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    table = tmp_path / "list.csv"
    pictures(folder, ["a.png"])
    write(table, "path\na.png\n")
    first = digest([folder, table], None)
    pictures(folder, ["b.png"])
    assert digest([folder, table], None) == first
    write(table, "path\nb.png\n")
    assert digest([folder, table], None) != first

    # what comes by standard input is a list as well
    assert digest(["-"], table) != digest(["-"], folder / "a.png")


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    """A folder of twelve images."""
    pictures(tmp_path, [f"in/{number:02}.png" for number in range(12)])
    return tmp_path


def test_a_shuffled_list_has_every_image_once_and_knows_its_numbers(
    twelve: Path,
) -> None:
    listing = list_images([twelve / "in"], twelve / "list.sqlite")
    listed = names(listing, twelve)
    # two parts that do not mix
    listing.shuffle([(0, 5), (5, 12)], seed=3)
    shown = names(listing, twelve)
    assert sorted(shown[:5]) == listed[:5]
    assert sorted(shown[5:]) == listed[5:]
    assert shown != listed
    assert [listed[number] for number in listing.numbers(0, 12)] == shown
    listing.close()

    again = ImageList(twelve / "list.sqlite")
    assert again.shuffled
    assert names(again, twelve) == shown


def test_the_seed_decides_how_a_list_is_shuffled(twelve: Path) -> None:
    orders = []
    for seed in (3, 4):
        listing = list_images([twelve / "in"])
        listing.shuffle([(0, 5), (5, 12)], seed=seed)
        orders.append(names(listing, twelve))
    assert orders[0] != orders[1]


def test_folders_are_those_below_what_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path, ["in/cat/old/1.png", "in/2.png", "dog/3.png"])
    write(tmp_path / "list.csv", "path,kind\ndog/3.png,Dog\n")
    monkeypatch.chdir(tmp_path)
    listing = list_images(["./in", "list.csv"], labels="kind")
    entries = listing.entries(0, 3)
    assert [entry.folder for entry in entries] == ["", "cat/old", "dog"]
    assert [entry.label for entry in entries] == ["", "", "Dog"]
    assert listing.labels() == {"": 2, "Dog": 1}
    by_folder = list_images(["in"], labels="folder")
    assert [entry.label for entry in by_folder.entries(0, 2)] == ["", "cat/old"]
    with pytest.raises(
        UserError, match="no column 'class' of labels in the input: it has path, kind"
    ):
        list_images(["list.csv"], labels="class")
