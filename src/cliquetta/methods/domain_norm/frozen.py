"""A domain's LayerNorms, class weights and remembered images as a function of one image."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from cliquetta.methods._shared.layernorm import LateBlocks
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.model.frozen import FrozenModel
from cliquetta.model.vision import VisionTower


class FrozenDomain(FrozenModel):
    """The prediction of ``domain_norm`` for an image by itself, as logarithms of probabilities.

    ``norms`` are the LayerNorms of the blocks from ``start`` on, by name (none: nothing was learned
    yet). Their prediction is mixed with ``zero_shot_share`` of the zero-shot one, then with those,
    ``votes`` (V, N) of the most similar remembered images ``voters`` (V, E); ``vote`` is their
    share and their number. ``weight`` (N,) is what each class is multiplied by.
    """

    voters: Tensor
    votes: Tensor
    weight: Tensor

    def __init__(
        self,
        model: CLIP,
        text: Tensor,
        *,
        start: int,
        norms: Mapping[str, Tensor],
        zero_shot_share: float,
        weight: Tensor,
        voters: Tensor,
        votes: Tensor,
        vote: tuple[float, int],
    ) -> None:
        super().__init__(model, text)
        self.start, self.zero_shot_share, self.vote = start, zero_shot_share, vote
        self.norms = tuple(norms)
        for place, value in enumerate(norms.values()):
            self.register_buffer(f"norm_{place}", value.clone())
        for name, value in (("weight", weight), ("voters", voters), ("votes", votes)):
            self.register_buffer(name, value.clone())

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (B, N)."""
        tower = self.visual
        assert isinstance(tower, VisionTower)
        late = LateBlocks(tower, self.start)
        hidden = tower.run(tower.embed(pixels), 0, self.start)
        values = (getattr(self, f"norm_{i}").to(hidden.dtype) for i in range(len(self.norms)))
        norms = dict(zip(self.norms, values, strict=True))
        features = l2_normalize(functional_call(late, norms, (hidden,)))
        p = self.text_logits(features).softmax(dim=-1)
        if self.norms and self.zero_shot_share > 0:
            plain = self.text_logits(l2_normalize(late(hidden))).softmax(dim=-1)
            p = p.lerp(plain, self.zero_shot_share)
        share, neighbours = self.vote
        if share > 0 and len(self.voters):
            k = min(neighbours, len(self.voters))
            nearest = F.linear(features, self.voters).topk(k, dim=1).indices
            p = (1 - share) * p + share * self.votes[nearest].mean(dim=1)
        p = p * self.weight
        return (p / p.sum(dim=1, keepdim=True)).clamp_min(1e-12).log() + self.bias
