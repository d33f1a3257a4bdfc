"""Feature caches of fixed size: of every class, the K least uncertain features seen so far.

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

Columns = Mapping[
    str, Tensor
]  # Tensors (B, ...) that images are remembered with, by name.


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
    """Follow images of ``classes`` (B,) with entropy ``offered`` (B,), infinite for none."""
    N, K = entropy.shape
    time = torch.arange(len(classes), device=entropy.device)
    slots = torch.arange(K, device=entropy.device, dtype=torch.int32)

    own = classes[:, None] == torch.arange(N, device=entropy.device)  # (B, N)
    pushes = own[:, :, None] & (
        offered[:, None, None] < entropy
    )  # image b goes before the entry
    old_rank = slots + pushes.cumsum(dim=0, dtype=torch.int32)  # (B, N, K)

    rival = classes[:, None] == classes  # (B, B), row e, column j
    lower = (offered < offered[:, None]) | (
        (offered == offered[:, None]) & (time < time[:, None])
    )
    ahead = (entropy[classes] <= offered[:, None]).sum(dim=1, dtype=torch.int32)
    new_rank = ahead[:, None] + (rival & lower).cumsum(
        dim=1, dtype=torch.int32
    )  # (e, b)

    # in the end, ranks are distinct within a class and cover 0 ... K - 1; the rest
    # shares a slot
    labels = torch.arange(N, device=entropy.device).repeat_interleave(
        K, output_size=N * K
    )
    owner = torch.cat([labels, classes])
    rank = torch.cat([old_rank[-1].flatten(), new_rank[:, -1]]).long()
    slot = torch.where(rank < K, owner * K + rank, N * K)
    source = torch.zeros(N * K + 1, dtype=torch.long, device=entropy.device)
    source = source.scatter(0, slot, torch.arange(len(owner), device=entropy.device))
    return CacheOccupancy(
        old=(old_rank < K) & entropy.isfinite(),
        new=((new_rank < K) & (time >= time[:, None])).T,
        source=source[:-1].view(N, K),
    )


def store(old: Tensor, arrivals: Tensor, occupancy: CacheOccupancy) -> Tensor:
    """A cache tensor (N, K, ...) after the batch, from that before and the images' own (B, ...)."""
    return torch.cat([old.flatten(0, 1), arrivals])[occupancy.source]


def declare(
    memory: Memory, like: Tensor, capacity: int, prefix: str = "", keys: Range = UNIT
) -> None:
    """Enter an empty cache of features, as many per class as ``capacity``; ``like`` (N, E)."""
    N, E = like.shape
    memory.declare(
        f"{prefix}entropy", like.new_full((N, capacity), torch.inf), NON_NEGATIVE
    )
    memory.declare(f"{prefix}keys", like.new_zeros(N, capacity, E), keys)


def insert(
    memory: Memory, classes: Tensor, entropy: Tensor, columns: Columns, prefix: str = ""
) -> CacheOccupancy:
    """Offer images of ``classes`` (B,), entropy (B,) infinite for none, and columns (B, ...)."""
    occupancy = simulate_insertions(memory[f"{prefix}entropy"], classes, entropy)
    for name, arrivals in {**columns, "entropy": entropy}.items():
        memory[prefix + name] = store(memory[prefix + name], arrivals, occupancy)
    return occupancy


class Affinity(NamedTuple):
    """Weights of the entries of a cache as each image of a batch arrives, 0 where absent."""

    old: Tensor  # (B, N, K), for the entries at the start.
    new: Tensor  # (B, B), for the images of the batch.


def affinity(
    features: Tensor, keys: Tensor, occupancy: CacheOccupancy, beta: float
) -> Affinity:
    """exp(-beta (1 - f·k)) of the arriving images (B, E) with what the cache (N, K, E) holds."""
    old = (
        ((features @ keys.flatten(0, 1).T - 1) * beta).exp_().view(occupancy.old.shape)
    )
    new = ((features @ features.T - 1) * beta).exp_()
    return Affinity(old * occupancy.old, new * occupancy.new)
