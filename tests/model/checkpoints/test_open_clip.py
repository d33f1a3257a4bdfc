"""open_clip's files: its config, its SigLIPs, its releases, and the models that ours are not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.factory import create_model
from tests._helpers.openai_module import assert_same, bare_state, save_open_clip
from tests._helpers.transformers_models import (
    assert_features,
    save_open_clip_siglip,
    tiny_siglip,
    word_tokenizer,
)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("custom_text", [False, True])
def test_a_folder(
    gelu_module: Any, pixels: Tensor, tmp_path: Path, custom_text: bool
) -> None:
    state = bare_state(gelu_module)
    if custom_text:
        own = ("visual.", "logit_scale")
        state = {k if k.startswith(own) else f"text.{k}": v for k, v in state.items()}
    vision = {"image_size": 32, "layers": 2, "width": 128, "patch_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1}
    preprocess = {"mean": [0.5] * 3, "std": [0.2] * 3, "resize_mode": "squash"}

    def load(**more: Any) -> Any:
        config = {"vision_cfg": vision, "text_cfg": text, **more}
        return create_model(save_open_clip(state, tmp_path, preprocess, **config))

    model = load()
    assert_same(model, gelu_module, pixels)
    assert model.preprocess.mean == (0.5, 0.5, 0.5)
    assert model.preprocess.resize == "squash"
    assert load(quick_gelu=True).config.vision.activation == "quick_gelu"
    assert load(vision_cfg=vision | {"head_width": 32}).config.vision.heads == 4


@pytest.mark.parametrize(
    "change",
    [
        {"vision_cfg": {"width": 128, "timm_model_name": "vit_base"}},
        {"text_cfg": {"hf_model_name": "roberta-base"}},
        {"multimodal_cfg": {"width": 8}},
        {"embed_dim": 25},
    ],
    ids=str,
)
def test_other_configs_are_refused(
    gelu_module: Any, tmp_path: Path, change: Any
) -> None:
    state = bare_state(gelu_module)
    create_model(save_open_clip(state, tmp_path))  # without the change
    save_open_clip(state, tmp_path, **change)
    with pytest.raises(CheckpointError):
        create_model(tmp_path)


@pytest.mark.parametrize("value", [True, 1, "attentional"])
def test_a_setting_that_ours_do_not_have_is_refused_unless_it_is_off(
    gelu_module: Any, tmp_path: Path, value: Any
) -> None:
    state = bare_state(gelu_module)
    values_of_off: list[Any] = [None, False, 0, {}]
    for off in values_of_off:
        create_model(
            save_open_clip(state, tmp_path, vision_cfg={"width": 128, "new": off})
        )
    save_open_clip(state, tmp_path, vision_cfg={"width": 128, "new": value})
    with pytest.raises(
        CheckpointError, match=f"not supported: vision_cfg.new = {value!r} in"
    ):
        create_model(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_cfg": None},
        {"model_cfg": {}},
        {"model_cfg": {"text_cfg": {"width": 64}}},
    ],
    ids=str,
)
def test_a_config_without_parts_is_refused_in_a_sentence(
    gelu_module: Any, tmp_path: Path, config: Any
) -> None:
    save_open_clip(bare_state(gelu_module), tmp_path)
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    message = "open_clip_config.json has no model_cfg with a vision_cfg"
    with pytest.raises(CheckpointError, match=message):
        create_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("text_decoder.x", "CoCa"),
        ("visual.trunk.blocks.0.w", "timm image tower"),
        ("text.transformer.embeddings.w", "Hugging Face text tower"),
        ("visual.transformer.resblocks.0.ls_1.gamma", "layer scale"),
    ],
)
def test_other_families_are_named(
    module: Any, tmp_path: Path, key: str, what: str
) -> None:
    path = tmp_path / "x.safetensors"
    state = bare_state(module)
    state[key] = torch.zeros(1)
    save_file(state, path)
    with pytest.raises(CheckpointError, match=what):
        create_model(path, activation="gelu")


def wide_siglip() -> Any:
    """One with image heads of 64 channels, as open_clip's configs leave unsaid."""
    theirs = tiny_siglip()
    theirs.config.vision_config.num_attention_heads = 1
    attentions = [layer.self_attn for layer in theirs.vision_model.encoder.layers]
    for attention in (*attentions, theirs.vision_model.head.attention):
        attention.num_heads = 1
        attention.head_dim = 64
        attention.scale = 64**-0.5
    return theirs


@torch.no_grad()
def test_an_open_clip_folder(tmp_path: Path, pixels: Tensor) -> None:
    theirs = wide_siglip()
    folder = save_open_clip_siglip(theirs, tmp_path / "open")
    word_tokenizer(folder / "tokenizer.json")
    ours = create_model(folder)
    texts = ["a photo of a cat", "the frog", "a sketch of a green truck"]
    ids = ours.tokenizer(texts)
    assert_features(
        ours.encode_image(pixels),
        theirs.get_image_features(pixels).pooler_output,
        atol=1e-5,
    )
    assert_features(
        ours.encode_text(texts), theirs.get_text_features(ids).pooler_output, atol=1e-5
    )
    assert (ours.scale, ours.bias) == (pytest.approx(np.exp(2)), -3)  # type: ignore[comparison-overlap]
    assert ours.preprocess.resize == "squash"
    assert ours.preprocess.mean == (0.5,) * 3


def test_open_clip_weights_without_a_config(tmp_path: Path) -> None:
    folder = save_open_clip_siglip(wide_siglip(), tmp_path / "open")
    (folder / "open_clip_config.json").unlink()
    named = f"open_clip:ViT-B-16-SigLIP/{folder}"
    for path, message in ((folder, "open_clip_config.json"), (named, "768")):
        with pytest.raises(CheckpointError, match=message):
            create_model(path)
    state = load_file(folder / "open_clip_model.safetensors")
    del state["visual.trunk.pos_embed"]
    save_file(state, folder / "open_clip_model.safetensors")
    with pytest.raises(CheckpointError, match="pos_embed"):
        create_model(named)
