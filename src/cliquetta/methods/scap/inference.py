"""Inference: text and image features under the composed prompts (Eq. 18-19)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.scap.cliques import Cliques
from cliquetta.methods.scap.composition import Composed
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.losses import clique_sum
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize
from cliquetta.model.cuda_graph import Replayed
from cliquetta.model.tapes import chunks
from cliquetta.model.transfer import send
from cliquetta.model.vision import VisionTower

TEXTS = 4096
"""Texts that are encoded at once when classes have contexts of their own."""
MEMORY = {"cuda": 6 * 2**30, "cpu": 2**30}
"""Bytes of activations that one chunk of prompted images may take, by device type."""


class TextPrompts(NamedTuple):
    """Contexts of the batch's distinct cliques (U, ...), and the retained one."""

    own: Tensor | None
    retained: Tensor


def composed_text(
    text: PromptedText, prompts: TextPrompts, cliques: Cliques, top: Tensor, config: SCAPConfig
) -> tuple[Tensor, Tensor | None]:
    """Text features of the passes: (N, E) for all, or (C, N, E) and the index of each pass.

    Eq. 18: the retained context, and with alpha_r < 1 also the mean of the contexts of the
    class's cliques.
    """
    share = config.text_retained_share
    own, mean = prompts
    if own is None:
        return text.features(mean[None])[0], None
    device = mean.device
    labels, owner = torch.unique(cliques.classes, return_inverse=True)
    total = clique_sum(own[send(cliques.set_of, device)], send(owner, device), len(labels))
    times = send(torch.bincount(owner, minlength=len(labels)), device)
    by_class = total / times.view(-1, *[1] * (total.ndim - 1))
    contexts = torch.cat([share * mean + (1 - share) * by_class, mean[None]])
    lookup = torch.full((text.classes,), len(labels))
    lookup[labels] = torch.arange(len(labels))
    text_index = lookup[top]
    if config.merge == "union":
        contexts = contexts[send(text_index, device)].mean(dim=1)
        text_index = torch.arange(len(top))
    elif config.merge == "top-1":
        text_index = text_index[:, 0]
    parts = chunks(len(contexts), max(1, TEXTS // text.classes))
    features = torch.cat([text.features(contexts[part]) for part in parts])
    return features, send(text_index.reshape(-1), device)


@dataclass(frozen=True)
class PromptedTower:
    """The image tower from its first prompted block on."""

    tower: VisionTower
    blocks: tuple[int, ...]
    """Blocks that take a prompt, ascending."""
    length: int
    """Tokens of a prompt per block."""
    replayed: Replayed = field(default_factory=Replayed)
    """Calls the blocks behind the last prompt, whose shapes do not depend on how many there are."""

    @property
    def rows(self) -> int:
        """Prompted images in memory at once."""
        config, position = self.tower.config, self.tower.position
        budget = MEMORY.get(position.device.type, MEMORY["cpu"])
        width = 8 * config.width + 2 * config.hidden
        return max(1, budget // ((config.patches + 1) * width * position.element_size()))

    def hidden(self, images: Tensor) -> Tensor:
        """Hidden states (b, T, D) at the first prompted block, which no prompt changes."""
        return self.tower.run(self.tower.embed(images), 0, self.blocks[0])

    def plain(self, hidden: Tensor) -> Tensor:
        """Unit features (b, E) without prompts."""
        return l2_normalize(self.tower.pool(self.tower.run(hidden, self.blocks[0])))

    def encode(self, hidden: Tensor, prompts: Tensor, mask: Tensor) -> Tensor:
        """Unit features of rows under their composed prompts (R, S, V); each has at least one."""
        R, S, _ = prompts.shape
        P = self.length
        tokens = prompts.view(R, S, len(self.blocks), P, 2, -1)
        seen = None if S == 1 else mask.repeat_interleave(P, dim=1)
        prefix = {
            block: Prefix(tokens[:, :, at].reshape(R, S * P, 2, -1), seen)
            for at, block in enumerate(self.blocks)
        }
        after = self.blocks[-1] + 1
        if after == len(self.tower.blocks):
            hidden = self.tower.run(hidden, self.blocks[0], prefix=prefix)
            return l2_normalize(self.tower.pool(hidden))

        def finish(hidden: Tensor) -> tuple[Tensor]:
            return (l2_normalize(self.tower.pool(self.tower.run(hidden, after))),)

        hidden = self.tower.run(hidden, self.blocks[0], after, prefix=prefix)
        return self.replayed.by_rows(finish, hidden)[0]

    def pass_features(
        self, hidden: Tensor, plain: Tensor, composed: Composed, stand_in: Tensor | None
    ) -> Tensor:
        """Unit features (R, E) of all passes: prompted where there is a prompt, else plain.

        ``hidden`` (b, T, D) and ``plain`` (b, E) are the images'. ``stand_in`` is the prompt of
        passes that have none of their own, if they are to have one.
        """
        prompts, mask = composed.prompts, composed.mask
        image = send(composed.passes.image, plain.device)
        features = plain[image]
        chosen = composed.passes.prompted.nonzero()[:, 0]
        if stand_in is not None:
            chosen = torch.arange(len(features))
            alone = ~mask.any(dim=1, keepdim=True)
            same = stand_in.flatten().expand(len(features), 1, -1)
            prompts = torch.cat([prompts, same.to(prompts.dtype)], dim=1)
            mask = torch.cat([mask, alone], dim=1)
        chosen = send(chosen, plain.device)
        for part in chunks(len(chosen), self.rows):
            own = chosen[part]
            features[own] = self.encode(hidden[image[own]], prompts[own], mask[own])
        return features
