"""Composition: which prompts an image is scored with, its features under them, one prediction."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cliquetta.methods.scap.cliques import Cliques
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.retention import Cache, best_entries
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize
from cliquetta.model.cuda import Replayed, send
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import chunks

MEMORY = {"cuda": 6 * 2**30, "cpu": 2**30}
"""Bytes of activations that one chunk of prompted images may take, by device type."""


@dataclass(frozen=True)
class Passes:
    """R prompted passes, ``width`` per image, over (image, candidate set); all on the CPU.

    A pass takes the prompts of distinct ``sets`` (R, G) where ``own``, and a retained
    prompt of the class ``labels`` (R,) if that has one (``held``).
    """

    image: Tensor
    sets: Tensor
    own: Tensor
    labels: Tensor
    held: Tensor
    width: int


def plan_passes(
    cliques: Cliques, top: Tensor, count: Tensor, config: SCAPConfig
) -> Passes:
    """Passes of every image over its sets (Eq. 15-17): ``top`` (b, k), retained ``count`` (N,)."""
    if config.rules.best_class_only:
        top = top[:, :1]
    b, k = top.shape
    clique, image = cliques.members.nonzero(as_tuple=True)
    rank = (
        top.index_select(0, image) == cliques.classes.index_select(0, clique)[:, None]
    )
    use = rank.any(dim=1)
    row, clique = (image * k + rank.long().argmax(dim=1))[use], clique[use]
    sets, own = _ragged(row, cliques.set_of[clique], clique, b * k)
    held = (
        count[top] > 0 if config.retention else torch.zeros_like(top, dtype=torch.bool)
    )
    position = torch.arange(b).repeat_interleave(k)
    return Passes(position, sets, own, top.reshape(-1), held.reshape(-1), k)


def _ragged(
    row: Tensor, values: Tensor, order: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Values by row, in ``order``, as a padded matrix (rows, G) and its mask."""
    by_order = order.argsort(stable=True)
    by_row = row[by_order].argsort(stable=True)
    index = by_order[by_row]
    row, values = row[index], values[index]
    counts = torch.bincount(row, minlength=rows)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    width = int(counts.max()) if len(row) else 0
    padded = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    padded[row, column], mask[row, column] = values, True
    return padded, mask


@dataclass(frozen=True)
class Composed:
    """Prompts and texts that every pass of a batch is scored with."""

    passes: Passes
    prompts: Tensor  # Visual prompts (R, S, V).
    mask: Tensor  # (R, S) bool: where there is a prompt.
    # (R,): the slot of its class's cache that a retained prompt came from, or -1.
    slots: Tensor
    text_features: Tensor  # (N, E).


def gather_prompts(
    passes: Passes,
    learned: Tensor,
    cache: Cache | None,
    query: Tensor,
    config: SCAPConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Composed prompts (R, S, V) of every pass, their mask, and the retained slots (R,) used.

    ``learned`` (U, V) are those of the distinct sets; ``query`` (b, E) is matched with
    the cache.
    """
    device, R = query.device, len(passes.labels)
    none = torch.zeros(R, 0, learned.shape[1], dtype=query.dtype, device=device)
    own = retained = none
    own_mask = retained_mask = none.any(dim=2)
    if len(learned):
        own, own_mask = learned[send(passes.sets, device)], send(passes.own, device)
    slots = torch.full((R,), -1, device=device)
    if cache is not None:
        held, labels = send(passes.held, device), send(passes.labels, device)
        best = best_entries(cache, labels, query[send(passes.image, device)])
        retained, retained_mask = cache.values[labels, best][:, None], held[:, None]
        slots = torch.where(held, best, slots)
    return *compose_prompts(own, own_mask, retained, retained_mask, config), slots


def compose_prompts(
    own: Tensor,
    own_mask: Tensor,
    retained: Tensor,
    retained_mask: Tensor,
    config: SCAPConfig,
) -> tuple[Tensor, Tensor]:
    """Prompts (R, S, V) of every pass, its cliques' and a retained one, and their mask.

    They are concatenated, keys with keys and values with values (Eq. 15, 17), or
    averaged: the retained prompt half and half into each that is left.
    """
    if config.clique_combination == "mean" and own.shape[1]:
        weight = own_mask.to(own.dtype)
        total = (own * weight[:, :, None]).sum(dim=1, keepdim=True)
        own = total / weight.sum(dim=1).clamp_min(1)[:, None, None]
        own_mask = own_mask.any(dim=1, keepdim=True)
    if config.retained_combination == "mean" and retained.shape[1]:
        both = own_mask & retained_mask
        own = torch.where(both[:, :, None], (own + retained) / 2, own)
        retained_mask = retained_mask & ~own_mask.any(dim=1, keepdim=True)
    return torch.cat([own, retained], dim=1), torch.cat(
        [own_mask, retained_mask], dim=1
    )


def merge_passes(logits: Tensor) -> Tensor:
    """Log of the mean probability (b, N) over the passes (b, k, N) of every image."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return logits.log_softmax(dim=-1).logsumexp(dim=1) - math.log(logits.shape[1])


@dataclass(frozen=True)
class PrefixedTower:
    """The image tower from its first prompted block on."""

    tower: VisionTower
    blocks: tuple[int, ...]  # Blocks that take a prompt, ascending.
    length: int  # Tokens of a prompt per block.
    replayed: Replayed = field(default_factory=Replayed)
    """Calls the blocks behind the last prompt, whose shapes do not depend on how many there are."""

    @property
    def rows(self) -> int:
        """Prompted images in memory at once."""
        config, position = self.tower.config, self.tower.position
        budget = MEMORY.get(position.device.type, MEMORY["cpu"])
        width = 8 * config.width + 2 * config.hidden
        return max(
            1, budget // ((config.patches + 1) * width * position.element_size())
        )

    def hidden(self, images: Tensor) -> Tensor:
        """Hidden states (b, T, D) at the first prompted block, which no prompt changes."""
        return self.tower.run(self.tower.embed(images), 0, self.blocks[0])

    def hidden_and_plain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """These states, and unit features (b, E) without prompts."""
        hidden = self.hidden(images)
        return hidden, l2_normalize(
            self.tower.pool(self.tower.run(hidden, self.blocks[0]))
        )

    def encode(self, hidden: Tensor, prompts: Tensor, mask: Tensor) -> Tensor:
        """Unit features of rows under their composed prompts (R, S, V); each has at least one."""
        R, S, _ = prompts.shape
        P = self.length
        tokens = prompts.view(R, S, len(self.blocks), P, 2, -1).movedim(2, 0)
        seen = None if S == 1 else mask.repeat_interleave(P, dim=1)
        by_block = (Prefix(own.reshape(R, S * P, 2, -1), seen) for own in tokens)
        prefix, after = (
            dict(zip(self.blocks, by_block, strict=True)),
            self.blocks[-1] + 1,
        )
        if after == len(self.tower.blocks):
            hidden = self.tower.run(hidden, self.blocks[0], prefix=prefix)
            return l2_normalize(self.tower.pool(hidden))
        hidden = self.tower.run(hidden, self.blocks[0], after, prefix=prefix)
        return self.replayed.by_rows(self._finish, hidden)[0]

    def _finish(self, hidden: Tensor) -> tuple[Tensor]:
        """Compute unit features (R, E) of states behind the last prompted block."""
        after = self.blocks[-1] + 1
        return (l2_normalize(self.tower.pool(self.tower.run(hidden, after))),)

    def pass_features(
        self, hidden: Tensor, plain: Tensor, composed: Composed
    ) -> Tensor:
        """Unit features (R, E) of all passes from the images' states (b, T, D) and ``plain``."""
        passes, image = composed.passes, send(composed.passes.image, plain.device)
        features, prompted = plain[image], passes.own.any(dim=1) | passes.held
        chosen = send(prompted.nonzero()[:, 0], plain.device)
        for part in chunks(len(chosen), self.rows):
            own = chosen[part]
            prompts, mask = composed.prompts[own], composed.mask[own]
            features[own] = self.encode(hidden[image[own]], prompts, mask)
        return features
