"""The feature cache against lists that are filled one image after the other."""

import math

import pytest
import torch
from torch import Tensor

from cliquetta.methods.building.cache import simulate_insertions, store

Entry = tuple[float, int]


class ListCache:
    """Entries per class, sorted by entropy; a full list gives up its last for a lower one."""

    def __init__(self, classes: int, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[list[Entry]] = [[] for _ in range(classes)]

    def offer(self, label: int, entropy: float, image: int) -> None:
        if math.isinf(entropy):
            return
        entries = self.entries[label]
        if len(entries) < self.capacity:
            entries.append((entropy, image))
        elif entropy < entries[-1][0]:
            entries[-1] = (entropy, image)
        entries.sort(key=lambda entry: entry[0])

    def images(self, label: int) -> list[int]:
        return [image for _, image in self.entries[label]]


def random_stream(images: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Classes and entropies; the latter coarse, so that ties occur, and some not offered."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    entropy = torch.randint(1, 12, (images,), generator=generator) / 10
    hidden = torch.rand(images, generator=generator) < 0.2
    return labels, entropy.masked_fill(hidden, torch.inf)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("classes", "capacity"), [(1, 1), (2, 3), (7, 2), (3, 8)])
def test_every_moment_equals_the_lists(seed: int, classes: int, capacity: int) -> None:
    labels, entropy = random_stream(60, classes, seed)
    lists = ListCache(classes, capacity)
    entropies = torch.full((classes, capacity), torch.inf)
    owner = torch.zeros(classes, capacity, dtype=torch.long)  # which image lies in the slot
    for rows in torch.arange(60).split([1, 9, 30, 4, 16]):
        occupancy = simulate_insertions(entropies, labels[rows], entropy[rows])
        for moment, row in enumerate(rows.tolist()):
            lists.offer(int(labels[row]), float(entropy[row]), row)
            for label in range(classes):
                old = owner[label][occupancy.old[moment, label]].tolist()
                new = [
                    int(rows[e])
                    for e in occupancy.new[moment].nonzero()[:, 0]
                    if labels[rows[e]] == label
                ]
                assert sorted(old + new) == sorted(lists.images(label))
        entropies = store(entropies, entropy[rows], occupancy)
        owner = store(owner, rows, occupancy)
        for label in range(classes):
            count = len(lists.images(label))
            assert owner[label][:count].tolist() == lists.images(label)
            assert entropies[label].isfinite().sum() == count
            assert (entropies[label].diff()[: max(0, count - 1)] >= 0).all()
