"""Retention: a running mean of text prompts, and a cache of visual prompts per class.

Every class has pairs of key (mean feature of a clique) and value (its prompt). When
there are more than L, keys are propagated over their own graph and the closest pair is
fused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.model.cuda import Replayed, send


@dataclass(frozen=True)
class Cache:
    """Visual prompts of all classes: fixed tensors with one spare slot per class."""

    keys: Tensor  # (N, L + 1, E).
    values: Tensor  # (N, L + 1, V), a prompt in one row.
    count: Tensor  # (N,), pairs held; on the CPU, where the bookkeeping is done.


def running_mean(mean: Tensor, seen: int, total: Tensor, new: int) -> Tensor:
    """Mean of ``seen`` earlier prompts and ``new`` more that sum to ``total`` (Eq. 11)."""
    return (mean * seen + total) / (seen + new)


def retention_graph(keys: Tensor, bandwidth: float, neighbours: int) -> Tensor:
    """Symmetric K-nearest weights (C, n, n) of keys (C, n, E): Gaussian, without loops (Eq. 12)."""
    n = keys.shape[1]
    squared = (keys[:, :, None] - keys[:, None]).square().sum(dim=-1)
    weights = torch.exp(-squared / (2 * bandwidth**2))
    # Below any weight, so that a loop is never a neighbour, not even among zeros.
    itself = torch.eye(n, dtype=torch.bool, device=keys.device)
    weights = weights.masked_fill(itself, -1.0)
    ranked = weights.sort(dim=-1, descending=True, stable=True).indices
    nearest = ranked[..., : min(neighbours, n - 1)]
    edges = torch.zeros_like(weights).scatter(-1, nearest, weights.gather(-1, nearest))
    return torch.maximum(edges, edges.transpose(-1, -2))


def propagate(keys: Tensor, config: SCAPConfig) -> Tensor:
    """Keys (C, n, E) after propagation over their graph (Zhou et al. 2003; no number).

    (1 - alpha) (I - alpha S)^-1 A with S = D^-1/2 W D^-1/2.
    """
    if config.rules.isolated_keys:
        return keys / (1 - config.propagation)
    weights = retention_graph(keys, config.bandwidth, config.neighbours)
    root = weights.sum(dim=-1).rsqrt()
    root = torch.where(root.isfinite(), root, 0.0)
    smooth = root[:, :, None] * weights * root[:, None]
    return (1 - config.propagation) * resolvent(smooth, config.propagation) @ keys


def resolvent(smooth: Tensor, alpha: float) -> Tensor:
    """(I - alpha S)^-1 of symmetric S (C, n, n) with eigenvalues in [-1, 1], alpha < 1.

    The product of (I + (alpha S)^(2^k)), exact once alpha^(2^k) is less than rounding:
    a solver would stop the device to look for errors.
    """
    power = alpha * smooth
    identity = torch.eye(smooth.shape[-1], dtype=smooth.dtype, device=smooth.device)
    total = identity + power
    reach = 2
    while alpha**reach > torch.finfo(smooth.dtype).eps / 8:
        power = power @ power
        total = torch.baddbmm(total, total, power)
        reach *= 2
    return total


def closest_pairs(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Indices i < j (C,) of the two closest keys of every class; the lowest pair on ties."""
    n = keys.shape[1]
    distance = (keys[:, :, None] - keys[:, None]).square().sum(dim=-1)
    first, second = torch.triu_indices(n, n, offset=1, device=keys.device)
    best = distance[:, first, second].sort(dim=1, stable=True).indices[:, 0]
    return first[best], second[best]


def fuse_closest(
    keys: Tensor, values: Tensor, config: SCAPConfig
) -> tuple[Tensor, Tensor]:
    """L pairs (C, L, .) of L + 1: the closest two averaged into the lower slot (Eq. 13)."""
    C, n, _ = keys.shape
    moved = propagate(keys, config)
    first, second = closest_pairs(moved)
    keys = keys if config.rules.raw_keys else moved
    row = torch.arange(C, device=keys.device)
    slot = torch.arange(n - 1, device=keys.device).expand(C, -1)
    slot = slot + (
        slot >= second[:, None]
    )  # everything but the second of the pair, in order
    fused = []
    for rows in (keys, values):
        rest = rows.gather(1, slot[:, :, None].expand(-1, -1, rows.shape[2])).clone()
        rest[row, first] = (rows[row, first] + rows[row, second]) / 2
        fused.append(rest)
    return fused[0], fused[1]


def retain(
    cache: Cache,
    classes: Tensor,
    keys: Tensor,
    values: Tensor,
    config: SCAPConfig,
    replayed: Replayed | None = None,
) -> Cache:
    """The cache after m cliques in mining order: classes (m,) on the CPU, keys (m, E), values.

    The r-th cliques of all classes enter together, and full classes are fused in one
    batched solve.
    """
    replayed = replayed or Replayed(shapes=0)
    fuse = _fusion(config)
    device = cache.keys.device
    new_keys, new_values, count = (
        cache.keys.clone(),
        cache.values.clone(),
        cache.count.clone(),
    )
    plan: list[Tensor] = []
    for clique in rounds(classes):
        label = classes[clique]
        slot = count[label]
        plan += [label, slot, clique, label[slot == config.capacity]]
        count[label] = (slot + 1).clamp_max(config.capacity)
    sizes = [len(part) for part in plan]
    sent = torch.split(send(torch.cat(plan), device), sizes) if plan else ()
    for at, slot, source, full in zip(*[iter(sent)] * 4, strict=True):
        new_keys[at, slot] = keys[source].to(new_keys.dtype)
        new_values[at, slot] = values[source].to(new_values.dtype)
        if len(full):
            fused_keys, fused_values = replayed.by_rows(
                fuse, new_keys[full], new_values[full]
            )
            new_keys[full, : config.capacity] = fused_keys
            new_values[full, : config.capacity] = fused_values
    return Cache(new_keys, new_values, count)


@cache
def _fusion(config: SCAPConfig) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the function that fuses under some settings: one object, as replaying needs."""
    return partial(fuse_closest, config=config)


def rounds(classes: Tensor) -> list[Tensor]:
    """Clique indices by how many of their class came before: round r holds the r-th of each."""
    order = classes.argsort(stable=True)
    label = classes[order]
    position = torch.arange(len(label))
    new = torch.ones(len(label), dtype=torch.bool)
    new[1:] = label[1:] != label[:-1]
    start = (
        torch.where(new, position, 0).cummax(dim=0).values if len(label) else position
    )
    nth = position - start
    return [order[nth == r] for r in range(int(nth.max()) + 1)] if len(label) else []


def best_entries(cache: Cache, classes: Tensor, query: Tensor) -> Tensor:
    """Slot (R,) of the best key of class ``classes[r]`` for ``query`` (R, E) (Eq. 16), if any."""
    keys = cache.keys[classes]
    score = torch.einsum("re,rle->rl", query.to(keys.dtype), keys)
    held = send(cache.count, keys.device)[classes]
    slots = torch.arange(keys.shape[1], device=keys.device)
    return score.masked_fill(slots >= held[:, None], -torch.inf).argmax(dim=1)
