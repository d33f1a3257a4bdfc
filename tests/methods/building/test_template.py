"""Class texts as a function of learned words: chunks, and what cannot be learned."""

import math

import pytest
import torch

from cliquetta.methods.building.template import LearnableTemplate
from cliquetta.methods.tpt import TPT, TPTConfig
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY

ONE = ClassPrompts((*TINY_NAMES, "polar bear in the snow"))


def test_texts_of_like_length_share_a_chunk() -> None:
    template = LearnableTemplate(TINY, ONE, chunk=4, by="TPT")
    lengths = template.ids.argmax(dim=-1)[template.order]
    assert torch.equal(lengths, lengths.sort().values)
    chunks = list(template._chunks(contexts=2))
    assert [len(chunk) for chunk in chunks] == [2] * math.ceil(len(ONE) / 2)


def test_fixed_text_features_are_refused() -> None:
    prompts = ClassPrompts(TINY_NAMES, features=torch.ones(5, 24))
    with pytest.raises(ValueError, match="learns text"):
        TPT(TINY, prompts, TPTConfig())


@pytest.mark.parametrize("template", ["{} texture.", "semi{}."])
def test_a_template_without_words_of_its_own_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="put a template such as"):
        TPT(TINY, ClassPrompts(TINY_NAMES, (template,)), TPTConfig())
