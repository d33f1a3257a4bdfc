"""A command runner, a small model in a file and a folder of images, for the command's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from cliquetta.model.checkpoints.native import save_model
from cliquetta.model.clip import CLIP
from tests._helpers.running import run as run
from tests._helpers.trees import noise


@pytest.fixture(scope="session")
def tiny_file(tiny_clip: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a file that ``--model`` takes."""
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    save_model(tiny_clip, path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six readable images, two of them in a sub-folder."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    noise(folder, [f"{'more/' if index > 3 else ''}image{index}.png" for index in range(6)])
    return folder
