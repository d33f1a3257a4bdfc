"""Class lists are taken in any shape but a lone string, and compared by content."""

from __future__ import annotations

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.prompts.classes import ClassPrompts, as_prompts


def test_any_list_of_names_will_do() -> None:
    wanted = ClassPrompts(("cat", "dog"))
    for given in (["cat", "dog"], ("cat", "dog"), wanted, (name for name in ("cat", "dog"))):
        assert as_prompts(given) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["cat", [1, 2], ["cat", None]])
def test_what_is_no_list_of_names_is_refused(given: object) -> None:
    with pytest.raises(UserError, match="class names are a list"):
        as_prompts(given)  # type: ignore[arg-type]


def test_equal_content_is_equal_and_hashes_alike() -> None:
    features = torch.eye(2)
    made = [
        ClassPrompts(("a", "b")),
        ClassPrompts(("a", "b")),
        ClassPrompts(("b", "a")),
        ClassPrompts(("a", "b"), ("a {}",)),
        ClassPrompts(("a", "b"), features=features),
        ClassPrompts(("a", "b"), features=features.clone()),
    ]
    assert len(set(made)) == 4
    assert made[0] == made[1] and made[4] == made[5] and made[0] != made[4]
