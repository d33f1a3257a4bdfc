"""The feature cache against lists that are filled one image after the other."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.building.cache import simulate_insertions, store
from tests._helpers.arrays import insert


def random_stream(images: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Classes and entropies of images."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    # coarse, so that ties occur
    tenths = torch.randint(1, 12, (images,), generator=generator)
    entropy = tenths / 10
    # some are not offered
    hidden = torch.rand(images, generator=generator) < 0.2
    return labels, entropy.masked_fill(hidden, torch.inf)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("classes", "capacity"), [(1, 1), (2, 3), (7, 2), (3, 8)])
def test_every_moment_equals_the_lists(seed: int, classes: int, capacity: int) -> None:
    labels, entropy = random_stream(60, classes, seed)
    lists: list[list[tuple[float, int]]] = [[] for _ in range(classes)]
    entropies = torch.full((classes, capacity), torch.inf)
    # which image lies in the slot
    owner = torch.zeros(classes, capacity, dtype=torch.long)

    for rows in torch.arange(60).split([1, 9, 30, 4, 16]):
        occupancy = simulate_insertions(entropies, labels[rows], entropy[rows])

        # after each image the cache holds what was there and what came with the batch
        for moment, row in enumerate(rows.tolist()):
            if entropy[row].isfinite():
                entry = (float(entropy[row]), row)
                insert(lists[int(labels[row])], entry, capacity)
            new = rows[occupancy.new[moment]]
            for label, entries in enumerate(lists):
                kept = occupancy.old[moment, label]
                old = owner[label][kept].tolist()
                new_of_class = new[labels[new] == label].tolist()
                expected = [image for _, image in entries]
                assert sorted(old + new_of_class) == sorted(expected)

        # and after the batch it is sorted
        entropies = store(entropies, entropy[rows], occupancy)
        owner = store(owner, rows, occupancy)
        for label, entries in enumerate(lists):
            filled = len(entries)
            assert owner[label][:filled].tolist() == [image for _, image in entries]
            assert entropies[label].isfinite().sum() == filled
            values = entropies[label][:filled].tolist()
            assert values == sorted(values)
