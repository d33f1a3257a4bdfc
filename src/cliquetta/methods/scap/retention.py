"""Retention: a running mean of text prompts, and a cache of visual prompts per class.

Every class has pairs of key (mean feature of a clique) and value (its prompt). When
there are more than L, keys are propagated over their own graph and the closest pair is
fused. ``C`` classes are treated at once, with ``n`` keys each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.model.cuda import Replayed, send


@dataclass(frozen=True)
class Cache:
    """Visual prompts of all classes, R: fixed tensors with one spare slot per class."""

    keys: Tensor  # (N, L + 1, E).
    values: Tensor  # (N, L + 1, V), a prompt in one row.
    count: Tensor  # (N,), pairs held; on the CPU, where the bookkeeping is done.


class Round(NamedTuple):
    """Cliques that enter the cache together: n of them, none two of one class."""

    classes: Tensor  # (n,).
    slots: (
        Tensor  # (n,): where each is written; L, the spare one, if its class is full.
    )
    cliques: Tensor  # (n,): their indices in mining order.
    full_classes: (
        Tensor  # The classes that now hold L + 1 pairs, of which two are fused.
    )


def running_mean(mean: Tensor, seen: int, total: Tensor, new: int) -> Tensor:
    """Average ``seen`` earlier prompts and ``new`` more that sum to ``total`` (Eq. 11).

    ``seen`` is the tau of that equation, for any number of cliques at once.
    """
    return (mean * seen + total) / (seen + new)


# --- two of L + 1 pairs become one --------------------------------------------------


def retention_graph(keys: Tensor, bandwidth: float, neighbours: int) -> Tensor:
    """Weigh the K nearest of keys (C, n, E): symmetric W (C, n, n) (Eq. 12)."""
    n = keys.shape[1]

    # Eq. 12: Gaussian weights. A loop is below any weight, so that it is never a
    # neighbour, not even among zeros.
    squared = _squared_distances(keys)
    weights = torch.exp(-squared / (2 * bandwidth**2))
    itself = torch.eye(n, dtype=torch.bool, device=keys.device)
    weights = weights.masked_fill(itself, -1.0)

    # "K-max values in each row", then the union of both directions.
    ranked = weights.sort(dim=-1, descending=True, stable=True).indices
    K = min(neighbours, n - 1)
    nearest = ranked[..., :K]
    edges = torch.zeros_like(weights)
    edges = edges.scatter(-1, nearest, weights.gather(-1, nearest))
    return torch.maximum(edges, edges.transpose(-1, -2))


def propagate(keys: Tensor, config: SCAPConfig) -> Tensor:
    """Propagate keys (C, n, E) over their graph (Zhou et al. 2003; no number).

    A' = (1 - alpha) (I - alpha S)^-1 A with S = D^-1/2 W D^-1/2.
    """
    alpha = config.propagation
    if config.rules.isolated_keys:
        return keys / (1 - alpha)
    weights = retention_graph(keys, config.bandwidth, config.neighbours)

    # D^-1/2; zero for a key that is too far from all others for any weight.
    degree = weights.sum(dim=-1)
    root = degree.rsqrt()
    root = torch.where(root.isfinite(), root, 0.0)

    # S = D^-1/2 W D^-1/2
    smooth = root[:, :, None] * weights * root[:, None]
    return (1 - alpha) * resolvent(smooth, alpha) @ keys


def resolvent(smooth: Tensor, alpha: float) -> Tensor:
    """Invert I - alpha S for symmetric S (C, n, n), |eigenvalues| <= 1, alpha < 1.

    The product of (I + (alpha S)^(2^k)), exact once alpha^(2^k) is less than rounding:
    a solver would stop the device to look for errors.
    """
    n = smooth.shape[-1]
    identity = torch.eye(n, dtype=smooth.dtype, device=smooth.device)
    rounding = torch.finfo(smooth.dtype).eps / 8

    # `total` is the sum of all powers of alpha S below `reach`.
    power = alpha * smooth
    total = identity + power
    reach = 2
    while alpha**reach > rounding:
        power = power @ power
        total = torch.baddbmm(total, total, power)
        reach *= 2
    return total


def closest_pairs(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Find the two closest keys (C,) of every class, i < j; the lowest pair on ties."""
    n = keys.shape[1]
    distance = _squared_distances(keys)

    # The pairs i < j in the order of (i, j), so that a stable sort settles ties.
    first, second = torch.triu_indices(n, n, offset=1, device=keys.device)
    by_pair = distance[:, first, second]
    ranked = by_pair.sort(dim=1, stable=True).indices
    best = ranked[:, 0]
    return first[best], second[best]


def _squared_distances(keys: Tensor) -> Tensor:
    """Compare all keys (C, n, E) of a class with each other, (C, n, n)."""
    difference = keys[:, :, None] - keys[:, None]
    return difference.square().sum(dim=-1)


def fuse_closest(
    keys: Tensor, values: Tensor, config: SCAPConfig
) -> tuple[Tensor, Tensor]:
    """Average the closest two of L + 1 pairs into the lower slot (Eq. 13)."""
    C, n, _ = keys.shape
    moved = propagate(keys, config)
    first, second = closest_pairs(moved)
    if not config.rules.raw_keys:
        keys = moved

    # The L slots that are left, in order: all but the second of the pair.
    row = torch.arange(C, device=keys.device)
    slot = torch.arange(n - 1, device=keys.device).expand(C, -1)
    slot = slot + (slot >= second[:, None])

    fused = []
    for pairs in (keys, values):
        whole_rows = slot[:, :, None].expand(-1, -1, pairs.shape[2])
        rest = pairs.gather(1, whole_rows).clone()
        # Eq. 13: a_new and P_new^I, half of each.
        total = pairs[row, first] + pairs[row, second]
        rest[row, first] = total / 2
        fused.append(rest)
    return fused[0], fused[1]


# --- the cliques of a batch enter the cache -----------------------------------------


def retain(
    cache: Cache,
    classes: Tensor,
    keys: Tensor,
    values: Tensor,
    config: SCAPConfig,
    replayed: Replayed | None = None,
) -> Cache:
    """Add m cliques in mining order to the cache (Eq. 12-13).

    The r-th cliques of all classes enter together, and full classes are fused in one
    batched solve.

    Args:
        cache: The cache so far, which is not changed.
        classes: Class (m,) of every clique, on the CPU.
        keys: Their attribute features (m, E).
        values: Their visual prompts (m, V).
        config: L and how to fuse.
        replayed: Calls the fusion; on CUDA as a recorded graph.

    Returns:
        The cache after them.

    """
    replayed = replayed or Replayed(shapes=0)
    fuse = _fusion(config)
    L = config.capacity
    new_keys = cache.keys.clone()
    new_values = cache.values.clone()
    count = cache.count.clone()
    planned = plan_rounds(classes, count, L)
    for entering in _send_rounds(planned, cache.keys.device):
        # Add (a_ik, P_ik^I) to R_i; if that is full, as the pair L + 1.
        slots = entering.classes, entering.slots
        cliques = entering.cliques
        new_keys[slots] = keys[cliques].to(new_keys.dtype)
        new_values[slots] = values[cliques].to(new_values.dtype)

        # "Update all pairs and aggregate the two that are most similar".
        full = entering.full_classes
        if len(full):
            fused_keys, fused_values = replayed.by_rows(
                fuse, new_keys[full], new_values[full]
            )
            new_keys[full, :L] = fused_keys
            new_values[full, :L] = fused_values
    return Cache(new_keys, new_values, count)


def plan_rounds(classes: Tensor, count: Tensor, capacity: int) -> list[Round]:
    """Plan where cliques of ``classes`` (m,) are written; updates ``count``."""
    planned = []
    for clique in rounds(classes):
        label = classes[clique]
        slot = count[label]
        full = label[slot == capacity]
        planned.append(Round(label, slot, clique, full))
        count[label] = (slot + 1).clamp_max(capacity)
    return planned


def rounds(classes: Tensor) -> list[Tensor]:
    """Group clique indices: round r holds the r-th clique of each class."""
    if len(classes) == 0:
        return []
    # By class; within one, in mining order.
    order = classes.argsort(stable=True)
    label = classes[order]

    # How many of its class came before: its position less that of the class's first.
    position = torch.arange(len(label))
    is_first = torch.ones(len(label), dtype=torch.bool)
    is_first[1:] = label[1:] != label[:-1]
    start = torch.where(is_first, position, 0)
    start = start.cummax(dim=0).values
    earlier = position - start
    last = int(earlier.max())
    return [order[earlier == r] for r in range(last + 1)]


def _send_rounds(planned: list[Round], device: torch.device) -> list[Round]:
    """Copy the indices of all rounds to a device at once."""
    if not planned:
        return []
    fields = [index for entering in planned for index in entering]
    sizes = [len(index) for index in fields]
    together = send(torch.cat(fields), device)
    sent = iter(torch.split(together, sizes))
    return [
        Round(
            classes=next(sent),
            slots=next(sent),
            cliques=next(sent),
            full_classes=next(sent),
        )
        for _ in planned
    ]


@cache
def _fusion(config: SCAPConfig) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the function that fuses: one object per config, as replaying needs."""
    return partial(fuse_closest, config=config)


# --- a retained prompt for an image -------------------------------------------------


def best_entries(cache: Cache, classes: Tensor, query: Tensor) -> Tensor:
    """Match queries (R, E) with the keys of ``classes`` (R,): best slots (R,) (Eq. 16).

    A class without any key gets slot 0, which means nothing.
    """
    # The inner product of f_j with every key of the class, (R, L + 1).
    keys = cache.keys[classes]
    query = query.to(keys.dtype)
    score = torch.einsum("re,rle->rl", query, keys)

    # Slots that hold nothing match nothing.
    count = send(cache.count, keys.device)[classes]
    slots = torch.arange(keys.shape[1], device=keys.device)
    is_empty = slots >= count[:, None]
    score = score.masked_fill(is_empty, -torch.inf)
    return score.argmax(dim=1)
