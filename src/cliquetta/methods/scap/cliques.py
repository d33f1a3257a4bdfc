"""Supportive cliques: which images of a batch belong together, for which class (Eq. 1-3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Cliques:
    """All cliques of a batch, in mining order; index tensors on the CPU.

    Equal member sets are learned once: clique g has class ``classes[g]`` and members
    ``sets[set_of[g]]`` out of the distinct ones (U, b).
    """

    classes: Tensor
    set_of: Tensor
    sets: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def members(self) -> Tensor:
        """Members (m, b) of every clique."""
        return self.sets.index_select(0, self.set_of)


def top_classes(logits: Tensor, k: int) -> Tensor:
    """The ``k`` best classes (b, k) of every image, best first; ties to the lower class (Eq. 1)."""
    k = min(k, logits.shape[1])
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]


def similar_images(features: Tensor, threshold: float) -> Tensor:
    """Pairs of unit features (b, E) more similar than ``threshold``, (b, b) bool (Eq. 2)."""
    return features @ features.T > threshold


def mine_cliques(
    similar: Tensor, top: Tensor, *, full_sets: bool = False, repeats: bool = False
) -> Cliques:
    """Row neighbourhoods inside every candidate set, without singletons and repeats (Eq. 3).

    ``similar`` (b, b) and ``top`` (b, k) are on the CPU, where plain indexing instead
    of ``index_select`` would wake all threads. Classes ascend, rows are in batch order.
    ``full_sets`` puts every candidate set in front of its rows, ``repeats`` keeps equal
    rows.
    """
    b, k = top.shape
    image = torch.arange(b).repeat_interleave(k)
    label, order = top.reshape(-1).sort(stable=True)
    image = image[order]
    present, dense = torch.unique_consecutive(label, return_inverse=True)
    candidates = torch.zeros(len(present), b, dtype=torch.bool)
    candidates[dense, image] = True

    sets = candidates.index_select(0, dense)
    rows = similar.index_select(0, image) & sets
    keep = rows.sum(dim=1) > 1
    if full_sets:
        keep &= (rows != sets).any(dim=1)
    keep = keep.nonzero()[:, 0]
    rows, classes = rows.index_select(0, keep), label[keep]
    if full_sets:
        rows = torch.cat([candidates, rows])
        classes, order = torch.cat([present, classes]).sort(stable=True)
        rows = rows.index_select(0, order)
    if not repeats:
        first, _ = _first_occurrences(
            list(zip(classes.tolist(), _packed(rows), strict=True))
        )
        rows, classes = rows.index_select(0, first), classes[first]
    first, set_of = _first_occurrences(_packed(rows))
    return Cliques(classes, set_of, rows.index_select(0, first))


def _packed(rows: Tensor) -> list[bytes]:
    """Boolean rows (m, b) as bytes: equal rows, equal bytes."""
    return [row.tobytes() for row in np.packbits(rows.numpy(), axis=1)]


def _first_occurrences(keys: Sequence[object]) -> tuple[Tensor, Tensor]:
    """First index of each distinct key, ascending, and which one every key is."""
    first: dict[object, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    rank = {key: number for number, key in enumerate(first)}
    which = [rank[key] for key in keys]
    return torch.tensor([*first.values()], dtype=torch.long), torch.tensor(
        which, dtype=torch.long
    )
