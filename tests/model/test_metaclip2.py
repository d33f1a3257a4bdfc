"""MetaCLIP 2: CLIP's towers with another vocabulary, against ``transformers.MetaClip2Model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cliquetta.errors import UserError
from cliquetta.methods.registry import create_method
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.tolerance import FEATURE, LOGIT
from tests._helpers.transformers_models import XLM, randomise, word_tokenizer

pytest.importorskip("transformers", minversion="5")

TEXTS = ["a photo of a cat", "the frog", "a sketch of a green truck"]


def tiny_metaclip2(end: int = 2) -> Any:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "hidden_act": "gelu"}
    text = {"vocab_size": 64, "eos_token_id": end, "bos_token_id": None, "pad_token_id": None}
    config = transformers.MetaClip2Config(
        text_config=shape | text,
        vision_config=shape | {"image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    return randomise(transformers.MetaClip2Model(config))


@pytest.fixture(scope="module", params=["xlm", "mt5"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """XLM-V's vocabulary, or SigLIP's multilingual one with its rules: no start token, end 1."""
    theirs = tiny_metaclip2(end=2 if request.param == "xlm" else 1)
    folder = tmp_path_factory.mktemp("meta")
    theirs.save_pretrained(folder)
    specials = XLM if request.param == "xlm" else ("<pad>", "</s>", "<unk>", "<extra>")
    word_tokenizer(folder / "tokenizer.json", specials=specials)
    return create_model(folder), theirs


def test_tokens(pair: Any) -> None:
    ours, theirs = pair
    ids = ours.tokenizer(["the cat"])[0].tolist()
    if theirs.config.text_config.eos_token_id == 2:
        assert ids == [0, 14, 9, 2, *[1] * 73]
        assert ours.config.text.start_tokens == 1
    else:
        assert ids == [14, 9, *[1] * 75]
        assert ours.config.text.start_tokens == 0


@torch.no_grad()
def test_features_and_logits(pair: Any) -> None:
    ours, theirs = pair
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    ids = ours.tokenizer(TEXTS)
    for found, wanted in (
        (ours.encode_image(pixels), theirs.get_image_features(pixels).pooler_output),
        (ours.encode_text(TEXTS), theirs.get_text_features(ids).pooler_output),
    ):
        assert wanted.std() > 0.1
        torch.testing.assert_close(found, wanted, atol=FEATURE, rtol=FEATURE)
    prompts = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}",))
    logits = create_method("zero_shot", ours, prompts).predict(Batch(pixels)).logits
    ids = ours.tokenizer(prompts.texts(prompts.templates[0]))
    wanted = theirs(input_ids=ids, pixel_values=pixels).logits_per_image
    torch.testing.assert_close(logits, wanted, atol=LOGIT, rtol=FEATURE)


@pytest.mark.parametrize("method", ["scap", "tpt"])
def test_context_is_learned(pair: Any, method: str) -> None:
    ours, _ = pair
    prompts = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}",))
    adapter = create_method(method, ours, prompts)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    views = (
        None if adapter.views is None else images[:, None].repeat(1, adapter.views.count, 1, 1, 1)
    )
    logits = adapter.predict(Batch(images, tuple("abcd"), views)).logits
    assert logits.shape == (4, 3) and logits.isfinite().all()


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    tiny_metaclip2().save_pretrained(tmp_path)
    word_tokenizer(tmp_path / "tokenizer.json")  # Gemma's special tokens, no end
    with pytest.raises(UserError, match="does not end a text with token 2"):
        create_model(tmp_path)
