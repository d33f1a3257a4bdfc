"""Views: tied to key and seed, equal on every path."""

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from cliquetta.data.crops import crop_image, zoom_crop_boxes
from cliquetta.data.views import (
    VIEW_KINDS,
    attach_views,
    check_spec,
    image_views,
    to_pixels,
)
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec
from tests._helpers.trees import random_pixels

PREPROCESS = Preprocess.openai(32)
KEYS = ("one", "two", "three")
# one grey level on the scale of normalised pixels
ONE_LEVEL = 1 / 255 / min(PREPROCESS.std)


def array_views(
    images: np.ndarray, keys: Sequence[str], spec: ViewSpec, seed: int = 0
) -> torch.Tensor:
    """Pixels of the views of several pictures."""
    pixels = []
    for image, key in zip(images, keys, strict=True):
        views = image_views(Image.fromarray(image), key, spec, seed, PREPROCESS)
        pixels.append(to_pixels(views, PREPROCESS))
    return torch.stack(pixels)


def pictures(height: int = 32, width: int = 32) -> np.ndarray:
    """Three smooth pictures."""
    coarse = random_pixels(3, 4, 4, 3, seed=3)
    resized = []
    for pixels in coarse:
        picture = Image.fromarray(pixels).resize((width, height))
        resized.append(np.asarray(picture))
    return np.stack(resized)


EXTREME = """
import resource
import numpy as np
from PIL import Image
from cliquetta.data.views import VIEW_KINDS, image_views, to_pixels
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import ViewSpec

N = 5_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for shape in (1, 1), (1, 2), (2, 1), (1, N), (N, 1), (2, N // 2), (5000, 5000):
    picture = np.full((*shape, 3), (10, 100, 200), dtype=np.uint8)
    for kind in VIEW_KINDS:
        for rule in ("shorter", "squash"):
            spec = ViewSpec(kind, 4)
            preprocess = Preprocess(224, resize=rule)
            views = image_views(Image.fromarray(picture), "key", spec, 0, preprocess)
            pixels = to_pixels(views, preprocess)
            assert pixels.shape == (4, 3, 224, 224)
            assert pixels.isfinite().all()
            assert kind == "augmix" or pixels.std(dim=(-1, -2)).max() < 1e-5
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_extreme_shapes_take_little_memory() -> None:
    run = subprocess.run(
        [sys.executable, "-c", EXTREME], capture_output=True, text=True
    )
    assert run.stderr == ""
    assert int(run.stdout) < 700_000  # kilobytes; the largest picture has 75 MB


@pytest.mark.parametrize("zoom", [1.15, 40.0])
def test_crops_of_a_long_picture_are_those_of_the_resized_one(zoom: float) -> None:
    # waves of another length in every channel, along a strip of 3 x 200 pixels
    rows, columns = np.indices((3, 200))
    waves = [128 + 100 * np.sin((rows + columns) / period) for period in (3, 5, 9)]
    pixels = np.stack(waves, axis=-1).astype(np.uint8)
    picture = Image.fromarray(pixels)
    boxes = zoom_crop_boxes(
        3,
        200,
        20,
        np.random.default_rng(0),
        size=16,
        zoom=zoom,
    )
    assert boxes.height * boxes.width > 64 * 16 * 16

    # resize all of the picture, then cut every view out of it
    whole = picture.resize((boxes.width, boxes.height), Image.Resampling.BILINEAR)
    resized = np.asarray(whole).astype(int)
    crops = crop_image(picture, boxes, 16)
    for view, crop in enumerate(crops):
        top = boxes.top[view]
        left = boxes.left[view]
        expected = resized[top : top + 16, left : left + 16]
        if boxes.mirrored[view]:
            expected = expected[:, ::-1]
        assert np.abs(crop - expected).max() <= 1


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_views_depend_on_seed_key_and_spec_only(kind: str) -> None:
    images = pictures()
    spec = ViewSpec(kind, 6)
    views = array_views(images, KEYS, spec)
    last_and_first = array_views(images[[2, 0]], (KEYS[2], KEYS[0]), spec)
    assert torch.equal(last_and_first, views[[2, 0]])

    # another seed or other keys change all views but the plain one
    other_seed = array_views(images, KEYS, spec, 1)
    other_keys = array_views(images, ("four", "five", "six"), spec)
    for other in (other_seed, other_keys):
        assert torch.equal(other[:, 0], views[:, 0])
        for view in range(1, 6):
            assert (other[:, view] != views[:, view]).any()


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_attached_views_are_those_of_the_preprocessed_picture(kind: str) -> None:
    images = pictures()  # already of the model's size
    spec = ViewSpec(kind, 8)
    batch = Batch(PREPROCESS.pixels(images), KEYS)
    attached = attach_views(batch, spec, seed=5, preprocess=PREPROCESS)
    assert attached.keys == KEYS
    assert torch.equal(attached.views[:, 0], batch.images)
    torch.testing.assert_close(
        attached.views,
        array_views(images, KEYS, spec, 5),
        atol=1.6 * ONE_LEVEL,
        rtol=0,
    )


def test_a_zoom_of_one_moves_nothing_but_mirrors() -> None:
    spec = ViewSpec("zoom-crop", 10, zoom=1.0)
    views = array_views(pictures(), KEYS, spec)
    plain = views[:, :1]
    same = (views == plain).flatten(2).all(2)
    mirrored = (views == plain.flip(-1)).flatten(2).all(2)
    assert (same | mirrored).all()
    assert mirrored.any()


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_views_of_half_precision_keep_it(kind: str) -> None:
    pixels = PREPROCESS.pixels(pictures()).to(torch.bfloat16)
    attached = attach_views(
        Batch(pixels, KEYS),
        ViewSpec(kind, 3),
        seed=0,
        preprocess=PREPROCESS,
    )
    assert attached.views.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_the_only_view_is_the_plain_one(kind: str) -> None:
    only = array_views(pictures(), KEYS, ViewSpec(kind, 1))
    assert torch.equal(only[:, 0], PREPROCESS.pixels(pictures()))


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_no_images_have_no_views(kind: str) -> None:
    nothing = Batch(torch.zeros(0, 3, 32, 32))
    attached = attach_views(nothing, ViewSpec(kind, 4), seed=0)
    assert attached.views.shape == (0, 4, 3, 32, 32)


def test_what_cannot_be_made_is_refused() -> None:
    check_spec(ViewSpec("augmix", 1))  # one view is the plain one
    for spec, message in (
        (ViewSpec("zoom-crops"), "'zoom-crop'"),
        (ViewSpec("augmix", 0), "one view"),
        (ViewSpec("zoom-crop", 2, zoom=0.9), "zoom must"),
    ):
        with pytest.raises(UserError, match=message):
            check_spec(spec)
    images = torch.zeros(2, 3, 32, 32)
    with pytest.raises(
        UserError, match=r"attach_views\(..., preprocess=model.preprocess\)"
    ):
        attach_views(Batch(images, ("a", "b")), ViewSpec("augmix", 2), seed=0)


@pytest.mark.parametrize("keys", [(), ("a",), ("a", "b", "c")], ids=str)
def test_views_of_images_without_a_key_for_each_are_refused(
    keys: tuple[str, ...],
) -> None:
    batch = Batch(torch.zeros(2, 3, 32, 32), keys)
    with pytest.raises(
        UserError, match=f"2 images and {len(keys)} keys; make it with Batch"
    ):
        attach_views(batch, ViewSpec("resized-crop", 2), seed=0)


@pytest.mark.parametrize("min_area", [0.08, 0.5])
def test_crops_are_not_smaller_than_asked(min_area: float) -> None:
    """A crop of area a and aspect at most 4/3 shows at least sqrt(3a/4) of the range of a ramp."""
    row = np.arange(256, dtype=np.uint8)
    ramp = np.broadcast_to(row[:, None], (1, 256, 256, 3))
    spec = ViewSpec("resized-crop", 65, zoom=1.0, min_area=min_area)
    (views,) = array_views(ramp, ("ramp",), spec)

    shown = PREPROCESS.unnormalise(views[1:]).float()
    brightest = shown.amax(dim=(1, 2, 3))
    darkest = shown.amin(dim=(1, 2, 3))
    narrowest = float((brightest - darkest).min()) / 255
    least = (0.75 * min_area) ** 0.5
    assert 0.9 * least < narrowest < least + 0.25
