"""Tokenizers and image processors of other libraries give the rows and pixels that they gave."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from cliquetta.errors import UserError
from cliquetta.model.processors import RowTokenizer, preprocess_from
from cliquetta.model.tokenizer import Tokenizer
from tests._helpers.tolerance import SUM

pytest.importorskip("transformers", minversion="5")


def test_rows_of_another_tokenizer(words: Any) -> None:
    rows = RowTokenizer(words, 64, 64)
    assert rows.encode("the cat") == [14, 9] and rows.pad == 0
    same = RowTokenizer(Tokenizer(77), 77, 49408)
    assert (same.prefix, same.suffix) == ((49406,), (49407,))
    assert same.encode("a photo") == Tokenizer(77).encode("a photo")
    assert isinstance(same.simplest(), Tokenizer)
    with pytest.raises(UserError, match="65 tokens"):
        rows(["cat " * 65])


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("kind", ["CLIPImageProcessorPil", "SiglipImageProcessorPil"])
def test_image_processors(kind: str, resample: int) -> None:
    size = (
        {"shortest_edge": 48}
        if kind.startswith("CLIP")
        else {"height": 48, "width": 48}
    )
    options = (
        {"crop_size": {"height": 48, "width": 48}} if kind.startswith("CLIP") else {}
    )
    processor = getattr(transformers, kind)(size=size, resample=resample, **options)
    ours = preprocess_from(processor)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (80, 61, 3), dtype=np.uint8))
    wanted = processor(image, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(ours(image), wanted, atol=SUM, rtol=0)
