"""Feature caches of fixed size: the K least uncertain features of every class.

Each image is offered to the cache of its predicted class, which holds the K entries of
lowest entropy so far, earlier ones first among equals. Which entry is present at which
moment follows from ranks alone, so that a batch is predicted at once, exactly as one
image after the other would be.

A cache is one tensor ``entropy`` (N, K), ascending per class and infinite where a slot
is empty, and any number of tensors (N, K, ...) beside it, all zero at the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.memory import NON_NEGATIVE, UNIT, Memory, Range

# Tensors (B, ...) that images are remembered with, by name.
Columns = Mapping[str, Tensor]


@dataclass(frozen=True)
class CacheOccupancy:
    """The entries of a cache while a batch of B images arrives one by one."""

    # (B, N, K) bool: entry of the slot at the start, present once image b has arrived.
    old: Tensor
    # (B, B) bool: image e, itself included, is present once image b has arrived.
    new: Tensor
    # (N, K): content of each slot in the end, a row of the old slots and the batch.
    source: Tensor


def simulate_insertions(
    entropy: Tensor, classes: Tensor, offered: Tensor
) -> CacheOccupancy:
    """Follow images of ``classes`` (B,) and entropy ``offered`` (B,); inf for none."""
    N, K = entropy.shape
    device = entropy.device
    time = torch.arange(len(classes), device=device)
    slots = torch.arange(K, device=device, dtype=torch.int32)

    # Entries of the start: image b of their class pushes those of higher entropy back
    # by one. Their rank once b has arrived, (B, N, K).
    is_class = classes[:, None] == torch.arange(N, device=device)  # (B, N)
    is_lower = offered[:, None, None] < entropy
    pushes = is_class[:, :, None] & is_lower
    old_rank = slots + pushes.cumsum(dim=0, dtype=torch.int32)

    # Images: behind the entries of no higher entropy, and behind the images of their
    # class of lower entropy, or the same and earlier. Rank of e once b has arrived,
    # (B, B) with row e and column b.
    is_rival = classes[:, None] == classes
    is_lower = offered < offered[:, None]
    is_equal = offered == offered[:, None]
    is_earlier = time < time[:, None]
    goes_before = is_rival & (is_lower | (is_equal & is_earlier))
    entries_before = entropy[classes] <= offered[:, None]
    first_rank = entries_before.sum(dim=1, dtype=torch.int32)
    new_rank = first_rank[:, None] + goes_before.cumsum(dim=1, dtype=torch.int32)

    # Class and last rank of all candidates: the N K old entries, then the B images.
    labels = torch.arange(N, device=device)
    labels = labels.repeat_interleave(K, output_size=N * K)
    owner = torch.cat([labels, classes])
    last_old_rank = old_rank[-1].flatten()
    last_new_rank = new_rank[:, -1]
    rank = torch.cat([last_old_rank, last_new_rank]).long()

    # In the end, ranks are distinct within a class and cover 0 ... K - 1; the rest
    # shares a slot behind the last.
    slot = torch.where(rank < K, owner * K + rank, N * K)
    source = torch.zeros(N * K + 1, dtype=torch.long, device=device)
    rows = torch.arange(len(owner), device=device)
    source = source.scatter(0, slot, rows)

    has_arrived = time >= time[:, None]
    is_new = (new_rank < K) & has_arrived
    return CacheOccupancy(
        old=(old_rank < K) & entropy.isfinite(),
        new=is_new.T,
        source=source[:-1].view(N, K),
    )


def store(old: Tensor, arrivals: Tensor, occupancy: CacheOccupancy) -> Tensor:
    """Update a cache tensor (N, K, ...) with that of the images (B, ...)."""
    candidates = torch.cat([old.flatten(0, 1), arrivals])
    return candidates[occupancy.source]


def declare(
    memory: Memory, like: Tensor, capacity: int, prefix: str = "", keys: Range = UNIT
) -> None:
    """Enter an empty cache of ``capacity`` features per class; ``like`` (N, E)."""
    N, E = like.shape

    # An empty slot is one of infinite entropy.
    no_entropy = like.new_full((N, capacity), torch.inf)
    no_keys = like.new_zeros(N, capacity, E)

    memory.declare(f"{prefix}entropy", no_entropy, NON_NEGATIVE)
    memory.declare(f"{prefix}keys", no_keys, keys)


def insert(
    memory: Memory, classes: Tensor, entropy: Tensor, columns: Columns, prefix: str = ""
) -> CacheOccupancy:
    """Offer images: ``classes`` (B,), entropy (B,), inf for none, columns (B, ...)."""
    before = memory[f"{prefix}entropy"]
    occupancy = simulate_insertions(before, classes, entropy)

    columns = {**columns, "entropy": entropy}
    for name, arrivals in columns.items():
        path = prefix + name
        memory[path] = store(memory[path], arrivals, occupancy)
    return occupancy


class Affinity(NamedTuple):
    """Weights of a cache's entries as each image arrives, 0 where absent."""

    old: Tensor  # (B, N, K), for the entries at the start.
    new: Tensor  # (B, B), for the images of the batch.


def affinity(
    features: Tensor, keys: Tensor, occupancy: CacheOccupancy, beta: float
) -> Affinity:
    """Compute exp(-beta (1 - f·k)) of arriving images (B, E) with a cache (N, K, E)."""
    # With the entries at the start, (B, N K), and with the images of the batch.
    entries = keys.flatten(0, 1)
    old = _affinity(features @ entries.T, beta)
    old = old.view(occupancy.old.shape)
    new = _affinity(features @ features.T, beta)

    # Only with what is present as each image arrives.
    return Affinity(old * occupancy.old, new * occupancy.new)


def _affinity(cosine: Tensor, beta: float) -> Tensor:
    """Compute exp(-beta (1 - cosine))."""
    return ((cosine - 1) * beta).exp_()
