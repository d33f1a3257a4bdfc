"""Features that were encoded elsewhere: of images, and of class names."""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from cliquetta.errors import UserError, look_up
from cliquetta.prompts.classes import ClassPrompts, as_prompts

if TYPE_CHECKING:  # arguments are checked before torch is imported
    from torch import Tensor

FEATURE_FILES = (".npy", ".npz", ".safetensors")
FEATURE_NAMES = ("features", "embeddings", "feature", "embedding")
"""Names of the array of features in a file of several."""
Arrays = Mapping[str, npt.NDArray[Any]]
FloatArray = npt.NDArray[np.float32]


def read_arrays(path: Path | str) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of a file (``features`` of ``.npy``) without running code."""
    path = Path(path).expanduser()
    if not path.is_file() or path.suffix not in FEATURE_FILES:
        what = f"{path} is none" if path.exists() else f"there is no {path}"
        raise UserError(
            f"features are read from {', '.join(FEATURE_FILES)} files; {what}"
        )
    try:
        if path.suffix == ".npy":
            return {FEATURE_NAMES[0]: np.load(path, allow_pickle=False)}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        with safe_open(path, framework="pt") as file:
            arrays = {name: _numpy(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
            header = file.metadata() or {}
        header.pop("format", "")  # an entry of many libraries, which is no JSON
        lists = {name: np.asarray(json.loads(text)) for name, text in header.items()}
        return lists | arrays
    except (ValueError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise UserError(
            f"{path} is not a readable {path.suffix} file ({error})"
        ) from None


def pick_features(arrays: Arrays, source: str) -> FloatArray:
    """Pick the features among arrays: by name, or the only one that fits."""
    named = [arrays[name] for name in FEATURE_NAMES if name in arrays]

    # By another name: the only table of numbers.
    tables = [array for array in arrays.values() if array.ndim > 1]
    numeric = [array for array in tables if np.issubdtype(array.dtype, np.number)]
    if not named and len(numeric) != 1:
        shapes = [f"{name} {value.shape}" for name, value in arrays.items()]
        raise UserError(
            f"{source} holds no text features or image features: an array `features` or "
            f"`embeddings` (rows, width) is needed, it holds "
            f"{', '.join(shapes) or 'nothing'}"
        )
    return check_features((named or numeric)[0], source)


def check_features(array: npt.NDArray[Any], source: str) -> FloatArray:
    """Check features (N, E), or (N, V, E) of V views, and make them float32."""
    is_numeric = np.issubdtype(array.dtype, np.number)
    if array.ndim not in (2, 3) or 0 in array.shape or not is_numeric:
        raise UserError(
            f"features are numbers of shape (rows, width), or (rows, views, width); {source} "
            f"holds {array.shape} {array.dtype}"
        )

    features = np.ascontiguousarray(array, dtype=np.float32)
    _refuse_rows(~np.isfinite(features), "not finite (NaN or infinity)", source)
    has_direction: Any = (features != 0).any(axis=-1)
    _refuse_rows(~has_direction, "all zeros", source)
    return features


def _refuse_rows(marks: npt.NDArray[np.bool_], what: str, source: str) -> None:
    """Refuse features if any mark (N, ...) of a row is set."""
    rows = len(marks)
    is_bad = marks.reshape(rows, -1).any(axis=1)
    if is_bad.any():
        raise UserError(
            f"{source} has {int(is_bad.sum())} of {rows} rows that are {what}, the "
            f"first is row {int(is_bad.argmax())}: encode these again or leave them out"
        )


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """Features of class names, and the scale of the model that made them."""

    features: FloatArray  # (M, E)
    names: tuple[str, ...] | None
    """Classes of the rows; ``None``: in the order of the class list."""
    scale: float  # Factor that turns cosines into logits.
    source: str

    @property
    def width(self) -> int:
        """Entries of a feature."""
        return int(self.features.shape[1])

    def select(self, names: Sequence[str]) -> Tensor:
        """Select the rows (N, E) of some classes, in their order.

        The class list of the rows may hold a name twice, as ImageNet's does, if it is
        asked for as a whole.
        """
        import torch

        # All rows as they are, or those of the names.
        rows = list(range(len(self.features)))
        if self.names is not None and tuple(names) != self.names:
            row_of = {name: row for row, name in enumerate(self.names)}
            rows = [look_up(f"class of {self.source}", name, row_of) for name in names]
            self._refuse_repeated(names)
        elif self.names is None and len(rows) != len(names):
            raise UserError(
                f"{self.source} holds {len(rows)} text features without names for {len(names)} "
                "class names: give one for each, in their order"
            )
        return torch.from_numpy(self.features[rows])

    def _refuse_repeated(self, names: Sequence[str]) -> None:
        """Refuse names that stand for several rows."""
        assert self.names is not None
        count = Counter(self.names)
        repeated = [name for name in names if count[name] > 1]
        if repeated:
            raise UserError(
                f"{self.source} holds {count[repeated[0]]} text features of {repeated[0]!r}: ask "
                "for all of its classes in the order of its rows, or give each name once"
            )

    def prompts(self, classes: ClassPrompts | Sequence[str] | None) -> ClassPrompts:
        """Build the class list with these features; by default all their names."""
        if classes is None and self.names is None:
            message = f"{self.source} holds no class names: give them in the order of its rows"
            raise UserError(message)
        if classes is None:
            prompts = ClassPrompts(self.names or (), allow_duplicates=True)
        else:
            prompts = as_prompts(classes)
        return replace(prompts, features=self.select(prompts.names))


def as_text_features(value: Any) -> TextFeatures:
    """Read features of class names from an array or tensor (N, E), or from a file.

    A file holds ``embeddings`` or ``features``; ``names`` (N,), the classes of its
    rows, which may then come in any order; and ``scale``, what cosines are multiplied
    by (100, as CLIP's, unless stated).
    """
    # An array says neither names nor a scale; a file may.
    names = None
    scale = 100.0
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        source = path.name
        arrays = read_arrays(path)
        features = pick_features(arrays, source)
        if "names" in arrays:
            names = tuple(str(name) for name in arrays["names"])
        if "scale" in arrays:
            scale = float(arrays["scale"])
    else:
        source = "text_features"
        features = check_features(as_array(value, source), source)
    if features.ndim != 2 or (names is not None and len(names) != len(features)):
        raise UserError(f"{source} must hold one text feature per name")
    if not 0 < scale < float("inf"):
        raise UserError(f"the scale of cosines is a number above 0, got {scale}")
    return TextFeatures(features, names, scale, source)


def as_array(value: Any, source: str) -> npt.NDArray[Any]:
    """Make an array of numbers from an array, a tensor or a list of vectors."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return _numpy(value)
    try:
        return np.asarray(value)
    except ValueError:  # vectors of different lengths
        raise UserError(f"the rows of {source} differ in width") from None


def _numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Turn a tensor into an array; numpy has no bfloat16."""
    import torch

    plain = tensor.detach().cpu()
    if plain.dtype == torch.bfloat16:
        plain = plain.float()
    return plain.numpy()
