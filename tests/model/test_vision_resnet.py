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
    # 1 x 1, 3 x 3 and 1 x 1; a stride is an average before the last one
    y = F.conv2d(x, w[f"{at}.conv1.weight"])
    y = norm(y, w, f"{at}.bn1").relu()
    y = F.conv2d(y, w[f"{at}.conv2.weight"], padding=1)
    y = norm(y, w, f"{at}.bn2").relu()
    y = F.avg_pool2d(y, stride)
    y = F.conv2d(y, w[f"{at}.conv3.weight"])
    y = norm(y, w, f"{at}.bn3")

    if f"{at}.downsample.0.weight" in w:
        x = F.avg_pool2d(x, stride)
        x = F.conv2d(x, w[f"{at}.downsample.0.weight"])
        x = norm(x, w, f"{at}.downsample.1")
    return (x + y).relu()


def attention_pool(x: Tensor, w: Any, heads: int) -> Any:
    """Attend from the mean over positions, which is position 0."""
    x = x.flatten(2).permute(2, 0, 1)
    x = torch.cat([x.mean(dim=0, keepdim=True), x])
    x = x + w["attnpool.positional_embedding"][:, None]

    def project(name: str) -> Tensor:
        weight = w[f"attnpool.{name}_proj.weight"]
        y = F.linear(x, weight, w[f"attnpool.{name}_proj.bias"])
        # by image and head: (B, H, positions, D / H)
        return y.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)

    query = project("q")[:, :, :1]
    pooled = F.scaled_dot_product_attention(query, project("k"), project("v"))
    return F.linear(
        pooled.flatten(1),
        w["attnpool.c_proj.weight"],
        w["attnpool.c_proj.bias"],
    )


def literal(model: Any, x: Tensor) -> Any:
    w = model.visual.state_dict()
    # the stem: three convolutions and an average
    for index, stride in ((1, 2), (2, 1), (3, 1)):
        x = F.conv2d(x, w[f"conv{index}.weight"], stride=stride, padding=1)
        x = norm(x, w, f"bn{index}").relu()
    x = F.avg_pool2d(x, 2)

    # the first block of all stages but the first halves the picture
    for stage, blocks in enumerate(model.config.vision.layers, start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            x = bottleneck(x, w, f"layer{stage}.{block}", stride)
    return attention_pool(x, w, model.config.vision.heads)


def test_features(model: Any, pixels: Tensor) -> None:
    wanted = literal(model, pixels)
    assert wanted.std() > 0.1
    torch.testing.assert_close(
        model.encode_image(pixels), wanted, atol=LOGIT, rtol=LOGIT
    )


def test_openai_names_are_ours(model: Any, pixels: Tensor, tmp_path: Path) -> None:
    """A ResNet keeps OpenAI's key names; its shape is read from them."""
    path = tmp_path / "openai-rn.safetensors"
    weights = model.visual.state_dict()
    save_file({f"visual.{name}": tensor for name, tensor in weights.items()}, path)
    again = create_model(path)
    assert again.config.vision == model.config.vision
    assert torch.equal(again.encode_image(pixels), model.encode_image(pixels))


@pytest.fixture
def file(model: Any, tmp_path: Path) -> Path:
    path = tmp_path / "rn.safetensors"
    save_model(model, path)
    return path


def test_a_file_of_ours_gives_the_model_back(model: Any, file: Path) -> None:
    again = create_model(file)
    assert again.config == model.config
    assert again.fingerprint == model.fingerprint


def test_another_resolution(file: Path) -> None:
    large = create_model(file, image_size=96)
    features = large.encode_image(torch.zeros(1, 3, 96, 96))
    assert features.shape == (1, 24)
    with pytest.raises(ValueError, match="multiple"):
        create_model(file, image_size=80)


def test_a_shortcut_has_weights_only_where_shapes_differ() -> None:
    """As in OpenAI's files, which hold no weights for the others."""
    assert Bottleneck(inputs=256, planes=64, stride=1).downsample is None
    assert Bottleneck(inputs=256, planes=64, stride=2).downsample is not None
    assert Bottleneck(inputs=64, planes=64, stride=1).downsample is not None
