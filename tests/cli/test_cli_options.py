"""What users type: paths and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cliquetta.cli.options import find_inputs, read_settings, split_list


def test_settings_are_pairs() -> None:
    assert read_settings(["steps=2", "text=a=b"]) == {"steps": "2", "text": "a=b"}
    with pytest.raises(ValueError, match="key=value"):
        read_settings(["=2"])


def test_lists_lose_repeats_and_blanks() -> None:
    assert split_list("a, b,,a", "things") == ["a", "b"]
    with pytest.raises(ValueError, match="no things given"):
        split_list(" ,", "things")


def test_folders_are_searched_in_natural_order(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.PNG", "a.jpg", ".hidden/x.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_inputs([tmp_path])
    names = [path.relative_to(tmp_path).as_posix() for path in found.paths]
    assert names == ["a.jpg", "b/2.png", "b/10.PNG"]
    assert find_inputs([tmp_path, tmp_path / "a.jpg"]).repeated == 1
    assert find_inputs([tmp_path / "notes.txt"]).paths == (tmp_path / "notes.txt",)


def test_tab_separated_table(tmp_path: Path) -> None:
    (tmp_path / "list.tsv").write_text("label\tfile\nx\ta b,c.png\ny\t\n")
    assert find_inputs([tmp_path / "list.tsv"]).paths == (tmp_path / "a b,c.png",)
    (tmp_path / "empty.csv").write_text("path\n")
    with pytest.raises(ValueError, match="lists no images"):
        find_inputs([tmp_path / "empty.csv"])
