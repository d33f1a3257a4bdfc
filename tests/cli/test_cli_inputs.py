"""What users type: class lists, templates, paths and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cliquetta.cli.inputs import (
    find_inputs,
    read_classes,
    read_prompts,
    read_settings,
    read_templates,
    split_list,
)
from cliquetta.prompts.catalogue import class_names, templates


def test_classes_of_a_file_a_list_or_a_known_list(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\ufeffgolden retriever\r\n\r\n  tabby cat \n", encoding="utf-8")
    assert read_classes(str(path)) == (("golden retriever", "tabby cat"), False)
    assert read_classes(" cat , dog,") == (("cat", "dog"), False)
    assert read_classes("imagenet") == (class_names("imagenet"), True)
    assert read_classes("cat") == (("cat",), False)


def test_known_list_may_hold_duplicates_but_a_typed_one_may_not() -> None:
    assert len(read_prompts("imagenet", ())) == 1000
    with pytest.raises(ValueError, match="given twice: cat"):
        read_prompts("cat,cat", ())


def test_file_of_classes_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_bytes(b"\xff\xfe\x00c")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_classes(str(tmp_path / "names.txt"))


def test_templates_of_text_file_or_set(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("art of a {}.\n\na {} in the wild.\n")
    found = read_templates(["my {}.", str(tmp_path / "t.txt"), "openai-7"])
    assert found == ("my {}.", "art of a {}.", "a {} in the wild.", *templates("openai-7"))
    assert read_templates([]) == ("a photo of a {}.",)
    with pytest.raises(ValueError, match=r"holds \{\} once"):
        read_prompts("a,b", ["{} and {}"])


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
