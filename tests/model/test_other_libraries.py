"""Tokenizers and image processors of other libraries as ours."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from cliquetta.errors import UserError
from cliquetta.model.other_libraries import RowTokenizer, preprocess_from
from cliquetta.model.tokenizer import Tokenizer
from tests._helpers.tolerance import SUM


def test_rows_of_another_tokenizer(words: Any) -> None:
    given = RowTokenizer(words, 64, 64)
    assert given.encode("the cat") == [14, 9] and given.pad == 0
    same = RowTokenizer(Tokenizer(77), 77, 49408)
    assert (same.prefix, same.suffix) == ((49406,), (49407,))
    assert same.encode("a photo") == Tokenizer(77).encode("a photo")
    assert isinstance(same.simplest(), Tokenizer)
    with pytest.raises(UserError, match="takes 65 tokens, the model's context holds 64"):
        given(["cat " * 65])


@pytest.mark.parametrize("kind", ["CLIPImageProcessorPil", "SiglipImageProcessorPil"])
def test_image_processors(kind: str) -> None:
    size = {"shortest_edge": 48} if kind.startswith("CLIP") else {"height": 48, "width": 48}
    options = {"crop_size": {"height": 48, "width": 48}} if kind.startswith("CLIP") else {}
    processor = getattr(transformers, kind)(size=size, **options)
    ours = preprocess_from(processor)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (80, 61, 3), dtype=np.uint8))
    wanted = processor(image, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(ours(image), wanted, atol=SUM, rtol=0)
