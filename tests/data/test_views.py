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

PREPROCESS = Preprocess.openai(32)
KEYS = ("one", "two", "three")
ONE_LEVEL = (
    1 / 255 / min(PREPROCESS.std)
)  # one grey level on the scale of normalised pixels


def array_views(
    images: np.ndarray, keys: Sequence[str], spec: ViewSpec, seed: int = 0
) -> torch.Tensor:
    """Pixels of the views of several pictures."""
    pairs = zip(map(Image.fromarray, images), keys, strict=True)
    views = (image_views(*pair, spec, seed, PREPROCESS) for pair in pairs)
    return torch.stack([to_pixels(one, PREPROCESS) for one in views])


def pictures(height: int = 32, width: int = 32) -> np.ndarray:
    coarse = np.random.default_rng(3).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    return np.stack(
        [np.asarray(Image.fromarray(c).resize((width, height))) for c in coarse]
    )


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
            spec, preprocess = ViewSpec(kind, 4), Preprocess(224, resize=rule)
            views = image_views(Image.fromarray(picture), "key", spec, 0, preprocess)
            pixels = to_pixels(views, preprocess)
            assert pixels.shape == (4, 3, 224, 224) and pixels.isfinite().all()
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
    rows, columns = np.indices((3, 200))
    waves = [128 + 100 * np.sin((rows + columns) / period) for period in (3, 5, 9)]
    picture = np.stack(waves, axis=-1).astype(np.uint8)
    boxes = zoom_crop_boxes(3, 200, 20, np.random.default_rng(0), size=16, zoom=zoom)
    assert boxes.height * boxes.width > 64 * 16 * 16
    size = boxes.width, boxes.height
    complete = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR)
    crops = crop_image(Image.fromarray(picture), boxes, 16)
    for view, (top, left) in enumerate(zip(boxes.top, boxes.left, strict=True)):
        expected = np.asarray(complete)[top : top + 16, left : left + 16].astype(int)
        expected = expected[:, ::-1] if boxes.mirrored[view] else expected
        assert np.abs(crops[view] - expected).max() <= 1


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_views_depend_on_seed_key_and_spec_only(kind: str) -> None:
    images, spec = pictures(), ViewSpec(kind, 6)
    views = array_views(images, KEYS, spec)
    again = array_views(images[[2, 0]], (KEYS[2], KEYS[0]), spec)
    assert torch.equal(again, views[[2, 0]])
    for other in (
        array_views(images, KEYS, spec, 1),
        array_views(images, ("four", "five", "six"), spec),
    ):
        assert torch.equal(other[:, 0], views[:, 0])
        assert all((other[:, v] != views[:, v]).any() for v in range(1, 6))


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_attached_views_are_those_of_the_preprocessed_picture(kind: str) -> None:
    images, spec = pictures(), ViewSpec(kind, 8)  # already of the model's size
    batch = Batch(PREPROCESS.pixels(images), KEYS)
    attached = attach_views(batch, spec, seed=5, preprocess=PREPROCESS)
    expected = array_views(images, KEYS, spec, 5)
    assert torch.equal(attached.views[:, 0], batch.images)
    torch.testing.assert_close(attached.views, expected, atol=1.6 * ONE_LEVEL, rtol=0)
    assert attached.keys == KEYS


def test_a_zoom_of_one_moves_nothing_but_mirrors() -> None:
    views = array_views(pictures(), KEYS, ViewSpec("zoom-crop", 10, zoom=1.0))
    plain = views[:, :1]
    same = (views == plain).flatten(2).all(2)
    mirrored = (views == plain.flip(-1)).flatten(2).all(2)
    assert (same | mirrored).all() and mirrored.any()


@pytest.mark.parametrize("kind", VIEW_KINDS)
def test_views_of_half_precision_of_one_view_and_of_nothing(kind: str) -> None:
    batch = Batch(PREPROCESS.pixels(pictures()).to(torch.bfloat16), KEYS)
    attached = attach_views(batch, ViewSpec(kind, 3), seed=0, preprocess=PREPROCESS)
    assert attached.views.dtype == torch.bfloat16
    one = array_views(pictures(), KEYS, ViewSpec(kind, 1))
    assert torch.equal(one[:, 0], PREPROCESS.pixels(pictures()))
    empty = attach_views(Batch(torch.zeros(0, 3, 32, 32)), ViewSpec(kind, 4), seed=0)
    assert empty.views.shape == (0, 4, 3, 32, 32)


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
    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (256, 256, 3))
    spec = ViewSpec("resized-crop", 65, 1.0, min_area)
    (views,) = array_views(ramp[None], ("ramp",), spec)
    shown = PREPROCESS.unnormalise(views[1:]).float()
    spans = (shown.amax(dim=(1, 2, 3)) - shown.amin(dim=(1, 2, 3))) / 255
    least = (0.75 * min_area) ** 0.5
    assert 0.9 * least < float(spans.min()) < least + 0.25
