"""Supportive cliques: images of a batch that belong together (Eq. 1-3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Cliques:
    """The m cliques of a batch, in mining order; all tensors are on the CPU.

    A clique is a class with a member set. Cliques of several classes may have equal
    members: such a set is stored, and later learned, once.
    """

    classes: Tensor  # (m,): the class i of every clique C_ik.
    set_of: Tensor  # (m,): its members, as an index into `sets`.
    sets: Tensor  # (U, b) bool: the distinct member sets.

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def members(self) -> Tensor:
        """Members (m, b) bool of every clique."""
        return self.sets.index_select(0, self.set_of)


def top_classes(logits: Tensor, k: int) -> Tensor:
    """Rank the ``k`` best classes (b, k); ties go to the lower class (Eq. 1)."""
    k = min(k, logits.shape[1])
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]


def similar_images(features: Tensor, threshold: float) -> Tensor:
    """Find the pairs (b, b) of unit features (b, E) with a cosine above t (Eq. 2-3)."""
    return features @ features.T > threshold


def mine_cliques(
    similar: Tensor, top: Tensor, *, full_sets: bool = False, repeats: bool = False
) -> Cliques:
    """Mine the row neighbourhoods inside every candidate set (Eq. 1-3).

    Args:
        similar: Pairs of similar images (b, b) bool, on the CPU.
        top: The k best classes (b, k) of every image, on the CPU.
        full_sets: Put every candidate set in front of its rows.
        repeats: Keep equal rows of one set.

    Returns:
        The cliques, classes ascending, rows of a class in batch order.

    """
    # On the CPU plain indexing would wake all threads, which `index_select` does not.
    b, k = top.shape

    # Eq. 1: the candidate sets S_i (I, b), one for each of the I classes that occur.
    image = torch.arange(b).repeat_interleave(k)
    label, order = top.reshape(-1).sort(stable=True)
    image = image[order]
    present, set_index = torch.unique_consecutive(label, return_inverse=True)
    candidates = torch.zeros(len(present), b, dtype=torch.bool)
    candidates[set_index, image] = True

    # Eq. 2-3: the row of every image in each of its sets (b k, b); one member is none.
    own_set = candidates.index_select(0, set_index)
    rows = similar.index_select(0, image) & own_set
    is_clique = rows.sum(dim=1) > 1
    if full_sets:
        is_clique &= (rows != own_set).any(dim=1)
    valid = is_clique.nonzero()[:, 0]
    rows = rows.index_select(0, valid)
    classes = label[valid]
    if full_sets:
        rows = torch.cat([candidates, rows])
        classes, order = torch.cat([present, classes]).sort(stable=True)
        rows = rows.index_select(0, order)

    # "Duplicate cliques are removed": equal members of one class.
    if not repeats:
        keys = list(zip(classes.tolist(), _packed(rows), strict=True))
        first, _ = _first_occurrences(keys)
        rows = rows.index_select(0, first)
        classes = classes[first]

    # Equal members of several classes are learned once.
    first, set_of = _first_occurrences(_packed(rows))
    return Cliques(classes, set_of, sets=rows.index_select(0, first))


def _packed(rows: Tensor) -> list[bytes]:
    """Pack boolean rows (m, b) into bytes: equal rows, equal bytes."""
    return [row.tobytes() for row in np.packbits(rows.numpy(), axis=1)]


def _first_occurrences(keys: Sequence[object]) -> tuple[Tensor, Tensor]:
    """Number the distinct keys: the first index of each, every key's number."""
    first: dict[object, int] = {}
    rank: dict[object, int] = {}
    which = []
    for index, key in enumerate(keys):
        first.setdefault(key, index)
        rank.setdefault(key, len(rank))
        which.append(rank[key])
    return (
        torch.tensor(list(first.values()), dtype=torch.long),
        torch.tensor(which, dtype=torch.long),
    )
