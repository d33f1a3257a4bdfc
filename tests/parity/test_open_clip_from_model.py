"""``from_model`` on models of open_clip itself, with random weights."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta import create_method, from_model
from cliquetta.data.bundled import load_bundled
from cliquetta.model.tokenizer import Tokenizer
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.tolerance import ADAPTED, FEATURE, LOGIT
from tests._helpers.transformers_models import noisy, word_tokenizer

pytestmark = pytest.mark.parity

PROMPTS = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}.",))


def built(name: str) -> Any:
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=None)
    return noisy(model), preprocess


def pictures(count: int = 4) -> Any:
    return [np.asarray(image) for image in load_bundled().images[:: 2000 // count]]


@torch.no_grad()
def original_logits(model: Any, preprocess: Any, tokenizer: Any, images: Any) -> Any:
    from PIL import Image

    pixels = torch.stack([preprocess(Image.fromarray(image)) for image in images])
    texts = tokenizer(PROMPTS.texts(PROMPTS.templates[0]))
    return logits_of(model, pixels, texts)


def logits_of(model: Any, pixels: Tensor, texts: Tensor) -> Any:
    images = F.normalize(model.encode_image(pixels))
    words = F.normalize(model.encode_text(texts))
    logits = model.logit_scale.exp() * images @ words.T
    if model.logit_bias is None:
        return logits
    return logits + model.logit_bias


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-32-quickgelu", "RN50"])
def test_known_towers_become_ours(name: str) -> None:
    theirs, preprocess = built(name)
    tokenizer = open_clip.get_tokenizer(name)
    ours = from_model(theirs, preprocess=preprocess, tokenizer=tokenizer)

    assert not ours.is_wrapped
    assert isinstance(ours.tokenizer, Tokenizer)
    assert ours.preprocess == from_model(theirs).preprocess

    wanted = original_logits(theirs, preprocess, tokenizer, pictures())
    actual = create_method("zero_shot", ours, PROMPTS).predict(pictures()).logits

    assert wanted.std() > 1e-3
    torch.testing.assert_close(actual, wanted, atol=LOGIT, rtol=FEATURE)

    # weights are shared, not copied
    key = "visual.patch.weight" if name.startswith("ViT") else "visual.conv1.weight"
    weight = ours.state_dict()[key]

    assert weight.data_ptr() == theirs.visual.conv1.weight.data_ptr()


def test_domain_norm_runs_on_a_held_vit() -> None:
    theirs, preprocess = built("ViT-B-32")
    ours = from_model(theirs, preprocess=preprocess)
    adapter = create_method("domain_norm", ours, PROMPTS)
    first = adapter.predict(pictures(8)).logits
    second = adapter.predict(pictures(8)).logits

    assert first.shape == (8, 3)
    assert second.isfinite().all()
    assert (first - second).abs().max() > 1e-6  # it learned


@torch.no_grad()
def test_siglip_becomes_ours(tmp_path: Path) -> None:
    config = copy.deepcopy(open_clip.get_model_config("ViT-B-32-SigLIP2-256"))
    config.pop("custom_text")
    config["text_cfg"] |= {"vocab_size": 64, "layers": 2, "width": 96, "heads": 3}
    torch.manual_seed(0)
    theirs = open_clip.CustomTextCLIP(**config).eval()
    word_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = open_clip.tokenizer.HFTokenizer.__new__(open_clip.tokenizer.HFTokenizer)
    from transformers import PreTrainedTokenizerFast

    tokenizer.tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.context_length = 64
    tokenizer.tokenizer_mode = ""
    tokenizer.clean_fn = open_clip.tokenizer.canonicalize_text
    tokenizer.strip_sep_token = False
    ours = from_model(theirs, tokenizer=tokenizer)

    assert not ours.is_wrapped
    assert ours.config.sigmoid
    assert ours.preprocess.resize == "squash"

    pixels = torch.randn(2, 3, 256, 256, generator=torch.Generator().manual_seed(1))
    wanted = logits_of(theirs, pixels, tokenizer(PROMPTS.texts(PROMPTS.templates[0])))
    actual = create_method("zero_shot", ours, PROMPTS).predict(Batch(pixels)).logits

    torch.testing.assert_close(actual, wanted, atol=LOGIT, rtol=FEATURE)


@pytest.mark.parametrize(
    "name", ["convnext_base", "EVA02-B-16", "MobileCLIP2-S0", "PE-Core-T-16-384"]
)
def test_other_towers_are_wrapped(name: str) -> None:
    theirs, preprocess = built(name)
    tokenizer = open_clip.get_tokenizer(name)
    ours = from_model(theirs, preprocess=preprocess, tokenizer=tokenizer)

    assert ours.is_wrapped
    assert "text" in ours.capabilities

    wanted = original_logits(theirs, preprocess, tokenizer, pictures(2))
    actual = create_method("zero_shot", ours, PROMPTS).predict(pictures(2)).logits

    torch.testing.assert_close(actual, wanted, atol=LOGIT, rtol=FEATURE)
    if "norm" in ours.capabilities:
        adapter = create_method("tent", ours, PROMPTS)
        first = adapter.predict(pictures(2)).logits
        second = adapter.predict(pictures(2)).logits
        torch.testing.assert_close(first, wanted, atol=ADAPTED, rtol=ADAPTED)
        assert (first - second).abs().max() > 0
    else:
        assert name == "MobileCLIP2-S0"  # all BatchNorm
