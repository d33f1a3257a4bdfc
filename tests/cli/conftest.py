"""A command runner, a folder of images and a fitted method, for the command's tests."""

import json
from pathlib import Path

import pytest

from tests._helpers.running import Run
from tests._helpers.running import run as run
from tests._helpers.trees import noise


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six readable images, two of them in a sub-folder."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    noise(
        folder,
        [f"{'more/' if index > 3 else ''}image{index}.png" for index in range(6)],
    )
    return folder


@pytest.fixture
def fitted(run: Run, tiny_file: Path, tmp_path: Path) -> Path:
    """A file of Tip-Adapter, fitted to two images per class."""
    path = tmp_path / "tip.safetensors"
    words = (
        "--dataset",
        "bundled-fewshot",
        "--shots",
        "2",
        "--model",
        tiny_file,
        "--json",
    )
    made = run("fit", "--method", "tip_adapter", *words, "--out", path)
    assert made.code == 0 and json.loads(made.stdout)["images"] == 20
    return path
