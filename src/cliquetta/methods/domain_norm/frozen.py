"""A domain's LayerNorms, class weights and remembered images as a function of one image."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from cliquetta.methods.building.layernorm import LateBlocks
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.prior import class_prior, information, step_size
from cliquetta.methods.domain_norm.state import Network, State
from cliquetta.model.clip import CLIP, FrozenModel, l2_normalize
from cliquetta.model.vision import VisionTower


class FrozenDomain(FrozenModel):
    """What a single image of the domain in use is predicted by, as logarithms of probabilities.

    The domain's LayerNorms, its share of the zero-shot prediction, its class weights and the votes
    of the remembered images are built in. Assigning domains and the votes of other images of a
    batch need more than one image and are left out.
    """

    voters: Tensor
    votes: Tensor
    weight: Tensor

    def __init__(
        self, model: CLIP, network: Network, state: State, config: DomainNormConfig
    ) -> None:
        super().__init__(model, network.text)
        domain = state.domains[int(state.current)]
        prior = class_prior(domain.counts, replace(config, recent_images=0.0))
        held = min(int(domain.voters.next), config.vote_memory)
        abstains = bool(information(domain.counts) < config.abstain_below)
        learned = domain.norms.steps > 0 and not abstains
        norms = network.late.named(domain.norms.values) if learned else {}
        self.start, self.norms, self.neighbours = network.start, tuple(norms), config.neighbours
        self.vote_share = 0.0 if abstains else config.vote_share
        self.zero_shot_share = config.zero_shot_share
        self.zero_shot_share *= 1 - step_size(float(prior.figures[0]), config)
        for place, value in enumerate(norms.values()):
            self.register_buffer(f"norm_{place}", value.clone())
        weight = torch.ones_like(prior.weights) if abstains else prior.weights
        self.register_buffer("weight", weight.clone())
        self.register_buffer("voters", domain.voters.features[:held].clone())
        self.register_buffer("votes", domain.voters.predictions[:held].clone())

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
        share = self.vote_share
        if share > 0 and len(self.voters):
            k = min(self.neighbours, len(self.voters))
            nearest = F.linear(features, self.voters).topk(k, dim=1).indices
            p = (1 - share) * p + share * self.votes[nearest].mean(dim=1)
        p = p * self.weight
        return (p / p.sum(dim=1, keepdim=True)).clamp_min(1e-12).log() + self.bias
