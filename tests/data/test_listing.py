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
    assert names(listing, tmp_path) == [
        "in/2.png",
        "in/10.PNG",
        "a.png",
        "b,c.png",
        "in/notes.txt",
    ]
    assert listing.repeated == 1 and listing.unused == {"hidden": 1, ".txt": 1}
    (entry,) = listing.entries(3, 4)
    assert entry[:2] == (str(tmp_path / "b,c.png"), {"label": "x", "File": "b,c.png"})
    listing.close()
    again = ImageList(tmp_path / "list.sqlite")
    assert names(again, tmp_path)[1:3] == ["in/10.PNG", "a.png"]
    assert again.columns == ["label", "File"] and again.repeated == 1
    assert again.unused == {"hidden": 1, ".txt": 1}


@pytest.mark.parametrize("separator", [b"\n", b"\r\n", b"\0"])
def test_lists_of_any_length_and_any_bytes(tmp_path: Path, separator: bytes) -> None:
    wanted = [b"caf\xe9.png", *(b"%09d.png" % number for number in range(20_000))]
    (tmp_path / "list").write_bytes(separator.join(wanted) + separator)
    listing = list_images(["-"], stdin=tmp_path / "list")
    result = [os.fsencode(entry.path) for entry in listing.entries(0, len(listing))]
    assert result == wanted


def test_tables_without_paths_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "list.csv", "path\n")
    with pytest.raises(UserError, match="no images"):
        list_images([tmp_path / "list.csv"])


def test_digest_sees_tables_and_lists_but_not_folders(tmp_path: Path) -> None:
    pictures(tmp_path, ["in/a.png"])
    write(tmp_path / "list.csv", "path\na.png\n")
    sources = [tmp_path / "in", tmp_path / "list.csv"]
    first = digest(sources, None)
    pictures(tmp_path, ["in/b.png"])
    assert digest(sources, None) == first
    write(tmp_path / "list.csv", "path\nb.png\n")
    assert digest(sources, None) != first
    assert digest(["-"], tmp_path / "list.csv") != digest(["-"], tmp_path / "in/a.png")


def test_a_shuffled_list_has_every_image_once_and_knows_its_numbers(
    tmp_path: Path,
) -> None:
    pictures(tmp_path, [f"in/{number:02}.png" for number in range(12)])
    listing = list_images([tmp_path / "in"], tmp_path / "list.sqlite")
    listed = names(listing, tmp_path)
    listing.shuffle([(0, 5), (5, 12)], seed=3)
    shown = names(listing, tmp_path)
    assert sorted(shown[:5]) == listed[:5] and sorted(shown[5:]) == listed[5:]
    assert shown != listed
    assert [listed[number] for number in listing.numbers(0, 12)] == shown
    listing.close()
    again = ImageList(tmp_path / "list.sqlite")
    assert again.shuffled and names(again, tmp_path) == shown
    other = list_images([tmp_path / "in"])
    other.shuffle([(0, 5), (5, 12)], seed=4)
    assert names(other, tmp_path) != shown


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
