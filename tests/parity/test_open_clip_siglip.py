"""SigLIP and MetaCLIP 2 of open_clip itself, with random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file

from cliquetta.model.checkpoints.open_clip_zoo import ARCHITECTURES, siglip_config
from cliquetta.model.checkpoints.openai import siglip_activation
from cliquetta.model.factory import create_model
from tests._helpers.tolerance import FEATURE, SUM
from tests._helpers.transformers_models import XLM, noisy, word_tokenizer

pytestmark = pytest.mark.parity

TEXTS = ["a photo of a cat", "the frog", "a sketch of a green truck"]


def small(name: str, **text: Any) -> Any:
    """open_clip's config of ``name`` with a small vocabulary and few text layers."""
    config = copy.deepcopy(open_clip.get_model_config(name))
    config.pop("custom_text", None)
    config["text_cfg"] |= {"vocab_size": 64, "layers": 2, "width": 96, "heads": 3} | text
    return config


def saved(model: Any, config: Any, folder: Path) -> None:
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))


def compare(ours: Any, theirs: Any, size: int) -> None:
    pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    images = theirs.encode_image(pixels)
    assert images.abs().mean() > 0.01
    torch.testing.assert_close(ours.encode_image(pixels), images, atol=FEATURE, rtol=FEATURE)
    texts = theirs.encode_text(ours.tokenizer(TEXTS))
    assert texts.abs().mean() > 0.01
    torch.testing.assert_close(ours.encode_text(TEXTS), texts, atol=FEATURE, rtol=FEATURE)
    assert ours.scale == pytest.approx(float(theirs.logit_scale.exp()), rel=SUM)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ViT-B-16-SigLIP", "ViT-B-32-SigLIP2-256"])
def test_siglip(name: str, tmp_path: Path) -> None:
    config = small(name)
    torch.manual_seed(0)
    theirs = noisy(open_clip.CustomTextCLIP(**config))
    saved(theirs, config, tmp_path)
    word_tokenizer(tmp_path / "tokenizer.json")
    ours = create_model(tmp_path)
    compare(ours, theirs, ARCHITECTURES[name].image_size)
    assert ours.bias == pytest.approx(float(theirs.logit_bias))
    expected = "gelu_tanh" if name.endswith("SigLIP2-256") else "gelu"
    assert ours.config.vision.activation == ours.config.text.activation == expected


def test_gelu_of_every_image_tower() -> None:
    for name in ARCHITECTURES:
        if "SigLIP" in name:
            timm_name = siglip_config(name)["vision_cfg"]["timm_model_name"]
            with torch.device("meta"):
                activation = timm.create_model(timm_name).blocks[0].mlp.act
            is_tanh = "tanh" in str(activation).lower()
            assert siglip_activation(timm_name) == ("gelu_tanh" if is_tanh else "gelu"), name


@torch.no_grad()
@pytest.mark.parametrize("name", ["ViT-H-14-worldwide-quickgelu", "ViT-H-14-worldwide-378"])
def test_metaclip_2(name: str, tmp_path: Path) -> None:
    config = small(name)
    config["vision_cfg"] |= {"layers": 2, "width": 160, "image_size": 56}
    torch.manual_seed(0)
    theirs = open_clip.CLIP(**config).eval()
    saved(theirs, config, tmp_path)
    word_tokenizer(tmp_path / "tokenizer.json", specials=XLM)
    ours = create_model(tmp_path)
    assert ours.image_size == 56
    compare(ours, theirs, 56)
