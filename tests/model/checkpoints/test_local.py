"""Files and folders: which family they are, and what is missing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.factory import create_model
from tests._helpers.openai_module import assert_same, bare_state
from tests._helpers.transformers_models import tiny_transformers


@pytest.mark.parametrize("name", ["./no.pt", "no.safetensors", "/no/such/folder"])
def test_missing_paths(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        create_model(name)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no .safetensors or .pt file"):
        create_model(tmp_path)
    both = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in both:
        path.touch()
    for given, message in ((tmp_path, "2 pickled files: name one"), (both, "give one .pt file")):
        with pytest.raises(CheckpointError, match=message):
            create_model(given)
    with pytest.raises(CheckpointError, match="no files"):
        create_model([])


def test_training_checkpoint(gelu_module: Any, pixels: Tensor, tmp_path: Path) -> None:
    """open_clip's own training files: nested, with a prefix of the parallel wrapper."""
    state = {f"module.{key}": value for key, value in bare_state(gelu_module).items()}
    torch.save({"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}}, tmp_path / "e3.pt")
    with pytest.warns(UserWarning, match="QuickGELU is assumed"):
        create_model(tmp_path / "e3.pt")
    assert_same(create_model(tmp_path / "e3.pt", activation="gelu"), gelu_module, pixels)


@pytest.mark.usefixtures("no_warnings")
def test_header_or_name_settles_the_activation(module: Any, pixels: Tensor, tmp_path: Path) -> None:
    save_file(bare_state(module), tmp_path / "a.safetensors", metadata={"model": "OpenAI CLIP"})
    assert_same(create_model(tmp_path / "a.safetensors"), module, pixels)
    save_file(bare_state(module), tmp_path / "b-quickgelu.safetensors")
    assert_same(create_model(str(tmp_path / "b*.safetensors")), module, pixels)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    tiny_transformers("gelu").save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json beside it"):
        create_model(tmp_path)
