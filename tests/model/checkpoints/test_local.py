"""Files and folders: their family, what is missing; our own format, exact or in 8 bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.checkpoints.state import CheckpointError, quantise_state
from cliquetta.model.clip import CLIP
from cliquetta.model.config import CLIPConfig
from cliquetta.model.factory import create_model
from cliquetta.model.preprocess import Preprocess
from tests._helpers.openai_module import assert_same, bare_state
from tests._helpers.transformers_models import tiny_transformers

TEXTS = ["a photo of a cat.", "truck"]


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    both = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in both:
        path.touch()
    (tmp_path / "empty").mkdir()
    paths: list[Any] = [
        "./no.pt",
        "no.pt",
        "/no/such/folder",
        tmp_path / "empty",
        tmp_path,
    ]
    for path in (*paths, both, []):
        with pytest.raises(UserError):
            create_model(path)


def test_training_checkpoint(gelu_module: Any, pixels: Tensor, tmp_path: Path) -> None:
    """open_clip's own training files: nested, with a prefix of the parallel wrapper."""
    state = {f"module.{key}": value for key, value in bare_state(gelu_module).items()}
    torch.save(
        {"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}}, tmp_path / "e3.pt"
    )
    with pytest.warns(UserWarning, match="QuickGELU"):
        create_model(tmp_path / "e3.pt")
    assert_same(
        create_model(tmp_path / "e3.pt", activation="gelu"), gelu_module, pixels
    )


@pytest.mark.filterwarnings("error::UserWarning")
def test_header_or_name_settles_the_activation(
    module: Any, pixels: Tensor, tmp_path: Path
) -> None:
    save_file(
        bare_state(module),
        tmp_path / "a.safetensors",
        metadata={"model": "OpenAI CLIP"},
    )
    assert_same(create_model(tmp_path / "a.safetensors"), module, pixels)
    save_file(bare_state(module), tmp_path / "b-quickgelu.safetensors")
    assert_same(create_model(str(tmp_path / "b*.safetensors")), module, pixels)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    tiny_transformers("gelu").save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError):
        create_model(tmp_path)


def test_round_trip_is_exact(
    tiny_clip: CLIP, tiny_images: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "folder" / "model.safetensors"
    save_model(tiny_clip, path)
    again = create_model(path)
    assert again.config == tiny_clip.config
    assert again.id == "tiny"
    assert again.preprocess == tiny_clip.preprocess
    assert again.fingerprint == tiny_clip.fingerprint
    assert torch.equal(
        again.encode_image(tiny_images), tiny_clip.encode_image(tiny_images)
    )
    assert torch.equal(again.encode_text(TEXTS), tiny_clip.encode_text(TEXTS))
    assert create_model(path).fingerprint == create_model(path.parent).fingerprint
    assert not any(p.requires_grad for p in again.parameters())
    # no temporary file is left
    assert list(path.parent.iterdir()) == [path]


def test_eight_bits_are_close(
    tiny_clip: CLIP, tiny_images: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_model(tiny_clip, path, quantise=True)
    again = create_model(path)
    quantised = again.state_dict()
    for name, exact in tiny_clip.state_dict().items():
        if exact.ndim < 2 or "position" in name:
            assert torch.equal(quantised[name], exact)
        else:
            # half a step of its row at most, but not exact
            steps = exact.flatten(1).abs().amax(dim=1) / 127
            error = (exact - quantised[name]).flatten(1).abs().amax(dim=1)
            assert (error <= 0.5001 * steps).all()
            assert error.max() > 0

    ours = again.encode_image(tiny_images)
    expected = tiny_clip.encode_image(tiny_images)
    assert torch.cosine_similarity(ours, expected).min() > 0.99


def test_eight_bits_take_less_than_half_of_the_space(
    tiny_clip: CLIP, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_model(tiny_clip, path, quantise=True)
    plain = tmp_path / "plain.safetensors"
    save_model(tiny_clip, plain)
    assert path.stat().st_size < 0.5 * plain.stat().st_size


def test_image_tower_alone(
    tiny_clip: CLIP, tiny_images: Tensor, tmp_path: Path
) -> None:
    config = CLIPConfig(24, tiny_clip.config.vision, None)
    alone = CLIP(config, id="eye", preprocess=Preprocess(32, resize="squash"))
    state = tiny_clip.state_dict()
    for name in [name for name in state if name.startswith("text.")]:
        del state[name]
    alone.load_state_dict(state)
    save_model(alone, tmp_path / "eye.safetensors")
    again = create_model(tmp_path / "eye.safetensors")
    assert again.text is None
    assert again.preprocess == alone.preprocess
    expected = tiny_clip.encode_image(tiny_images)
    assert torch.equal(again.encode_image(tiny_images), expected)


def test_shards_of_openai_in_eight_bits(
    module: Any, pixels: Tensor, tmp_path: Path
) -> None:
    """Quantised image towers under OpenAI's names, in several files, projection turned."""
    state = {k: v for k, v in bare_state(module).items() if k.startswith("visual.")}
    state["visual.proj_t"] = state.pop("visual.proj").T
    quantised = sorted(quantise_state(state).items())
    header = {"model": "OpenAI CLIP"}
    for number in (0, 1):
        shard = {key: tensor.contiguous() for key, tensor in quantised[number::2]}
        save_file(shard, tmp_path / f"{number}.safetensors", header)
    model = create_model(tmp_path)
    assert model.text is None
    assert model.scale == pytest.approx(100)

    tower = model.require_vit()
    ours = tower.block(1)
    theirs = module.visual.transformer.resblocks[1]
    assert (ours.qkv.weight - theirs.attn.in_proj_weight).abs().max() < 0.02
    assert torch.equal(ours.fc.bias, theirs.mlp.c_fc.bias)
    assert (tower.projection - module.visual.proj).abs().max() < 0.02
    features = model.encode_image(pixels)
    expected = module.visual(pixels)
    assert torch.cosine_similarity(features, expected).min() > 0.99

    listed = create_model([tmp_path / "0.safetensors", tmp_path / "1.safetensors"])
    found = create_model(f"{tmp_path}/*.safetensors")
    assert listed.fingerprint == found.fingerprint

    # a shard that comes twice
    save_file(load_file(tmp_path / "0.safetensors"), tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match="shard"):
        create_model(tmp_path)


def test_bad_headers(tiny_clip: CLIP, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(tiny_clip, path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    state = load_file(path)
    config = json.loads(header["config"])
    config["vision"]["width"] = 48
    for text in ("{", json.dumps(config)):
        save_file(state, path, header | {"config": text})
        with pytest.raises(CheckpointError):
            create_model(path)
