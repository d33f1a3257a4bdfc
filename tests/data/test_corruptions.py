"""Properties of every corruption, whatever it does, and datasets under one."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cliquetta.data.bundled import load_bundled
from cliquetta.data.catalogue import get_dataset
from cliquetta.data.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    Shift,
    ShiftedDataset,
    corrupt_batch,
    parse_dataset_id,
)
from cliquetta.errors import UnknownNameError

ALL = list(CORRUPTIONS)
PICTURES = load_bundled("test").images[::40]
generator = np.random.default_rng


def test_the_fifteen_and_three_of_our_own() -> None:
    assert len(ALL) == 18
    assert ALL[15:] == ["greyscale", "edges", "double_exposure"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (33, 20), (50, 100)], ids=str)
def test_any_size_keeps_shape_and_input(name: str, shape: tuple[int, ...]) -> None:
    image = generator(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    before = image.copy()
    for severity in (1, 5):
        (out,) = corrupt_batch(image[None], name, severity, seed=0)
        assert out.shape == image.shape
        assert out.dtype == np.uint8
    assert np.array_equal(image, before)


@pytest.mark.parametrize("name", ALL)
def test_order_and_company_do_not_matter(name: str) -> None:
    together = corrupt_batch(PICTURES, name, 3, seed=5)

    def differences(order: Any) -> Any:
        part = corrupt_batch(PICTURES[order], name, 3, seed=5, indices=order)
        return np.abs(part.astype(int) - together[order])

    # seven of the pictures in another order; sums may be in another order, too
    seven = generator(2).permutation(len(PICTURES))[:7].tolist()
    assert differences(seven).max() <= 1
    assert (differences(seven) == 0).mean() > 0.999
    assert differences([4]).max() <= 1


# By their published constants some do not move away from the original step by step:
# glass blur (3 and 5 blur more than the one before, which removes noise), elastic (less
# shake, more ripples) and frost (from 3 on, less of the picture rather than more ice).
@pytest.mark.parametrize(
    "name", sorted(set(ALL) - {"glass_blur", "elastic_transform", "frost"})
)
def test_distance_grows_with_severity(name: str) -> None:
    distances = []
    for severity in SEVERITIES:
        corrupted = corrupt_batch(PICTURES, name, severity, seed=0).astype(float)
        # root mean square of each picture, then the mean over pictures
        squares = ((corrupted - PICTURES) ** 2).mean(axis=(1, 2, 3))
        distances.append(float(np.sqrt(squares).mean()))
    assert distances[0] > 0.5
    assert distances[4] > 1.4 * distances[0]
    for milder, stronger in pairwise(distances):
        assert stronger > milder - 0.05, distances


def test_constants_follow_the_size() -> None:
    noise = CORRUPTIONS["gaussian_noise"]
    # those of CIFAR-C up to 32 pixels, those of ImageNet-C from 224 on
    assert noise.constants(1, 16) == (0.04,)
    assert noise.constants(1, 32) == (0.04,)
    assert noise.constants(1, 224) == (0.08,)
    assert noise.constants(1, 500) == (0.08,)
    middle = round((32 * 224) ** 0.5)
    assert noise.constants(1, middle)[0] == pytest.approx(0.06, abs=1e-3)


def test_a_name_of_no_corruption_is_refused() -> None:
    with pytest.raises(UnknownNameError):
        corrupt_batch(PICTURES, "gausian_noise", 1, seed=0)


@pytest.mark.parametrize("severity", [0, 6, -1])
def test_a_severity_that_cannot_be_is_refused(severity: int) -> None:
    with pytest.raises(ValueError, match="1, 2, 3"):
        corrupt_batch(PICTURES[:1], "fog", severity, seed=0)


@pytest.mark.parametrize(
    "wrong",
    [PICTURES / 255.0, PICTURES[..., :1], PICTURES[0]],
    ids=["floats", "one channel", "one picture"],
)
def test_what_is_no_batch_of_pictures_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="RGB"):
        corrupt_batch(wrong, "fog", 1, seed=0)


def test_indices_that_are_not_one_a_picture_are_refused() -> None:
    with pytest.raises(ValueError, match="indices"):
        corrupt_batch(PICTURES, "fog", 1, seed=0, indices=[1, 2])


def test_large_batches_are_worked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = corrupt_batch(PICTURES, "fog", 2, seed=3)
    four_pictures = 4 * 32 * 32 * 3
    monkeypatch.setattr("cliquetta.data.corruptions._CHUNK", four_pictures)
    in_chunks = corrupt_batch(PICTURES, "fog", 2, seed=3)
    assert np.array_equal(in_chunks, at_once)


def test_no_pictures_may_be_corrupted() -> None:
    assert len(corrupt_batch(PICTURES[:0], "snow", 1, seed=0)) == 0


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("bundled@greyscale", ("bundled", Shift("greyscale", 5))),
        ("folder:/a@b/c", ("folder:/a@b/c", None)),
        ("folder:/a@b/c@snow:1", ("folder:/a@b/c", Shift("snow", 1))),
    ],
    ids=["shifted", "an at in a path", "both"],
)
def test_ids_are_split(id: str, expected: Any) -> None:
    assert parse_dataset_id(id) == expected


def test_a_shifted_image_does_not_depend_on_its_company() -> None:
    dataset = get_dataset("bundled@gaussian_noise:4")
    assert isinstance(dataset, ShiftedDataset)
    together: Any = dataset.arrays([5, 1900, 7])
    _, noisy, _ = together
    assert np.array_equal(noisy, np.asarray(dataset.load(1900)))

    clean: Any = get_dataset("bundled").arrays([1900])
    (expected,) = corrupt_batch(clean, "gaussian_noise", 4, 0, indices=[1900])
    assert np.array_equal(noisy, expected)
    assert not np.array_equal(noisy, clean[0])


def test_a_shifted_dataset_is_the_dataset_but_for_its_pixels() -> None:
    base: Any = get_dataset("bundled")
    light = get_dataset("bundled@gaussian_noise:1")
    strong = get_dataset("bundled@gaussian_noise:4")
    assert strong.id == "bundled@gaussian_noise:4"
    assert strong.keys == base.keys
    assert base.labels.equal(strong.labels)
    fingerprints = {base.fingerprint, light.fingerprint, strong.fingerprint}
    assert len(fingerprints) == 3
