"""A command runner, a small model in a file and a folder of images, for the command's tests."""

import json
from pathlib import Path

import pytest

from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import CLIP
from tests._helpers.running import Run
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


@pytest.fixture
def fitted(run: Run, tiny_file: Path, tmp_path: Path) -> Path:
    """A file of Tip-Adapter, fitted to two images per class."""
    path = tmp_path / "tip.safetensors"
    words = ("--dataset", "bundled-fewshot", "--shots", "2", "--model", tiny_file, "--json")
    made = run("fit", "--method", "tip_adapter", *words, "--out", path)
    assert made.code == 0 and json.loads(made.stdout)["images"] == 20
    return path
