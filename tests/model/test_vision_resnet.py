"""The ResNet tower against its definition in plain functions and torch's attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import CLIP
from cliquetta.model.config import CLIPConfig, ResNetConfig
from cliquetta.model.factory import create_model
from cliquetta.model.vision import Bottleneck
from tests._helpers.tolerance import LOGIT


@pytest.fixture(scope="module")
def model() -> Any:
    vision = ResNetConfig(image_size=64, width=8, layers=(1, 2, 1, 2), heads=4)
    model = CLIP(CLIPConfig(24, vision, None), id="rn-tiny")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or name == "logit_scale":
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            tensor.copy_(0.5 + noise.abs())
        elif tensor.ndim == 1:
            tensor.copy_(
                0.2 * noise + (1.0 if "bn" in name and "weight" in name else 0.0)
            )
        else:
            tensor.copy_(noise * (2 / tensor[0].numel()) ** 0.5)
    return model


@pytest.fixture(scope="module")
def pixels() -> Any:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def norm(x: Tensor, w: Any, at: Any) -> Any:
    return F.batch_norm(
        x,
        w[f"{at}.running_mean"],
        w[f"{at}.running_var"],
        w[f"{at}.weight"],
        w[f"{at}.bias"],
    )


def bottleneck(x: Tensor, w: Any, at: Any, stride: Any) -> Any:
    y = norm(F.conv2d(x, w[f"{at}.conv1.weight"]), w, f"{at}.bn1").relu()
    y = norm(F.conv2d(y, w[f"{at}.conv2.weight"], padding=1), w, f"{at}.bn2").relu()
    y = norm(F.conv2d(F.avg_pool2d(y, stride), w[f"{at}.conv3.weight"]), w, f"{at}.bn3")
    if f"{at}.downsample.0.weight" in w:
        x = F.conv2d(F.avg_pool2d(x, stride), w[f"{at}.downsample.0.weight"])
        x = norm(x, w, f"{at}.downsample.1")
    return (x + y).relu()


def literal(model: Any, x: Tensor) -> Any:
    w = model.visual.state_dict()
    for index, stride in ((1, 2), (2, 1), (3, 1)):
        x = F.conv2d(x, w[f"conv{index}.weight"], stride=stride, padding=1)
        x = norm(x, w, f"bn{index}").relu()
    x = F.avg_pool2d(x, 2)
    for stage, blocks in enumerate(model.config.vision.layers, start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            x = bottleneck(x, w, f"layer{stage}.{block}", stride)
    x = x.flatten(2).permute(2, 0, 1)
    x = (
        torch.cat([x.mean(dim=0, keepdim=True), x])
        + w["attnpool.positional_embedding"][:, None]
    )
    q, k, v = (  # by image and head: (B, H, positions, D / H)
        F.linear(x, w[f"attnpool.{name}_proj.weight"], w[f"attnpool.{name}_proj.bias"])
        .unflatten(2, (model.config.vision.heads, -1))
        .permute(1, 2, 0, 3)
        for name in "qkv"
    )
    pooled = F.scaled_dot_product_attention(q[:, :, :1], k, v).flatten(1)
    return F.linear(pooled, w["attnpool.c_proj.weight"], w["attnpool.c_proj.bias"])


def test_features(model: Any, pixels: Tensor) -> None:
    wanted = literal(model, pixels)
    assert wanted.std() > 0.1
    torch.testing.assert_close(
        model.encode_image(pixels), wanted, atol=LOGIT, rtol=LOGIT
    )


def test_openai_names_are_ours(model: Any, pixels: Tensor, tmp_path: Path) -> None:
    """A ResNet keeps OpenAI's key names; its shape is read from them."""
    state = {f"visual.{k}": v for k, v in model.visual.state_dict().items()}
    save_file(state, tmp_path / "openai-rn.safetensors")
    again = create_model(tmp_path / "openai-rn.safetensors")
    assert again.config.vision == model.config.vision
    assert torch.equal(again.encode_image(pixels), model.encode_image(pixels))


def test_another_resolution(model: Any, tmp_path: Path) -> None:
    save_model(model, tmp_path / "rn.safetensors")
    again = create_model(tmp_path / "rn.safetensors")
    assert again.config == model.config and again.fingerprint == model.fingerprint
    large = create_model(tmp_path / "rn.safetensors", image_size=96)
    assert large.encode_image(torch.zeros(1, 3, 96, 96)).shape == (1, 24)
    with pytest.raises(ValueError, match="multiple"):
        create_model(tmp_path / "rn.safetensors", image_size=80)


def test_a_shortcut_has_weights_only_where_shapes_differ() -> None:
    """As in OpenAI's files, which hold no weights for the others."""
    assert Bottleneck(inputs=256, planes=64, stride=1).downsample is None
    assert Bottleneck(inputs=256, planes=64, stride=2).downsample is not None
    assert Bottleneck(inputs=64, planes=64, stride=1).downsample is not None
