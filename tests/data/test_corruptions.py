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
    assert len(ALL) == 18 and ALL[15:] == ["greyscale", "edges", "double_exposure"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (33, 20), (50, 100)])
def test_any_size_keeps_shape_and_input(name: str, shape: tuple[int, ...]) -> None:
    image = generator(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    before = image.copy()
    for severity in (1, 5):
        out = corrupt_batch(image[None], name, severity, seed=0)[0]
        assert out.shape == image.shape and out.dtype == np.uint8
    assert np.array_equal(image, before)


@pytest.mark.parametrize("name", ALL)
def test_order_and_company_do_not_matter(name: str) -> None:
    together = corrupt_batch(PICTURES, name, 3, seed=5)
    order = generator(2).permutation(len(PICTURES))[:7]
    part = corrupt_batch(PICTURES[order], name, 3, seed=5, indices=order.tolist())
    assert (
        np.abs(part.astype(int) - together[order]).max() <= 1
    )  # sums in another order
    assert (part == together[order]).mean() > 0.999
    single = corrupt_batch(PICTURES[4:5], name, 3, seed=5, indices=[4])[0]
    assert np.abs(single.astype(int) - together[4]).max() <= 1


# By their published constants some do not move away from the original step by step:
# glass blur (3 and 5 blur more than the one before, which removes noise), elastic (less
# shake, more ripples) and frost (from 3 on, less of the picture rather than more ice).
@pytest.mark.parametrize(
    "name", sorted(set(ALL) - {"glass_blur", "elastic_transform", "frost"})
)
def test_distance_grows_with_severity(name: str) -> None:
    corrupted = (
        corrupt_batch(PICTURES, name, s, seed=0).astype(float) for s in SEVERITIES
    )
    far = [
        float(np.sqrt(((c - PICTURES) ** 2).mean(axis=(1, 2, 3))).mean())
        for c in corrupted
    ]
    assert far[0] > 0.5
    assert all(b > a - 0.05 for a, b in pairwise(far)), far
    assert far[4] > 1.4 * far[0]


def test_constants_follow_the_size() -> None:
    noise = CORRUPTIONS["gaussian_noise"]
    assert noise.constants(1, 16) == noise.constants(1, 32) == (0.04,)
    assert noise.constants(1, 224) == noise.constants(1, 500) == (0.08,)
    middle = round((32 * 224) ** 0.5)
    assert noise.constants(1, middle)[0] == pytest.approx(0.06, abs=1e-3)


def test_names_severities_and_pictures_that_cannot_be() -> None:
    with pytest.raises(UnknownNameError):
        corrupt_batch(PICTURES, "gausian_noise", 1, seed=0)
    for severity in (0, 6, -1):
        with pytest.raises(ValueError, match="1, 2, 3"):
            corrupt_batch(PICTURES[:1], "fog", severity, seed=0)
    refused: list[Any] = [PICTURES / 255.0, PICTURES[..., :1], PICTURES[0]]
    for wrong in refused:
        with pytest.raises(ValueError, match="RGB"):
            corrupt_batch(wrong, "fog", 1, seed=0)
    with pytest.raises(ValueError, match="indices"):
        corrupt_batch(PICTURES, "fog", 1, seed=0, indices=[1, 2])


def test_large_batches_are_worked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = corrupt_batch(PICTURES, "fog", 2, seed=3)
    monkeypatch.setattr("cliquetta.data.corruptions._CHUNK", 4 * 32 * 32 * 3)
    assert np.array_equal(corrupt_batch(PICTURES, "fog", 2, seed=3), at_once)
    assert len(corrupt_batch(PICTURES[:0], "snow", 1, seed=0)) == 0


def test_ids_are_split() -> None:
    for id, expected in {
        "bundled@greyscale": ("bundled", Shift("greyscale", 5)),
        "folder:/a@b/c": ("folder:/a@b/c", None),
        "folder:/a@b/c@snow:1": ("folder:/a@b/c", Shift("snow", 1)),
    }.items():
        assert parse_dataset_id(id) == expected


def test_a_shifted_image_does_not_depend_on_its_company() -> None:
    dataset, base = get_dataset("bundled@gaussian_noise:4"), get_dataset("bundled")
    clean = base.arrays([1900])
    assert (
        isinstance(dataset, ShiftedDataset) and dataset.id == "bundled@gaussian_noise:4"
    )
    together = dataset.arrays([5, 1900, 7])[1]
    assert np.array_equal(together, np.asarray(dataset.load(1900)))
    direct = corrupt_batch(clean, "gaussian_noise", 4, 0, indices=[1900])[0]  # type: ignore[arg-type]
    assert np.array_equal(together, direct) and not np.array_equal(together, clean[0])
    assert dataset.labels.equal(base.labels) and dataset.keys == base.keys  # type: ignore[arg-type]
    light = get_dataset("bundled@gaussian_noise:1")
    assert len({base.fingerprint, light.fingerprint, dataset.fingerprint}) == 3
