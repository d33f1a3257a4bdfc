"""Datasets of features instead of images: whatever an embedding API returned."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from cliquetta.data.dataset import Dataset
from cliquetta.data.files import LABEL_COLUMNS, PATH_COLUMNS, find_column, number_labels
from cliquetta.errors import UserError
from cliquetta.prompts.features import (
    FEATURE_NAMES,
    Arrays,
    FloatArray,
    as_array,
    check_features,
    pick_features,
    read_arrays,
)

if TYPE_CHECKING:  # arguments are checked before torch is imported
    from torch import Tensor

_KEYS = ("keys", "paths", *PATH_COLUMNS, "key", "id")
_LABELS = ("labels", *LABEL_COLUMNS)
# Texts that stand for a missing label.
_NO_LABEL = ("-1", "-1.0", "", "nan", "None")


class FeatureDataset(Dataset):
    """Features of images that are elsewhere; rows are brought to length one.

    Args:
        id: A name for records.
        features: (N, E), or (N, V, E) of V views of each image, the plain one first.
        names: The class list.
        keys: Names of the images; their numbers by default.
        labels: Indices into ``names``, if known.

    Raises:
        UserError: A row is zero or not finite, or numbers of rows differ.

    """

    def __init__(
        self,
        id: str,
        features: Any,
        *,
        names: Sequence[str],
        keys: Sequence[str] | None = None,
        labels: Sequence[int] | Tensor | None = None,
    ) -> None:
        # (N, V, E), also where there is one view.
        rows = check_features(as_array(features, id), id)
        if rows.ndim == 2:
            rows = rows[:, None]
        if keys is None:
            keys = [str(row) for row in range(len(rows))]
        if len(keys) != len(rows):
            raise UserError(
                f"{id} has {len(rows)} features and {len(keys)} names of images"
            )

        super().__init__(id, names=names, keys=keys, labels=labels)
        lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
        self.rows: FloatArray = rows / lengths

    def load(self, index: int) -> Image.Image:
        """Raise: there are no images."""
        raise UserError(
            f"{self.id} holds features, no images: {self.keys[index]} is not here"
        )

    def features(self, indices: Sequence[int]) -> FloatArray:
        """Return unit features (n, V, E)."""
        return self.rows[np.asarray(indices, dtype=np.int64)]

    def part(self, start: int, stop: int) -> FeatureDataset:
        """Return consecutive rows, without their labels."""
        rows = self.rows[start:stop]
        return FeatureDataset(
            self.id, rows, names=self.names, keys=self.keys[start:stop]
        )

    def contents(self) -> str:
        """Hash the features."""
        return hashlib.blake2b(self.rows.data, digest_size=8).hexdigest()


def feature_dataset(
    source: Any, names: Sequence[str] | None = None, *, labelled: bool = True
) -> FeatureDataset:
    """Make a dataset of features as users have them.

    ``source`` is an array (N, E) or (N, V, E), a file with ``features`` and, if known,
    ``keys``, ``labels`` and ``names``, or a DataFrame with a column of vectors.
    ``names`` is the class list.
    """
    if isinstance(source, FeatureDataset):
        return source
    id = "features"
    arrays: Arrays
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        id = f"features:{path.as_posix()}"
        arrays = read_arrays(path)
    elif hasattr(source, "columns") and hasattr(source, "index"):
        arrays = _from_frame(source)
    else:
        arrays = {FEATURE_NAMES[0]: as_array(source, id)}

    features = pick_features(arrays, id)
    labels = _find_texts(arrays, _LABELS) if labelled else None
    if labels is not None and len(labels) != len(features):
        raise UserError(f"{id} has {len(features)} features and {len(labels)} labels")

    if names is None:
        names = _find_texts(arrays, ("names",))
    stated: list[str | None] = [None] * len(features)
    if labels is not None:
        # Arrays of floats write whole numbers with a decimal.
        stated = [
            None if text in _NO_LABEL else text.removesuffix(".0") for text in labels
        ]

    class_list, numbers = number_labels(stated, names, id)
    return FeatureDataset(
        id,
        features,
        names=class_list,
        keys=_find_texts(arrays, _KEYS),
        labels=numbers,
    )


def _find_texts(arrays: Arrays, wanted: Sequence[str]) -> list[str] | None:
    """Return the first of some arrays that is there, as texts."""
    name = find_column(list(arrays), wanted)
    if name is None:
        return None
    return [str(value) for value in arrays[name].reshape(-1).tolist()]


def _from_frame(frame: Any) -> dict[str, Any]:
    """Return the columns of a DataFrame, that of vectors as one array."""
    first = frame.iloc[:1]
    vectors = []
    arrays: dict[str, Any] = {}
    for name in frame.columns:
        if any(np.ndim(value) for value in first[name]):
            vectors.append(name)
        else:
            arrays[str(name)] = np.asarray(frame[name].astype(str))

    # One column holds the features: the only one of vectors, or that with the name.
    column = find_column([str(name) for name in vectors], FEATURE_NAMES)
    if column is None:
        if len(vectors) != 1:
            raise UserError(
                "a DataFrame of features has rows, and a column of vectors called "
                f"`features`; it has {', '.join(map(str, frame.columns))}"
            )
        column = vectors[0]
    if find_column(list(arrays), _KEYS) is None:
        arrays["keys"] = np.asarray(frame.index.astype(str))

    rows = [np.asarray(value) for value in frame[column]]
    arrays[FEATURE_NAMES[0]] = as_array(rows, "the DataFrame")
    return arrays
