"""Shifts after an id, and datasets under them."""

from __future__ import annotations

import numpy as np
import pytest

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.corruptions import corrupt_batch
from cliquetta.data.shifts import Shift, ShiftedDataset, parse_dataset_id


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("bundled", ("bundled", None)),
        ("bundled@fog:3", ("bundled", Shift("fog", 3))),
        ("bundled@greyscale", ("bundled", Shift("greyscale", 5))),
        ("folder:/a@b/c", ("folder:/a@b/c", None)),
        ("folder:/a@b/c@snow:1", ("folder:/a@b/c", Shift("snow", 1))),
    ],
)
def test_ids_are_split(id: str, expected: tuple[str, Shift | None]) -> None:
    assert parse_dataset_id(id) == expected


def test_a_shifted_image_does_not_depend_on_its_company() -> None:
    dataset = get_dataset("bundled@gaussian_noise:4")
    assert isinstance(dataset, ShiftedDataset)
    assert dataset.id == "bundled@gaussian_noise:4"
    together = dataset.arrays([5, 1900, 7])
    assert together is not None
    assert np.array_equal(together[1], dataset.arrays([1900])[0])
    assert np.array_equal(together[1], np.asarray(dataset.load(1900)))
    clean = get_dataset("bundled").arrays([1900])
    assert np.array_equal(
        together[1],
        corrupt_batch(clean, "gaussian_noise", 4, 0, indices=[1900])[0],  # type: ignore[arg-type]
    )
    assert not np.array_equal(together[1], clean[0])


def test_a_shift_changes_the_fingerprint_and_keeps_the_labels() -> None:
    clean, light, strong = (get_dataset(id) for id in ("bundled", "bundled@fog:1", "bundled@fog:2"))
    assert len({clean.fingerprint, light.fingerprint, strong.fingerprint}) == 3
    assert clean.labels.equal(strong.labels)  # type: ignore[arg-type]
    assert clean.keys == strong.keys
