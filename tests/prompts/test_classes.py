"""Class lists in any form but a lone string, and compared by content."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import (
    class_names,
    read_prompts,
    read_templates,
    templates,
)
from cliquetta.prompts.classes import ClassPrompts, as_prompts

NAMES = ("a", "b")


def test_any_list_of_names_will_do() -> None:
    wanted = ClassPrompts(("cat", "dog"))
    kinds: list[Any] = [
        ["cat", "dog"],
        ("cat", "dog"),
        wanted,
        (n for n in ("cat", "dog")),
    ]
    for names in kinds:
        assert as_prompts(names) == wanted


@pytest.mark.parametrize("names", ["cat", [1, 2], ["cat", None]])
def test_other_things_than_lists_of_names_are_refused(names: Any) -> None:
    with pytest.raises(UserError, match="list"):
        as_prompts(names)


@pytest.mark.parametrize("features", [None, torch.eye(2)], ids=["names", "features"])
def test_equal_content_is_equal_and_hashes_alike(features: Tensor | None) -> None:
    one = ClassPrompts(NAMES, features=features)
    copied = None if features is None else features.clone()
    other = ClassPrompts(NAMES, features=copied)

    assert one == other
    assert hash(one) == hash(other)


def test_other_content_is_not_equal() -> None:
    """Other features, another order and another template."""
    prompts = {
        ClassPrompts(NAMES),
        ClassPrompts(NAMES, features=torch.eye(2)),
        ClassPrompts(("b", "a")),
        ClassPrompts(NAMES, ("a {}",)),
    }
    assert len(prompts) == 4


def test_classes_of_a_file_a_list_or_a_known_list(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text(
        "\ufeffgolden retriever\r\n\r\n# horse\n  tabby cat \n", encoding="utf-8"
    )

    assert read_prompts(str(path)).names == ("golden retriever", "tabby cat")
    assert read_prompts(" cat , dog,").names == ("cat", "dog")
    assert read_prompts("imagenet").names == class_names("imagenet")
    assert read_prompts("cat").names == ("cat",)


def test_known_list_may_hold_duplicates_but_a_typed_one_may_not() -> None:
    assert len(read_prompts("imagenet")) == 1000
    with pytest.raises(ValueError, match="twice"):
        read_prompts("cat,cat")


def test_file_of_classes_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_bytes(b"\xff\xfe\x00c")
    with pytest.raises(ValueError, match="UTF-8"):
        read_prompts(str(tmp_path / "names.txt"))


def test_templates_of_text_file_or_set(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("art of a {}.\n\na {} in the wild.\n")
    result = read_templates(["my {}.", str(tmp_path / "t.txt"), "openai-7"])

    assert result == (
        "my {}.",
        "art of a {}.",
        "a {} in the wild.",
        *templates("openai-7"),
    )
    assert read_templates([]) == ("a photo of a {}.",)
    with pytest.raises(ValueError, match="once"):
        read_prompts("a,b", ["{} and {}"])
