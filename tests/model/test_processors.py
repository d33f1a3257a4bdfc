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
    assert rows.encode("the cat") == [14, 9]
    assert rows.pad == 0
    with pytest.raises(UserError, match="65 tokens"):
        rows(["cat " * 65])


def test_rows_of_our_own_tokenizer() -> None:
    ours = Tokenizer(77)
    rows = RowTokenizer(ours, 77, 49408)
    assert rows.prefix == (49406,)
    assert rows.suffix == (49407,)
    assert rows.encode("a photo") == ours.encode("a photo")
    assert isinstance(rows.simplest(), Tokenizer)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("kind", ["CLIPImageProcessorPil", "SiglipImageProcessorPil"])
def test_image_processors(kind: str, resample: int) -> None:
    square = {"height": 48, "width": 48}
    options: dict[str, Any] = {"size": square}
    if kind.startswith("CLIP"):
        options = {"size": {"shortest_edge": 48}, "crop_size": square}
    processor = getattr(transformers, kind)(resample=resample, **options)
    ours = preprocess_from(processor)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (80, 61, 3), dtype=np.uint8))
    wanted = processor(image, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(ours(image), wanted, atol=SUM, rtol=0)
