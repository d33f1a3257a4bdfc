"""Our towers against those of transformers, with random weights that our loader reads."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tolerance import FEATURE, LOGIT, SUM
from tests._helpers.transformers_models import (
    XLM,
    assert_features,
    rewrite,
    save_siglip,
    tiny_metaclip2,
    tiny_siglip,
    tiny_transformers,
    word_tokenizer,
)

FAMILIES = ("quick_gelu", "gelu", "xlm", "mt5", "siglip")
"""CLIP with either activation, MetaCLIP 2 with its own vocabulary or SigLIP's, SigLIP 2."""
TEXTS = ["a photo of a cat", "the frog", "a sketch of a green truck"]


def save_family(family: str, folder: Path) -> Any:
    """A model of transformers, saved with its tokenizer as its repositories hold it."""
    if family in ("quick_gelu", "gelu"):
        theirs = tiny_transformers(family)
    if family == "siglip":
        theirs = tiny_siglip()
        save_siglip(theirs, folder)
    if family in ("xlm", "mt5"):  # MT5's has no start token, and 1 as its end
        theirs = tiny_metaclip2(end=2 if family == "xlm" else 1)
        specials = XLM if family == "xlm" else ("<pad>", "</s>", "<unk>", "<extra>")
        word_tokenizer(folder / "tokenizer.json", specials=specials)
    theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("hf")
    theirs = save_family(request.param, folder)
    ours = create_model(f"hf:{folder}")
    if request.param in ("quick_gelu", "gelu"):
        assert ours.config.vision.activation == request.param
    return ours, theirs


def features(output: Any) -> Any:
    """transformers 5 wraps features, 4 does not."""
    return output if isinstance(output, torch.Tensor) else output.pooler_output


@torch.no_grad()
def test_features_and_logits(pair: Any, pixels: Tensor) -> None:
    ours, theirs = pair
    ids = ours.tokenizer(TEXTS)
    siglip = ours.config.sigmoid
    image = features(theirs.get_image_features(pixel_values=pixels))
    text = features(theirs.get_text_features(input_ids=ids))
    logits = theirs(input_ids=ids, pixel_values=pixels).logits_per_image
    assert_features(ours.encode_image(pixels), image, 1e-5 if siglip else FEATURE)
    assert_features(ours.encode_text(TEXTS), text, 1e-5 if siglip else FEATURE)

    images = ours.encode_image(pixels, normalize=True)
    texts = ours.encode_text(TEXTS, normalize=True)
    our_logits = ours.scale * images @ texts.T + ours.bias
    assert_features(our_logits, logits, 1e-5 if siglip else LOGIT)


@torch.no_grad()
def test_hidden_states_and_attention(pair: Any, pixels: Tensor) -> None:
    ours, theirs = pair
    theirs = copy.deepcopy(theirs)
    theirs.vision_model.config._attn_implementation = "eager"
    output = theirs.vision_model(
        pixels,
        output_hidden_states=True,
        output_attentions=True,
    )
    tower = ours.require_vit()
    hidden = tower.embed(pixels)
    close = 1e-5 if ours.config.sigmoid else FEATURE
    for boundary, wanted in enumerate(output.hidden_states):
        assert_features(tower.run(hidden, 0, boundary), wanted, close)
    weights = tower.attention(pixels, range(len(tower.blocks)))
    for index, wanted in enumerate(output.attentions):
        torch.testing.assert_close(weights[index], wanted, atol=SUM, rtol=FEATURE)

    # SigLIP pools by attention, which comes after those of the blocks
    if tower.head is not None:
        head = theirs.vision_model.head
        states = output.last_hidden_state
        probe = head.probe.expand(len(pixels), -1, -1)
        _, wanted = head.attention(probe, states, states, average_attn_weights=False)
        last = len(tower.blocks)
        pooled = tower.attention(pixels, [last])[last]
        torch.testing.assert_close(pooled, wanted, atol=SUM, rtol=FEATURE)


def test_tokens(pair: Any) -> None:
    """One per word, under the special tokens of each vocabulary; 77 of CLIP, 64 of SigLIP."""
    ours, theirs = pair
    ids = ours.tokenizer(["the cat"])[0].tolist()
    start = ours.config.text.start_tokens
    end = theirs.config.text_config.eos_token_id
    if ours.config.sigmoid:
        assert ids == [14, 9, 1] + [0] * 61
        assert start == 0
        canonical = ours.tokenizer(["A photo, of the cat!"])[0].tolist()
        assert canonical == [4, 5, 6, 14, 9, 1] + [0] * 58
    elif end == 1:
        assert ids == [14, 9] + [1] * 75
        assert start == 0
    elif end == 2:
        assert ids == [0, 14, 9, 2] + [1] * 73
        assert start == 1
    else:
        assert len(ids) == 77
        assert ids[0] == 49406
        assert ids[3] == 49407
        assert start == 1


@torch.no_grad()
def test_an_image_tower_alone(tmp_path: Path, pixels: Tensor) -> None:
    config = tiny_transformers("gelu").config.vision_config
    config.projection_dim = 24
    theirs = transformers.CLIPVisionModelWithProjection(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = create_model(tmp_path)
    assert ours.text is None
    assert "text" not in ours.capabilities
    assert_features(ours.encode_image(pixels), theirs(pixels).image_embeds)


@torch.no_grad()
def test_shards_and_processor(tmp_path: Path, pixels: Tensor) -> None:
    theirs = tiny_transformers("quick_gelu")
    theirs.save_pretrained(tmp_path, max_shard_size="1MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    values = {
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.2, 0.2],
        "resample": 2,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    ours = create_model(tmp_path)
    wanted = features(theirs.get_image_features(pixel_values=pixels))
    assert_features(ours.encode_image(pixels), wanted)
    assert ours.preprocess.mean == (0.5, 0.4, 0.3)
    assert ours.preprocess.interpolation == "bilinear"
    assert ours.preprocess.crop_rounding == "floor"


ODD_FILES = {
    "config.json": ("[]", "{" * 10_000, "[" * 200_000),
    "preprocessor_config.json": (
        '{"image_mean": "grey"}',
        '{"image_std": [1, 2]}',
        '{"image_std": ["a", "b", "c"]}',
        '{"resample": [3]}',
    ),
    "model.safetensors.index.json": ("{}", '{"weight_map": {"a": 3}}'),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_odd_files_are_refused(tmp_path: Path, saved: Path, name: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for content in ODD_FILES[name]:
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError):
            create_model(f"hf:{tmp_path}")


def test_early_configs(tmp_path: Path) -> None:
    """The first configs named 2 as the end token and had the settings in a second dictionary."""
    theirs = tiny_transformers("gelu")
    theirs.save_pretrained(tmp_path)
    ours = create_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rewrite(
        tmp_path,
        text_config={},
        vision_config={},
        text_config_dict=config["text_config"],
    )
    rewrite(
        tmp_path,
        vision_config_dict=config["vision_config"],
        text_config_dict__eos_token_id=2,
    )
    again = create_model(tmp_path)
    assert again.config == ours.config
    assert again.fingerprint == ours.fingerprint


@pytest.mark.parametrize("method", ["scap", "tpt"])
@pytest.mark.parametrize("family", ["xlm", "mt5"])
def test_context_is_learned(tmp_path: Path, family: str, method: str) -> None:
    """In MetaCLIP 2, whose first word is not always the second token."""
    save_family(family, tmp_path)
    ours = create_model(tmp_path)
    prompts = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}",))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    learned, plain = (
        create_method(name, ours, prompts).predict(images).logits
        for name in (method, "zero_shot")
    )
    assert learned.isfinite().all()
    assert not torch.allclose(learned, plain, atol=1e-3)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    tiny_metaclip2().save_pretrained(tmp_path)
    word_tokenizer(tmp_path / "tokenizer.json")  # Gemma's special tokens, no end
    with pytest.raises(UserError, match="token 2"):
        create_model(tmp_path)
