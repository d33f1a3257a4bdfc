"""The adapter owns the state; it saves, merges, freezes and explains what ``step`` makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.building.layernorm import LateBlocks
from cliquetta.methods.domain_norm.ahead import Ahead
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.health import describe, health
from cliquetta.methods.domain_norm.merging import PER_CLASS, merge_states, ranges
from cliquetta.methods.domain_norm.prior import class_prior, information, step_size
from cliquetta.methods.domain_norm.state import Network, State, start_state
from cliquetta.methods.domain_norm.step import step
from cliquetta.methods.registry import register
from cliquetta.model.clip import CLIP, FrozenModel, l2_normalize
from cliquetta.model.vision import VisionTower
from cliquetta.tensor_tree import flatten, map_tensors, unflatten
from cliquetta.types import Batch, Prediction


@register("domain_norm", paper="ours, after Zhang et al., CVPR 2025")
class DomainNorm(Adapter):
    """Visual LayerNorms per domain of the stream, learned and kept; recent images vote."""

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"visual-blocks"})
    lends_zero_shot = True
    config: DomainNormConfig

    def _setup(self) -> None:
        self.network = Network(self.model, self.prompts, self.config)
        start = start_state(self.network, self.config)
        self.memory.declare_tree(start, ranges(self.config.domains, len(self.prompts)))
        self._like = map_tensors(lambda value: value.to("meta"), start)
        self.class_free = frozenset(p for p in flatten(start) if not PER_CLASS & set(p.split(".")))
        enabled = self.model.device.type == "cuda"
        self.ahead = Ahead(self.network, self.config, enabled=enabled)

    @property
    def state(self) -> State:
        """The state as a tree."""
        return unflatten(self._like, self.memory)

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        before = self.state
        state, output = step(before, batch.images, self.ahead.begin(before, batch.images))
        self.memory.store_tree(state)
        evidence: dict[str, Any] = {"non_finite": output.not_finite} if output.not_finite else {}
        if output.figures is not None:
            evidence |= describe(state, output.figures, self.network, self.config)
            evidence |= {"domains_in_batch": output.parts, "changed": output.changed}
        evidence |= {} if output.zero_shot is None else {"zero_shot": output.zero_shot}
        return Prediction(output.log_probabilities.float(), evidence)

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """The health figures of a batch."""
        return {"images": len(prediction.logits), **health(prediction.evidence)}

    def _merge(
        self, states: Sequence[Mapping[str, Tensor]], start: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        trees = [unflatten(self._like, state) for state in states]
        shared = None if start is None else unflatten(self._like, start)
        return flatten(merge_states(trees, shared, self.network, self.config))

    @torch.no_grad()
    def frozen_model(self) -> FrozenDomain:
        """Freeze the domain in use: predicts single images, without learning."""
        return FrozenDomain(self.model, self.network, self.state, self.config)


class FrozenDomain(FrozenModel):
    """Log-probabilities of single images by the domain in use: its norms, weights and voters.

    Assigning domains and the votes of other images of a batch need more than one image.
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
        for i, value in enumerate(norms.values()):
            self.register_buffer(f"norm_{i}", value.clone())
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
        if self.vote_share > 0 and len(self.voters):
            k = min(self.neighbours, len(self.voters))
            nearest = F.linear(features, self.voters).topk(k, dim=1).indices
            p = (1 - self.vote_share) * p + self.vote_share * self.votes[nearest].mean(dim=1)
        p = p * self.weight
        return (p / p.sum(dim=1, keepdim=True)).clamp_min(1e-12).log() + self.bias
