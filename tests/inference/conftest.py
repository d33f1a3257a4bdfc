"""A folder of photographs, and the command that predicts them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cliquetta.inference.bulk import predict
from cliquetta.inference.rows import PredictionRun
from cliquetta.model.clip import CLIP
from tests._helpers.trees import noise, numbered_photos

NAMES = ("airplane", "cat", "frog")
IMAGES = 14
DAMAGED = 5
Predict = Callable[..., PredictionRun]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen images, the sixth of which cannot be read."""
    folder = tmp_path_factory.mktemp("photos")
    numbered_photos(folder, IMAGES, [DAMAGED])
    return folder


@pytest.fixture
def run(photos: Path, tiny_clip: CLIP, tmp_path: Path) -> Predict:
    """One command for all tests: two methods that remember, four images per batch."""

    def call(images: object = None, **changes: object) -> PredictionRun:
        settings = {
            "model": tiny_clip,
            "method": ["tda", "tent"],
            "batch_size": 4,
            "workers": 0,
            "out": tmp_path / "out.csv",
            **changes,
        }
        return predict([photos] if images is None else images, NAMES, **settings)  # type: ignore[arg-type]

    return call


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images in each of three folders named after the classes, one of them damaged."""
    folder = tmp_path_factory.mktemp("labelled")
    for name in NAMES:
        (folder / name).mkdir()
    paths = [f"{name}/{number}.png" for name in NAMES for number in range(8)]
    noise(folder, paths, damaged=[11])  # cat/3.png
    return folder
