"""What a method says about its answer, as JSON of bounded size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_NUMBERS = 512
"""Tensors and lists up to this many entries are sent whole."""
_DEEPEST = 4


def summarise(value: Any, depth: int = 0) -> Any:
    """Plain values as they are; tensors whole if small, else shape, mean and extremes.

    Numbers that JSON does not know (NaN, infinity) become ``None``.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return _tensor(value.detach())
    if depth >= _DEEPEST:
        return type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return summarise(fields, depth)
    if isinstance(value, Mapping):
        return {str(key): summarise(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        whole = [summarise(item, depth + 1) for item in items[:_NUMBERS]]
        return whole if len(items) <= _NUMBERS else {"length": len(items), "first": whole}
    return type(value).__name__


def _tensor(value: Tensor) -> Any:
    if value.numel() <= _NUMBERS:
        return _plain(value.cpu().tolist())
    numbers = value.float()
    return {
        "shape": list(value.shape),
        "mean": summarise(float(numbers.mean())),
        "min": summarise(float(numbers.min())),
        "max": summarise(float(numbers.max())),
    }


def _plain(value: Any) -> Any:
    """Nested lists of numbers with ``None`` for what is no number."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return summarise(value)
