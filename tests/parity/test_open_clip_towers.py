"""Our towers, loader and tables against open_clip itself, with random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from cliquetta.model.checkpoints import releases
from cliquetta.model.checkpoints.openai import siglip_activation
from cliquetta.model.checkpoints.releases import ARCHITECTURES, OPENAI, address
from cliquetta.model.factory import create_model
from tests._helpers.tolerance import FEATURE, SUM
from tests._helpers.transformers_models import XLM, noisy, word_tokenizer

pytestmark = pytest.mark.parity

TEXTS = [
    "cat",
    "a photo of a small green frog.",
    "a bad photo of the truck, and of ☃ on ice",
]
WORDS = [
    "a photo of a cat",
    "the frog",
    "a sketch of a green truck",
]  # of a small vocabulary


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


def small(name: str) -> Any:
    """open_clip's config of ``name`` with a small vocabulary and few text layers."""
    config = copy.deepcopy(open_clip.get_model_config(name))
    config.pop("custom_text", None)
    config["text_cfg"] |= {"vocab_size": 64, "layers": 2, "width": 96, "heads": 3}
    return config


def save(model: Any, config: Any, folder: Path) -> None:
    """A folder in open_clip's format."""
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    text = json.dumps({"model_cfg": config})
    (folder / "open_clip_config.json").write_text(text)


def compare(ours: Any, theirs: Any, ids: Tensor, texts: list[str]) -> None:
    """Features of two images and of texts, and the scale."""
    size = ours.image_size
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, size, size, generator=generator)

    assert_same_features(ours.encode_image(pixels), theirs.encode_image(pixels))
    assert_same_features(ours.encode_text(texts), theirs.encode_text(ids))

    scale = float(theirs.logit_scale.exp())
    assert ours.scale == pytest.approx(scale, rel=SUM)


def assert_same_features(actual: Tensor, wanted: Tensor) -> None:
    """Features that are not all close to zero agree."""
    assert wanted.abs().mean() > 0.01
    torch.testing.assert_close(actual, wanted, atol=FEATURE, rtol=FEATURE)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "ViT-B-32",
        "ViT-B-16",
        "ViT-B-32-quickgelu",
        "ViT-S-16",
        "RN50",
        "RN50-quickgelu",
    ],
)
def test_features(name: str, tmp_path: Path) -> None:
    theirs = random_open_clip(name)
    save(theirs, open_clip.get_model_config(name), tmp_path)
    ours = create_model(tmp_path)
    ids = open_clip.get_tokenizer(name)(TEXTS)
    compare(ours, theirs, ids, TEXTS)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ViT-B-16-SigLIP", "ViT-B-32-SigLIP2-256"])
def test_siglip(name: str, tmp_path: Path) -> None:
    config = small(name)
    torch.manual_seed(0)
    theirs = noisy(open_clip.CustomTextCLIP(**config))
    save(theirs, config, tmp_path)
    word_tokenizer(tmp_path / "tokenizer.json")

    ours = create_model(tmp_path)
    compare(ours, theirs, ours.tokenizer(WORDS), WORDS)

    assert ours.bias == pytest.approx(float(theirs.logit_bias))

    expected = "gelu_tanh" if name.endswith("SigLIP2-256") else "gelu"
    assert ours.config.vision.activation == expected
    assert ours.config.text.activation == expected


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["ViT-H-14-worldwide-quickgelu", "ViT-H-14-worldwide-378"]
)
def test_metaclip_2(name: str, tmp_path: Path) -> None:
    config = small(name)
    config["vision_cfg"] |= {"layers": 2, "width": 160, "image_size": 56}
    torch.manual_seed(0)
    theirs = open_clip.CLIP(**config).eval()
    save(theirs, config, tmp_path)
    word_tokenizer(tmp_path / "tokenizer.json", specials=XLM)
    ours = create_model(tmp_path)

    assert ours.image_size == 56
    compare(ours, theirs, ours.tokenizer(WORDS), WORDS)


def test_positions_are_resized_as_open_clip_does(tmp_path: Path) -> None:
    theirs = random_open_clip("ViT-S-32")
    state = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    ours = create_model(
        tmp_path / "model.safetensors", activation="gelu", image_size=320
    )
    large = open_clip.create_model("ViT-S-32", pretrained=None, force_image_size=320)
    open_clip.factory.resize_pos_embed(state, large)

    torch.testing.assert_close(
        ours.require_vit().position,
        state["visual.positional_embedding"],
        atol=SUM,
        rtol=0,
    )


def test_our_table_of_releases_is_theirs() -> None:
    from open_clip.pretrained import _PRETRAINED

    for name, architecture in ARCHITECTURES.items():
        config = open_clip.get_model_config(name)
        vision = config["vision_cfg"]
        is_siglip = "timm_model_name" in vision
        if is_siglip:
            ours = releases.siglip_config(name)
            timm_name = vision["timm_model_name"]
            assert ours["vision_cfg"]["timm_model_name"] == timm_name
            with torch.device("meta"):
                tanh = (
                    "tanh"
                    in str(timm.create_model(timm_name).blocks[0].mlp.act).lower()
                )
            assert siglip_activation(timm_name) == ("gelu_tanh" if tanh else "gelu"), (
                name
            )
            stated = (config["text_cfg"].get("act_kwargs") or {}).get(
                "approximate", "none"
            )
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
                assert releases.activation_of(name, tag, None) == expected, (name, tag)
            known = releases.preprocess_of(name, tag)
            openai_mean = open_clip.OPENAI_DATASET_MEAN
            assert tuple(known.get("mean", openai_mean)) == tuple(release["mean"]), (
                name,
                tag,
            )
            mode = known.get("resize_mode", "shortest")
            assert mode == release["resize_mode"], (name, tag)


def test_our_addresses_are_openais() -> None:
    from open_clip.pretrained import _PRETRAINED

    for name, arch in OPENAI.items():
        release = _PRETRAINED[arch]["openai"]
        assert address(name)[0] == release["url"]
        assert ARCHITECTURES[arch].tags["openai"] == release["hf_hub"].rstrip("/")
