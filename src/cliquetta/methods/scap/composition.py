"""Composition: which prompts an image is scored with, and how its passes become one prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.scap.cliques import Cliques
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.retention import Cache, best_entries
from cliquetta.model.transfer import send


@dataclass(frozen=True)
class Passes:
    """The prompted passes of a batch: R rows of (image, candidate sets); all on the CPU.

    ``sets`` (R, G) are distinct sets whose prompts the pass takes and ``own`` (R, G) is true where
    there is one; ``labels`` (R, Q) are the classes whose retained prompt it takes and ``kept``
    (R, Q) is true where that class holds one. There are ``width`` passes per image.
    """

    image: Tensor
    sets: Tensor
    own: Tensor
    labels: Tensor
    kept: Tensor
    width: int

    @property
    def prompted(self) -> Tensor:
        """Which passes (R,) have any prompt."""
        return self.own.any(dim=1) | self.kept.any(dim=1)


def plan_passes(cliques: Cliques, top: Tensor, count: Tensor, config: SCAPConfig) -> Passes:
    """The passes of every image from its candidate sets (Eq. 15-17).

    ``top`` is (b, k) and ``count`` (N,) the number of pairs that each class has retained.
    """
    b, k = top.shape
    if config.merge == "top-1":
        top, k = top[:, :1], 1
    clique, image = cliques.members.nonzero(as_tuple=True) if len(cliques) else _none()
    rank = None
    if len(clique):
        rank = top.index_select(0, image) == cliques.classes.index_select(0, clique)[:, None]
    held = count[top] > 0
    if config.merge == "union":
        row, width = image, 1
        if rank is not None:
            use = rank.any(dim=1)
            row, clique = row[use], clique[use]
        labels, kept = top, held
        rows = b
    else:
        rows, width = b * k, k
        row = image
        if rank is not None:
            use = rank.any(dim=1)
            row = (image * k + rank.long().argmax(dim=1))[use]
            clique = clique[use]
        labels, kept = top.reshape(-1, 1), held.reshape(-1, 1)
    sets = cliques.set_of[clique] if len(clique) else clique
    if config.merge == "union" and len(sets):
        row, sets = _first_of_each(row, sets, clique, len(cliques.sets))
        clique = torch.arange(len(sets))
    slots, own = _ragged(row, sets, clique, rows)
    position = torch.arange(b).repeat_interleave(width)
    if not config.retention:
        kept = torch.zeros_like(kept)
    return Passes(position, slots, own, labels, kept, width)


def _none() -> tuple[Tensor, Tensor]:
    empty = torch.zeros(0, dtype=torch.long)
    return empty, empty


def _first_of_each(row: Tensor, sets: Tensor, clique: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(row, set) pairs without repeats, in mining order."""
    order = clique.argsort(stable=True)
    row, sets = row[order], sets[order]
    code = row * count + sets
    distinct, inverse = torch.unique(code, return_inverse=True)
    first = torch.full((len(distinct),), len(code), dtype=torch.long)
    first = first.scatter_reduce(0, inverse, torch.arange(len(code)), reduce="amin").sort().values
    return row[first], sets[first]


def _ragged(row: Tensor, values: Tensor, order: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Values by row, in ``order``, as a padded matrix (rows, G) and its mask."""
    by_order = order.argsort(stable=True)
    by_row = row[by_order].argsort(stable=True)
    index = by_order[by_row]
    row, values = row[index], values[index]
    counts = torch.bincount(row, minlength=rows)
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    width = int(counts.max()) if len(row) else 0
    out = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    out[row, place], mask[row, place] = values, True
    return out, mask


@dataclass(frozen=True)
class Composed:
    """What every pass of a batch is scored with."""

    passes: Passes
    prompts: Tensor
    """Visual prompts (R, S, V)."""
    mask: Tensor
    """(R, S) bool: where there is a prompt."""
    places: Tensor
    """(R, Q): the place in its class's cache that a retained prompt came from, or -1."""
    text_features: Tensor
    """(N, E) for all passes, or (C, N, E)."""
    text_index: Tensor | None
    """(R,): the text features of each pass, if there are several."""

    def logits(self, features: Tensor, scale: float) -> Tensor:
        """Logits (b, passes, N) of the features (R, E) of all passes (Eq. 19)."""
        if self.text_index is None:
            logits = scale * features @ self.text_features.T
        else:
            own = self.text_features[self.text_index]
            logits = scale * torch.einsum("re,rne->rn", features, own)
        return logits.view(-1, self.passes.width, logits.shape[-1])


def gather_prompts(
    passes: Passes, learned: Tensor, cache: Cache | None, query: Tensor, config: SCAPConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Composed prompts (R, S, V) of every pass, their mask, and the retained places (R, Q) used.

    ``learned`` (U, V) are the prompts of the distinct cliques, none if there is no row; ``query``
    (b, E) are the features that are matched against the keys of the cache.
    """
    device = query.device
    R, Q = passes.labels.shape
    none = torch.zeros(R, 0, learned.shape[1], dtype=query.dtype, device=device)
    no_mask = torch.zeros(R, 0, dtype=torch.bool, device=device)
    own, own_mask, kept, kept_mask = none, no_mask, none, no_mask
    if len(learned):
        own, own_mask = learned[send(passes.sets, device)], send(passes.own, device)
    places = torch.full((R, Q), -1, device=device)
    if cache is not None:
        kept_mask, labels = send(passes.kept, device), send(passes.labels, device)
        query = query[send(passes.image, device)].repeat_interleave(Q, dim=0)
        best = best_entries(cache, labels.reshape(-1), query, config.match).view(R, Q)
        kept = cache.values[labels, best]
        places = torch.where(kept_mask, best, places)
    return *compose_prompts(own, own_mask, kept, kept_mask, config), places


def compose_prompts(
    own: Tensor, own_mask: Tensor, kept: Tensor, kept_mask: Tensor, config: SCAPConfig
) -> tuple[Tensor, Tensor]:
    """Prompts (R, S, V) of every pass and their mask, from those of cliques and of the cache.

    Concatenation keeps every prompt whole, keys with keys and values with values (Eq. 15, 17);
    ``mean`` averages instead, the retained prompt half and half into each that is left.
    """
    if config.clique_combination == "mean" and own.shape[1]:
        own, own_mask = _masked_mean(own, own_mask)
    if config.retained_combination == "mean" and kept.shape[1]:
        kept, kept_mask = _masked_mean(kept, kept_mask)
        both = own_mask & kept_mask
        own = torch.where(both[:, :, None], (own + kept) / 2, own)
        kept_mask = kept_mask & ~own_mask.any(dim=1, keepdim=True)
    return torch.cat([own, kept], dim=1), torch.cat([own_mask, kept_mask], dim=1)


def _masked_mean(prompts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One prompt per row: the mean of those that exist."""
    weight = mask.to(prompts.dtype)
    total = (prompts * weight[:, :, None]).sum(dim=1, keepdim=True)
    mean = total / weight.sum(dim=1).clamp_min(1)[:, None, None]
    return mean, mask.any(dim=1, keepdim=True)


def merge_passes(logits: Tensor, top: Tensor, how: str) -> Tensor:
    """Logits (b, N) of the images from those of their passes (b, k, N); ``top`` (b, k)."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    if how == "mean-probability":
        return logits.log_softmax(dim=-1).logsumexp(dim=1) - math.log(logits.shape[1])
    mean = logits.mean(dim=1)
    if how == "mean-logits":
        return mean
    if how == "own-class":
        return mean.scatter(1, top, logits.gather(2, top[:, :, None])[:, :, 0])
    if how == "max-confidence":
        best = entropy(logits).argmin(dim=1)
        return logits[torch.arange(len(logits), device=logits.device), best]
    raise UserError(f"{how} merges one pass per image, got {logits.shape[1]}")
