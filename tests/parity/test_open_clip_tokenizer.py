"""The tokeniser, the names and the templates against those that open_clip ships."""

import pytest
from open_clip.tokenizer import SimpleTokenizer
from open_clip.zero_shot_metadata import (
    IMAGENET_CLASSNAMES,
    OPENAI_IMAGENET_TEMPLATES,
    SIMPLE_IMAGENET_TEMPLATES,
)

from cliquetta.model.tokenizer import Tokenizer
from cliquetta.prompts.catalogue import class_names, templates
from tests._helpers.texts import ODD, random_strings, words_in_templates

pytestmark = pytest.mark.parity


def test_ids_on_thousands_of_strings() -> None:
    ours = Tokenizer()
    theirs = SimpleTokenizer()
    texts = [
        *ODD,
        *words_in_templates(),
        *random_strings(5000, seed=3, old_unicode=False),
    ]
    # open_clip spells its special tokens differently; without them the texts are the
    # same to both.
    texts = [text for text in texts if "<|" not in text]

    assert len(texts) > 6000
    for text in texts:
        assert ours.encode(text) == theirs.encode(text), text


def test_rows_equal() -> None:
    texts = words_in_templates()
    assert Tokenizer()(texts).equal(SimpleTokenizer()(texts))


def test_names_and_templates() -> None:
    assert class_names("imagenet") == tuple(IMAGENET_CLASSNAMES)
    assert templates("openai-80") == tuple(
        form("{}") for form in OPENAI_IMAGENET_TEMPLATES
    )
    assert templates("openai-7") == tuple(
        form("{}") for form in SIMPLE_IMAGENET_TEMPLATES
    )
