"""Image features under the composed prompts (Eq. 19)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from cliquetta.methods.scap.composition import Composed
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize
from cliquetta.model.cuda import Replayed, send
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import chunks

MEMORY = {"cuda": 6 * 2**30, "cpu": 2**30}
"""Bytes of activations that one chunk of prompted images may take, by device type."""


@dataclass(frozen=True)
class PrefixedTower:
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

    def pass_features(self, hidden: Tensor, plain: Tensor, composed: Composed) -> Tensor:
        """Unit features (R, E) of all passes from the images' states (b, T, D) and ``plain``."""
        image = send(composed.passes.image, plain.device)
        features = plain[image]
        chosen = send(composed.passes.prompted.nonzero()[:, 0], plain.device)
        for part in chunks(len(chosen), self.rows):
            own = chosen[part]
            prompts, mask = composed.prompts[own], composed.mask[own]
            features[own] = self.encode(hidden[image[own]], prompts, mask)
        return features
