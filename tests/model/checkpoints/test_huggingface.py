"""Our towers against ``transformers.CLIPModel``, with its random weights read by our loader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.factory import create_model
from tests._helpers.tolerance import FEATURE, LOGIT, SUM
from tests._helpers.transformers_models import rewrite, tiny_transformers

TEXTS = ["cat", "a photo of a small green frog.", "a bad photo of the truck, and of ☃ on ice"]


def features(output: Any) -> Any:
    """transformers 5 wraps features, 4 does not."""
    return output if isinstance(output, torch.Tensor) else output.pooler_output


@pytest.fixture(scope="module", params=["quick_gelu", "gelu"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    theirs = tiny_transformers(request.param)
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    ours = create_model(f"hf:{folder}")
    assert ours.config.vision.activation == request.param
    return ours, theirs


@torch.no_grad()
def test_image_features(pair: Any, pixels: Tensor) -> None:
    ours, theirs = pair
    wanted = features(theirs.get_image_features(pixel_values=pixels))
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours.encode_image(pixels), wanted, atol=FEATURE, rtol=FEATURE)


@torch.no_grad()
def test_text_features(pair: Any) -> None:
    ours, theirs = pair
    ids = ours.tokenizer(TEXTS)
    assert ids.shape[1] == 77
    wanted = features(theirs.get_text_features(input_ids=ids))
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours.encode_text(TEXTS), wanted, atol=FEATURE, rtol=FEATURE)


@torch.no_grad()
def test_logits(pair: Any, pixels: Tensor) -> None:
    ours, theirs = pair
    wanted = theirs(input_ids=ours.tokenizer(TEXTS), pixel_values=pixels).logits_per_image
    cosines = ours.encode_image(pixels, normalize=True) @ ours.encode_text(TEXTS, normalize=True).T
    torch.testing.assert_close(ours.scale * cosines, wanted, atol=LOGIT, rtol=FEATURE)


@torch.no_grad()
def test_hidden_states_at_every_boundary(pair: Any, pixels: Tensor) -> None:
    ours, theirs = pair
    states = theirs.vision_model(pixels, output_hidden_states=True).hidden_states
    tower = ours.require_vit()
    hidden = tower.embed(pixels)
    for boundary, wanted in enumerate(states):
        found = tower.run(hidden, 0, boundary)
        torch.testing.assert_close(found, wanted, atol=FEATURE, rtol=FEATURE)


@torch.no_grad()
def test_attention(pair: Any, pixels: Tensor) -> None:
    ours, theirs = pair
    theirs.vision_model.config._attn_implementation = "eager"
    wanted = theirs.vision_model(pixels, output_attentions=True).attentions
    found = ours.require_vit().attention(pixels, [0, 2])
    assert sorted(found) == [0, 2]
    for index, weights in found.items():
        torch.testing.assert_close(weights, wanted[index], atol=SUM, rtol=FEATURE)


@torch.no_grad()
def test_an_image_tower_alone(tmp_path: Path, pixels: Tensor) -> None:
    config = tiny_transformers("gelu").config.vision_config
    config.projection_dim = 24
    theirs = transformers.CLIPVisionModelWithProjection(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = create_model(tmp_path)
    assert ours.text is None and "text" not in ours.capabilities
    torch.testing.assert_close(
        ours.encode_image(pixels), theirs(pixels).image_embeds, atol=FEATURE, rtol=FEATURE
    )


@torch.no_grad()
def test_shards_and_processor(tmp_path: Path, pixels: Tensor) -> None:
    theirs = tiny_transformers("quick_gelu")
    theirs.save_pretrained(tmp_path, max_shard_size="1MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2], "resample": 2})
    )
    ours = create_model(tmp_path)
    wanted = features(theirs.get_image_features(pixel_values=pixels))
    torch.testing.assert_close(ours.encode_image(pixels), wanted, atol=FEATURE, rtol=FEATURE)
    assert ours.preprocess.mean == (0.5, 0.4, 0.3)
    assert ours.preprocess.interpolation == "bilinear"
    assert ours.preprocess.crop_rounding == "floor"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "siglip2"}, "not supported.*NaFlex.*siglip2-base-patch16-256"),
        ({"model_type": "align"}, "not supported.*'align'.*from_model"),
        ({"vision_config__hidden_act": "silu"}, "hidden_act 'silu'"),
        ({"text_config__eos_token_id": 7}, "token 7"),
        ({"text_config__vocab_size": 1000}, "1000 words"),
        ({"vision_config__patch_size": 16}, r"another shape.*visual.patch.weight"),
        ({"vision_config__num_hidden_layers": 4}, r"another shape.*blocks.3.* is missing"),
        ({"vision_config__num_hidden_layers": 2}, r"another shape.*blocks.2.* is unexpected"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, changes: Any, message: str) -> None:
    tiny_transformers("gelu").save_pretrained(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        create_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[]", "holds a list"),
        ("config.json", "{" * 10_000, "not valid JSON"),
        ("config.json", "[" * 200_000, "not valid JSON"),
        ("preprocessor_config.json", '{"image_mean": "grey"}', "image_mean = 'grey'"),
        ("preprocessor_config.json", '{"image_std": [1, 2]}', "three numbers"),
        ("preprocessor_config.json", '{"image_std": ["a", "b", "c"]}', "three numbers"),
        ("preprocessor_config.json", '{"resample": [3]}', "resample = "),
        ("model.safetensors.index.json", "{}", "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "weight_map"),
    ],
)
def test_odd_files_are_refused_with_a_sentence(
    tmp_path: Path, saved: Path, name: str, content: str, message: str
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        create_model(f"hf:{tmp_path}")


def test_early_configs(tmp_path: Path) -> None:
    """The first configs named 2 as the end token and kept the settings in a second dictionary."""
    theirs = tiny_transformers("gelu")
    theirs.save_pretrained(tmp_path)
    ours = create_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rewrite(tmp_path, text_config={}, vision_config={}, text_config_dict=config["text_config"])
    rewrite(tmp_path, vision_config_dict=config["vision_config"], text_config_dict__eos_token_id=2)
    again = create_model(tmp_path)
    assert again.config == ours.config
    assert again.fingerprint == ours.fingerprint
