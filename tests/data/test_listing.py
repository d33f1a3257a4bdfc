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
    assert names(listing, tmp_path) == ["in/2.png", "in/10.PNG", "a.png", "b,c.png", "in/notes.txt"]
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
