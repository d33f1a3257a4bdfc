"""Our towers, loader and tables against open_clip itself, with random weights."""

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from cliquetta.model.checkpoints import open_clip_zoo as zoo
from cliquetta.model.checkpoints.open_clip_zoo import ARCHITECTURES
from cliquetta.model.checkpoints.openai import NAMES, address, architecture_name
from cliquetta.model.factory import create_model
from tests._helpers.tolerance import FEATURE, SUM
from tests._helpers.transformers_models import noisy

pytestmark = pytest.mark.parity

TEXTS = ["cat", "a photo of a small green frog.", "a bad photo of the truck, and of ☃ on ice"]


def random_open_clip(name: str, seed: int = 0) -> Any:
    """open_clip's model with weights that are not at their quiet start."""
    torch.manual_seed(seed)
    model = noisy(open_clip.create_model(name, pretrained=None))
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.normal_(0, 0.1)
            elif key.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["ViT-B-32", "ViT-B-16", "ViT-B-32-quickgelu", "ViT-S-16", "RN50", "RN50-quickgelu"]
)
def test_features(name: str, tmp_path: Path) -> None:
    theirs = random_open_clip(name)
    state = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    save_file(state, tmp_path / "open_clip_model.safetensors")
    config = {"model_cfg": open_clip.get_model_config(name)}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    ours = create_model(tmp_path)
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    images = theirs.encode_image(pixels)
    assert images.abs().mean() > 0.1
    torch.testing.assert_close(ours.encode_image(pixels), images, atol=FEATURE, rtol=0)
    texts = theirs.encode_text(open_clip.get_tokenizer(name)(TEXTS))
    assert texts.abs().mean() > 0.1
    torch.testing.assert_close(ours.encode_text(TEXTS), texts, atol=FEATURE, rtol=0)
    assert ours.scale == pytest.approx(float(theirs.logit_scale.exp()), rel=SUM)


def test_positions_are_resized_as_open_clip_does(tmp_path: Path) -> None:
    theirs = random_open_clip("ViT-S-32")
    state = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    ours = create_model(tmp_path / "model.safetensors", activation="gelu", image_size=320)
    large = open_clip.create_model("ViT-S-32", pretrained=None, force_image_size=320)
    open_clip.factory.resize_pos_embed(state, large)
    torch.testing.assert_close(
        ours.require_vit().position, state["visual.positional_embedding"], atol=SUM, rtol=0
    )


def test_our_table_of_releases_is_theirs() -> None:
    from open_clip.pretrained import _PRETRAINED

    for name, architecture in ARCHITECTURES.items():
        config = open_clip.get_model_config(name)
        vision = config["vision_cfg"]
        is_siglip = "timm_model_name" in vision
        if is_siglip:
            ours = zoo.siglip_config(name)
            assert ours["vision_cfg"]["timm_model_name"] == vision["timm_model_name"]
            stated = (config["text_cfg"].get("act_kwargs") or {}).get("approximate", "none")
            assert ours["text_cfg"]["act_kwargs"]["approximate"] == stated
        else:
            assert architecture.width == vision["width"]
            assert architecture.patch_size == vision["patch_size"]
        assert architecture.image_size == vision["image_size"]
        for tag, repo in architecture.tags.items():
            release = _PRETRAINED[name][tag]
            assert release["hf_hub"].rstrip("/") == repo, (name, tag)
            if not is_siglip:
                expected = "quick_gelu" if release.get("quick_gelu", False) else "gelu"
                assert zoo.activation_of(name, tag, None) == expected, (name, tag)
            known = zoo.preprocess_of(name, tag)
            openai_mean = open_clip.OPENAI_DATASET_MEAN
            assert tuple(known.get("mean", openai_mean)) == tuple(release["mean"]), (name, tag)
            mode = known.get("resize_mode", "shortest")
            assert mode == release["resize_mode"], (name, tag)


def test_our_addresses_are_openais() -> None:
    from open_clip.pretrained import _PRETRAINED

    for name in NAMES:
        arch = architecture_name(name)
        release = _PRETRAINED[arch]["openai"]
        assert address(name)[0] == release["url"]
        assert ARCHITECTURES[arch].tags["openai"] == release["hf_hub"].rstrip("/")
