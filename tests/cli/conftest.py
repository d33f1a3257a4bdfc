"""A command runner, a small model in a file and a folder of images, for the command's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cliquetta.cli.main import app
from cliquetta.model.checkpoints.native import save_model
from cliquetta.model.clip import CLIP
from tests._helpers.running import Answer, Run


@pytest.fixture
def run() -> Run:
    """Run the command with these words; a raised error other than an exit fails the test."""

    def call(*words: str | Path, input: bytes | None = None) -> Answer:
        result = CliRunner().invoke(app, [str(word) for word in words], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr, result.exception)

    return call


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
    generator = np.random.default_rng(0)
    for place in range(6):
        pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        name = f"more/image{place}.png" if place > 3 else f"image{place}.png"
        Image.fromarray(pixels).save(folder / name)
    return folder
