"""Weights fitted into a model: quantised, resized, or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.checkpoints.state import CheckpointError, dequantise, quantise
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from tests._helpers.openai_module import bare_state
from tests._helpers.tolerance import FEATURE


def test_checkpoints_of_another_shape(module: Any, tmp_path: Path) -> None:
    state = bare_state(module)
    path = tmp_path / "model.safetensors"
    narrow = {"visual.transformer.resblocks.1.mlp.c_fc.weight": torch.zeros(7, 128)}
    for weights, message in (
        (state | narrow, "fc.weight"),
        ({k: v for k, v in state.items() if "ln_post.bias" not in k}, "ln_post.bias"),
        ({"layer.weight": torch.zeros(2, 2)}, "layer"),
        (state | {"token_embedding.weight": torch.zeros(1000, 64)}, "1000"),
    ):
        save_file(weights, path)
        with pytest.raises(CheckpointError, match=message):
            create_model(path, activation="gelu")


def test_positions_interpolate(module: Any, pixels: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(module.state_dict(), path)
    large = create_model(path, image_size=64)
    assert large.image_size == 64
    assert large.preprocess.size == 64
    assert large.encode_image(torch.zeros(1, 3, 64, 64)).shape == (1, 24)

    before = create_model(path).require_vit().position
    after = large.require_vit().position
    assert torch.equal(before[0], after[0])  # the class position stays
    for channel in (0, 77):  # Pillow's bicubic, on one channel of the grid as a picture
        picture = Image.fromarray(before[1:, channel].view(4, 4).numpy())
        expected = np.asarray(picture.resize((8, 8), Image.Resampling.BICUBIC))
        actual = after[1:, channel].view(8, 8).numpy()
        np.testing.assert_allclose(actual, expected, atol=FEATURE)


def test_the_size_of_images_is_the_models_own_or_a_multiple_of_its_patches(
    module: Any, tmp_path: Path
) -> None:
    path = tmp_path / "state.pt"
    torch.save(module.state_dict(), path)
    same = create_model(path, image_size=32)
    assert same.fingerprint == create_model(path).fingerprint
    with pytest.raises(ValueError, match="multiple"):
        create_model(path, image_size=60)


def test_quantisation_by_hand() -> None:
    weight = torch.tensor([[1.27, -0.64, 0.004], [0.0, 0.0, 0.0]])
    codes, scale = quantise(weight)
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0]]
    torch.testing.assert_close(scale[0], torch.tensor(0.01))
    actual = dequantise(
        {"w.int8": codes, "w.scale": scale, "other.scale": torch.ones(1)}
    )
    torch.testing.assert_close(
        actual["w"], torch.tensor([[1.27, -0.64, 0.0], [0.0, 0.0, 0.0]])
    )
    assert sorted(actual) == [
        "other.scale",
        "w",
    ]  # a scale that belongs to no codes is a weight
    with pytest.raises(CheckpointError):
        dequantise({"w.int8": codes})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_must_be_finite(tiny_clip: CLIP, tmp_path: Path, value: float) -> None:
    path = tmp_path / "model.safetensors"
    save_model(tiny_clip, path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    state = load_file(path)
    state["visual.ln_post.weight"][3] = value
    save_file(state, path, metadata)
    with pytest.raises(CheckpointError, match="ln_post"):
        create_model(path)
    state["visual.ln_post.weight"][3:5] = (
        3e38  # large is not infinite, even if the sum is
    )
    save_file(state, path, metadata)
    assert create_model(path).id == "tiny"
