"""Datasets of features: rows, labels and names from whatever holds them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.features import FeatureDataset, feature_dataset
from cliquetta.errors import UserError

ROWS = np.array([[3.0, 4.0], [0.0, 2.0], [5.0, 0.0]])
UNIT = np.array([[0.6, 0.8], [0.0, 1.0], [1.0, 0.0]], np.float32)[:, None]


def test_rows_are_brought_to_length_one_and_cut_into_parts() -> None:
    data = FeatureDataset("mine", ROWS, names=("a",), keys=("x", "y", "z"))
    np.testing.assert_allclose(data.features([0, 1, 2]), UNIT)
    part = data.part(1, 3)
    assert part.keys == ("y", "z")
    assert part.labels is None
    np.testing.assert_allclose(part.features([1]), UNIT[2:])


def test_features_have_no_images() -> None:
    data = FeatureDataset("mine", ROWS, names=("a",), keys=("x", "y", "z"))
    with pytest.raises(UserError, match="no images"):
        data.load(0)


def test_a_name_for_every_row_is_needed() -> None:
    with pytest.raises(UserError, match="2 names"):
        FeatureDataset("mine", ROWS, names=("a",), keys=("x", "y"))


@pytest.mark.parametrize(
    "stated",
    [["dog", "", "cat"], ["1", "-1", "0"], [1.0, -1.0, 0.0]],
    ids=["names", "numbers as texts", "numbers"],
)
def test_labels_are_names_or_numbers(stated: Any, tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    np.savez(
        path,
        embeddings=ROWS,
        labels=np.array(stated),
        paths=np.array(["a", "b", "c"]),
    )
    data = feature_dataset(path, ("cat", "dog"))
    assert data.id == f"features:{path.as_posix()}"
    assert data.keys == ("a", "b", "c")
    assert data.labels.tolist() == [1, UNKNOWN, 0]
    assert feature_dataset(path, ("cat", "dog"), labelled=False).labels is None


def test_a_frame_has_a_column_of_vectors() -> None:
    frame = pd.DataFrame(
        {"class": ["b", "a", "b"], "vector": list(ROWS)}, index=["p", "q", "r"]
    )
    data = feature_dataset(frame)
    assert (data.names, data.keys) == (("a", "b"), ("p", "q", "r"))
    assert data.labels.tolist() == [1, 0, 1]
    with pytest.raises(UserError, match="vectors"):
        feature_dataset(frame[["class"]])
