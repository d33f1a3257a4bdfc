"""Paths, PIL images, arrays and tensors make the batch that preprocessing by hand makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cliquetta.data.images import ImageError
from cliquetta.data.inputs import as_batch
from cliquetta.data.views import image_views, to_pixels
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

PREPROCESS = Preprocess(size=16)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    generator = np.random.default_rng(0)
    made = [tmp_path / f"{name}.png" for name in "ab"]
    for path in made:
        Image.fromarray(generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    return made


def test_every_kind_of_image_gives_the_same_pixels(paths: list[Path]) -> None:
    pictures = [Image.open(path).convert("RGB") for path in paths]
    pixels = torch.stack([PREPROCESS(picture) for picture in pictures])
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    kinds: list[Any] = [
        paths,
        [str(path) for path in paths],
        pictures,
        list(arrays),
        arrays,
        torch.from_numpy(arrays).permute(0, 3, 1, 2),
        pixels,
        Batch(pixels),
        [str(paths[0]), pictures[1]],
    ]
    for images in kinds:
        assert torch.equal(as_batch(images, PREPROCESS).images, pixels)
    assert as_batch(paths, PREPROCESS).keys == tuple(path.as_posix() for path in paths)
    assert torch.equal(as_batch(str(paths[1]), PREPROCESS).images, pixels[1:])
    assert torch.equal(as_batch(arrays[1], PREPROCESS).images, pixels[1:])


def test_views_belong_to_the_image_not_to_its_batch(paths: list[Path]) -> None:
    spec = ViewSpec("resized-crop", 3)
    batch = as_batch(paths, PREPROCESS, views=spec, seed=4)
    assert batch.views is not None
    for row, path in enumerate(paths):
        views = image_views(Image.open(path), path.as_posix(), spec, 4, PREPROCESS)
        assert torch.equal(batch.views[row], to_pixels(views, PREPROCESS))
    for images in ([Image.open(path) for path in paths], batch.images):
        whole = as_batch(images, PREPROCESS, views=spec).views
        alone = as_batch(images[1:], PREPROCESS, views=spec).views
        assert whole is not None and alone is not None
        assert torch.equal(whole[1:], alone)
    assert as_batch(batch, PREPROCESS, views=spec) is batch


def test_nothing_is_an_empty_batch() -> None:
    assert as_batch([], PREPROCESS, views=ViewSpec("augmix", 2)).images.shape == (0, 3, 16, 16)


@pytest.mark.parametrize("wrong", [3.0, None, np.zeros((4, 4, 3)), np.zeros((5,), np.uint8), b"x"])
def test_what_is_no_image_is_refused_by_its_kind(wrong: Any) -> None:
    with pytest.raises(UserError, match="not an image"):
        as_batch([wrong], PREPROCESS)


def test_unreadable_files_and_pixels_of_another_size(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"gone\.png: no such file"):
        as_batch([tmp_path / "gone.png"], PREPROCESS)
    with pytest.raises(UserError, match=r"\(B, 3, 16, 16\), got \(1, 3, 8, 8\)"):
        as_batch(torch.zeros(1, 3, 8, 8), PREPROCESS)


def test_reprs_name_shapes_not_numbers(paths: list[Path]) -> None:
    batch = as_batch(paths, PREPROCESS, views=ViewSpec("resized-crop", 2))
    text = repr(batch)
    assert "(2, 3, 16, 16)" in text and "views=2" in text and "a.png" in text
    assert len(text) < 200
