"""Nested tuples of tensors by the names of their fields.

A tree is a tensor, a tuple of trees, or anything else, which is a constant. Named
tuples give the names of their fields, others numbers, so that a tensor has a path such
as ``domains.0.key.mean``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class ByPath(Protocol):
    """Tensors by path: a dictionary, or the memory of a method."""

    def __getitem__(self, path: str, /) -> Tensor: ...


def items(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Path and value of every tensor, depth first."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, tuple):
        for own_path, part in _parts(tree, path):
            yield from items(part, own_path)


def flatten(tree: Any) -> dict[str, Tensor]:
    """Every tensor by its path."""
    return dict(items(tree))


def unflatten(like: T, values: ByPath, path: str = "") -> T:
    """A tree built like another, with other tensors.

    >>> import torch
    >>> unflatten(((torch.zeros(1), "constant"),), {"0.0": torch.ones(1)})
    ((tensor([1.]), 'constant'),)
    """
    tree: Any = like
    if isinstance(like, Tensor):
        tree = values[path]
    elif isinstance(like, tuple):
        parts = (
            unflatten(part, values, own_path) for own_path, part in _parts(like, path)
        )
        tree = type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    return tree  # type: ignore[no-any-return]


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """The tree with ``function`` of every tensor instead of it."""
    values: Mapping[str, Tensor] = {
        path: function(value) for path, value in items(tree)
    }
    return unflatten(tree, values)


def _parts(tree: tuple[Any, ...], path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of every part of a tuple that has a ``path`` itself."""
    for name, part in zip(
        getattr(tree, "_fields", range(len(tree))), tree, strict=True
    ):
        yield f"{path}.{name}" if path else str(name), part
