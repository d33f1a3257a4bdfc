"""Composition: prompts of every image, its features under them, one prediction.

An image is encoded once for each of its k best classes. Such a pass takes the visual
prompts of the class's cliques that hold the image (Eq. 15) and one that was retained
(Eq. 16-17). ``R = b k`` is the number of passes of a batch.
"""

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
    """The passes of a batch, ``width`` per image, those of one image in a row.

    All tensors are on the CPU.
    """

    image: Tensor  # (R,): the image of each pass.
    labels: Tensor  # (R,): the class whose prompts it takes.
    sets: Tensor  # (R, G): the member sets whose prompts it takes, padded.
    has_set: Tensor  # (R, G) bool: false where `sets` is padding.
    has_retained: Tensor  # (R,) bool: whether the class has a retained prompt.
    width: int


def plan_passes(
    cliques: Cliques, top: Tensor, count: Tensor, config: SCAPConfig
) -> Passes:
    """Plan which prompts every pass takes (Eq. 15-17).

    Args:
        cliques: The cliques of the batch.
        top: The k best classes (b, k) of every image.
        count: Retained prompts (N,) of every class.
        config: Whether prompts are retained; the rules.

    Returns:
        One pass per image and class in ``top``.

    """
    if config.rules.best_class_only:
        top = top[:, :1]
    b, k = top.shape

    # Every membership whose class is among the image's best (all of them, unless only
    # the best counts), and the pass that it is for.
    clique, image = cliques.members.nonzero(as_tuple=True)
    image_top = top.index_select(0, image)
    is_class = image_top == cliques.classes.index_select(0, clique)[:, None]
    is_used = is_class.any(dim=1)
    rank = is_class.long().argmax(dim=1)
    row = (image * k + rank)[is_used]
    clique = clique[is_used]
    sets, has_set = _ragged(row, cliques.set_of[clique], b * k)

    if config.retention:
        has_retained = count[top] > 0
    else:
        has_retained = torch.zeros_like(top, dtype=torch.bool)
    return Passes(
        image=torch.arange(b).repeat_interleave(k),
        labels=top.reshape(-1),
        sets=sets,
        has_set=has_set,
        has_retained=has_retained.reshape(-1),
        width=k,
    )


def _ragged(row: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Gather values by row, in order, in a padded matrix (rows, G) and its mask."""
    by_row = row.argsort(stable=True)
    row = row[by_row]

    # The column of a value: its position less that of its row's first.
    counts = torch.bincount(row, minlength=rows)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(row)) - starts[row]

    width = int(counts.max())
    padded = torch.zeros(rows, width, dtype=torch.long)
    padded[row, column] = values[by_row]
    mask = torch.zeros(rows, width, dtype=torch.bool)
    mask[row, column] = True
    return padded, mask


@dataclass(frozen=True)
class Composed:
    """Prompts and texts that every pass of a batch is scored with."""

    passes: Passes
    prompts: Tensor  # Visual prompts P_C^I (R, S, V), padded.
    mask: Tensor  # (R, S) bool: where there is a prompt.
    # (R,): the slot of its class's cache that a retained prompt came from, or -1.
    slots: Tensor
    text_features: Tensor  # (N, E), under the text prompt P_C^T.


def gather_prompts(
    passes: Passes,
    learned: Tensor,
    cache: Cache | None,
    query: Tensor,
    config: SCAPConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the visual prompts of every pass (Eq. 15-17).

    Args:
        passes: The plan.
        learned: Prompts (U, V) of the distinct member sets.
        cache: Retained prompts, if there are such.
        query: Image features (b, E) that are matched with the cache's keys.
        config: How prompts are combined.

    Returns:
        Composed prompts (R, S, V), their mask (R, S), and the slots (R,) of the cache
        that were used, -1 for none.

    """
    device = query.device
    R = len(passes.labels)
    nothing = torch.zeros(R, 0, learned.shape[1], dtype=query.dtype, device=device)
    no_mask = nothing.any(dim=2)

    # Eq. 15: the prompts of the image's cliques (R, G, V).
    of_cliques = nothing
    clique_mask = no_mask
    if len(learned):
        of_cliques = learned[send(passes.sets, device)]
        clique_mask = send(passes.has_set, device)

    # Eq. 16: the retained prompt with the best key (R, 1, V).
    retained = nothing
    retained_mask = no_mask
    slots = torch.full((R,), -1, device=device)
    if cache is not None:
        has_retained = send(passes.has_retained, device)
        labels = send(passes.labels, device)
        pass_query = query[send(passes.image, device)]
        best = best_entries(cache, labels, pass_query)
        retained = cache.values[labels, best][:, None]
        retained_mask = has_retained[:, None]
        slots = torch.where(has_retained, best, slots)

    prompts, mask = compose_prompts(
        of_cliques, clique_mask, retained, retained_mask, config
    )
    return prompts, mask, slots


def compose_prompts(
    of_cliques: Tensor,
    clique_mask: Tensor,
    retained: Tensor,
    retained_mask: Tensor,
    config: SCAPConfig,
) -> tuple[Tensor, Tensor]:
    """Join the prompts of an image's cliques and a retained one (Eq. 15, 17).

    They are concatenated, keys with keys and values with values, or averaged: the
    retained prompt half and half into each that is left.

    Args:
        of_cliques: Prompts (R, G, V) of the cliques of every pass.
        clique_mask: Where there is one (R, G).
        retained: The retained prompt (R, 1, V), or none of them (R, 0, V).
        retained_mask: Where there is one.
        config: ``clique_combination`` and ``retained_combination``.

    Returns:
        Prompts (R, S, V) of every pass, and their mask (R, S).

    """
    # Eq. 15, or the ablation's mean over the cliques.
    if config.clique_combination == "mean" and of_cliques.shape[1]:
        weight = clique_mask.to(of_cliques.dtype)
        weighted = of_cliques * weight[:, :, None]
        total = weighted.sum(dim=1, keepdim=True)
        count = weight.sum(dim=1)
        count = count.clamp_min(1)
        of_cliques = total / count[:, None, None]
        clique_mask = clique_mask.any(dim=1, keepdim=True)

    # Eq. 17, or the mean with the retained prompt.
    if config.retained_combination == "mean" and retained.shape[1]:
        has_both = clique_mask & retained_mask
        halfway = (of_cliques + retained) / 2
        of_cliques = torch.where(has_both[:, :, None], halfway, of_cliques)
        has_clique = clique_mask.any(dim=1, keepdim=True)
        retained_mask = retained_mask & ~has_clique
    prompts = torch.cat([of_cliques, retained], dim=1)
    mask = torch.cat([clique_mask, retained_mask], dim=1)
    return prompts, mask


def merge_passes(logits: Tensor) -> Tensor:
    """Average the probabilities of an image's passes (b, k, N): their logs (b, N)."""
    k = logits.shape[1]
    if k == 1:
        return logits[:, 0]
    log_p = logits.log_softmax(dim=-1)
    log_sum = log_p.logsumexp(dim=1)
    return log_sum - math.log(k)


@dataclass(frozen=True)
class PrefixedTower:
    """The image tower from its first prompted block on."""

    tower: VisionTower
    blocks: tuple[int, ...]  # Blocks that take a prompt, ascending.
    length: int  # Tokens of a prompt per block.
    replayed: Replayed = field(default_factory=Replayed)
    """Calls the blocks behind the last prompt, which have one shape for any number."""

    @property
    def rows(self) -> int:
        """Prompted images in memory at once."""
        config = self.tower.config
        position = self.tower.position
        budget = MEMORY.get(position.device.type, MEMORY["cpu"])
        # What a block's forward pass holds of a token.
        width = 8 * config.width + 2 * config.hidden
        tokens = config.patches + 1
        row_bytes = tokens * width * position.element_size()
        return max(1, budget // row_bytes)

    def hidden(self, images: Tensor) -> Tensor:
        """Encode up to the first prompted block, which no prompt changes: (b, T, D)."""
        return self.tower.run(self.tower.embed(images), 0, self.blocks[0])

    def hidden_and_plain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Encode up to the first prompted block, and to the end (b, E)."""
        hidden = self.hidden(images)
        return hidden, self._unit_features(self.tower.run(hidden, self.blocks[0]))

    def encode(self, hidden: Tensor, prompts: Tensor, mask: Tensor) -> Tensor:
        """Encode rows under their composed prompts, f^ of Eq. 19.

        Args:
            hidden: States (R, T, D) at the first prompted block.
            prompts: Composed prompts (R, S, V).
            mask: Where there is a prompt (R, S): at least one in every row.

        Returns:
            Unit features (R, E).

        """
        R, S, _ = prompts.shape
        P = self.length
        first = self.blocks[0]
        after = self.blocks[-1] + 1

        # (B, R, S, P, 2, D): the prompts of every block; 2 is for keys and values.
        by_block = prompts.view(R, S, len(self.blocks), P, 2, -1)
        by_block = by_block.movedim(2, 0)

        # Eq. 15 and 17: one prefix of S P tokens in a row for each block.
        exists = None if S == 1 else mask.repeat_interleave(P, dim=1)
        prefix = {
            block: Prefix(tokens.reshape(R, S * P, 2, -1), exists)
            for block, tokens in zip(self.blocks, by_block, strict=True)
        }

        # The blocks behind the last prompt are the same for any S: a GPU replays them.
        if after == len(self.tower.blocks):
            states = self.tower.run(hidden, first, prefix=prefix)
            return self._unit_features(states)
        states = self.tower.run(hidden, first, after, prefix=prefix)
        return self.replayed.by_rows(self._finish, states)[0]

    def _finish(self, states: Tensor) -> tuple[Tensor]:
        """Compute unit features (R, E) of states behind the last prompted block."""
        after = self.blocks[-1] + 1
        return (self._unit_features(self.tower.run(states, after)),)

    def _unit_features(self, states: Tensor) -> Tensor:
        """Pool the states (R, T, D) of the last block to unit features (R, E)."""
        return l2_normalize(self.tower.pool(states))

    def pass_features(
        self, hidden: Tensor, plain: Tensor, composed: Composed
    ) -> Tensor:
        """Compute unit features (R, E) of all passes; plain ones without any prompt.

        Args:
            hidden: The images' states (b, T, D) at the first prompted block.
            plain: Their unit features (b, E) without prompts.
            composed: The prompts of every pass.

        """
        passes = composed.passes
        image = send(passes.image, plain.device)
        features = plain[image]

        # Which passes have a prompt is known on the CPU: nothing waits for the GPU.
        has_clique = passes.has_set.any(dim=1)
        has_prompt = has_clique | passes.has_retained
        (prompted,) = has_prompt.nonzero(as_tuple=True)
        prompted = send(prompted, plain.device)
        for part in chunks(len(prompted), self.rows):
            rows = prompted[part]
            states = hidden[image[rows]]
            prompts = composed.prompts[rows]
            mask = composed.mask[rows]
            features[rows] = self.encode(states, prompts, mask)
        return features
