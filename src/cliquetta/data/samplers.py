"""In which order a stream shows its images: index permutations from a numpy generator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def correlated(labels: Indices, concentration: float, generator: np.random.Generator) -> Indices:
    """A permutation in which images of one class come in bursts.

    As is usual for streams that are not i.i.d.: time has as many slots as there are classes, each
    class spreads its images over the slots by a draw from a symmetric Dirichlet distribution, and
    inside a slot classes follow one another. Near 0 a class fills one slot; the larger
    ``concentration``, the more even the slots.
    """
    classes = np.unique(labels)
    slots: list[list[Indices]] = [[] for _ in classes]
    for label in classes:
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(len(classes), concentration))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for slot, piece in zip(slots, np.split(members, cuts), strict=True):
            slot.append(piece)
    shuffled = [[slot[i] for i in generator.permutation(len(slot))] for slot in slots]
    return np.concatenate([piece for slot in shuffled for piece in slot])


def interleaved(lengths: Sequence[int], generator: np.random.Generator) -> Indices:
    """Whose turn it is when sequences of these lengths are mixed at random, each in its order."""
    return generator.permutation(np.repeat(np.arange(len(lengths)), lengths))
