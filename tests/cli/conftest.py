"""A command runner, a small model in a file and a folder of images, for the command's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cliquetta.cli.main import app
from cliquetta.model.checkpoints.native import save_model
from cliquetta.model.clip import CLIP
from tests._helpers.running import Result, Run
from tests._helpers.trees import noise


@pytest.fixture
def run() -> Run:
    """Run the command with these words; a raised error other than an exit fails the test."""

    def call(*words: str | Path, input: bytes | None = None) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

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
    noise(folder, [f"{'more/' if index > 3 else ''}image{index}.png" for index in range(6)])
    return folder
