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
        rows = check_features(as_array(features, id), id)
        rows = rows if rows.ndim == 3 else rows[:, None]
        if keys is not None and len(keys) != len(rows):
            raise UserError(
                f"{id} has {len(rows)} features and {len(keys)} names of images"
            )
        keys = [str(row) for row in range(len(rows))] if keys is None else keys
        super().__init__(id, names=names, keys=keys, labels=labels)
        self.rows: FloatArray = rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    def load(self, index: int) -> Image.Image:
        """Raise: there are no images."""
        raise UserError(
            f"{self.id} holds features, no images: {self.keys[index]} is not here"
        )

    def features(self, indices: Sequence[int]) -> FloatArray:
        """Unit features (n, V, E)."""
        return self.rows[np.asarray(indices, dtype=np.int64)]

    def part(self, start: int, stop: int) -> FeatureDataset:
        """Consecutive rows, without their labels."""
        rows = self.rows[start:stop]
        return FeatureDataset(
            self.id, rows, names=self.names, keys=self.keys[start:stop]
        )

    def contents(self) -> str:
        """Hash of the features."""
        return hashlib.blake2b(self.rows.data, digest_size=8).hexdigest()


def feature_dataset(
    given: Any, names: Sequence[str] | None = None, *, labelled: bool = True
) -> FeatureDataset:
    """Features as users have them, as a dataset.

    ``given`` is an array (N, E) or (N, V, E), a file with ``features`` and, if known,
    ``keys``, ``labels`` and ``names``, or a DataFrame with a column of vectors.
    ``names`` is the class list.
    """
    if isinstance(given, FeatureDataset):
        return given
    id, arrays = "features", dict[str, Any]()
    if isinstance(given, str | os.PathLike):
        id, arrays = f"features:{Path(given).as_posix()}", read_arrays(Path(given))
    elif hasattr(given, "columns") and hasattr(given, "index"):
        arrays = _from_frame(given)
    else:
        arrays = {FEATURE_NAMES[0]: as_array(given, id)}
    features = pick_features(arrays, id)
    keys = _listed(arrays, _KEYS)
    labels = _listed(arrays, _LABELS) if labelled else None
    if labels is not None and len(labels) != len(features):
        raise UserError(f"{id} has {len(features)} features and {len(labels)} labels")
    stated = [
        None if value in ("-1", "-1.0", "", "nan", "None") else value.removesuffix(".0")
        for value in labels or [""] * len(features)
    ]
    class_names = _listed(arrays, ("names",))
    class_list, numbers = number_labels(
        stated, class_names if names is None else names, id
    )
    return FeatureDataset(id, features, names=class_list, keys=keys, labels=numbers)


def _listed(arrays: Arrays, wanted: Sequence[str]) -> list[str] | None:
    """The first of some arrays that is there, as texts."""
    name = find_column(list(arrays), wanted)
    return (
        None
        if name is None
        else [str(value) for value in arrays[name].reshape(-1).tolist()]
    )


def _from_frame(frame: Any) -> dict[str, Any]:
    """The columns of a DataFrame, that of vectors as one array."""
    first = frame.iloc[:1]
    vectors = [name for name in frame.columns if any(np.ndim(v) for v in first[name])]
    named = find_column([str(name) for name in vectors], FEATURE_NAMES)
    if named is None and len(vectors) != 1:
        wanted = "a DataFrame of features has rows, and a column of vectors called `features`"
        raise UserError(f"{wanted}; it has {', '.join(map(str, frame.columns))}")
    column = vectors[0] if named is None else named
    rows = [np.asarray(value) for value in frame[column]]
    others = {
        str(n): np.asarray(frame[n].astype(str))
        for n in frame.columns
        if n not in vectors
    }
    if find_column(list(others), _KEYS) is None:
        others["keys"] = np.asarray(frame.index.astype(str))
    return {**others, FEATURE_NAMES[0]: as_array(rows, "the DataFrame")}
