"""The adapter owns the state; it saves, merges, freezes and explains what ``step`` makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.domain_norm.ahead import Ahead
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.frozen import FrozenDomain
from cliquetta.methods.domain_norm.health import health, verdict
from cliquetta.methods.domain_norm.merging import merge_states
from cliquetta.methods.domain_norm.network import Network
from cliquetta.methods.domain_norm.prior import class_prior, information
from cliquetta.methods.domain_norm.state import PER_CLASS, State, ranges, start_state
from cliquetta.methods.domain_norm.step import Output, step, step_size
from cliquetta.methods.registry import register
from cliquetta.model.frozen import FrozenModel
from cliquetta.tensor_tree import flatten, map_tensors, unflatten
from cliquetta.types import Batch, Prediction


@register("domain_norm", paper="ours, after Zhang et al., CVPR 2025")
class DomainNorm(Adapter):
    """Visual LayerNorms per domain of the stream, learned and kept; recent images vote.

    Text stays fixed.
    """

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"visual-blocks"})
    config: DomainNormConfig

    def _setup(self) -> None:
        config = self.config
        self.network = Network(self.model, self.prompts, config)
        start = start_state(self.network, config)
        self.memory.declare_tree(start, ranges(config.domains, len(self.prompts)))
        self._like = map_tensors(lambda value: value.to("meta"), start)
        paths = flatten(self._like)
        self.class_free = frozenset(p for p in paths if not PER_CLASS.intersection(p.split(".")))
        self.ahead = Ahead(self.network, config, enabled=self.model.device.type == "cuda")

    @property
    def state(self) -> State:
        """What is remembered."""
        return unflatten(self._like, self.memory)

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        state = self.state
        state, output = step(state, batch.images, self.ahead.begin(state, batch.images))
        self.memory.store_tree(state)
        return Prediction(output.log_probabilities.float(), self._evidence(state, output))

    def _evidence(self, state: State, output: Output) -> dict[str, Any]:
        """How adaptation is doing, without labels."""
        lost = {"non_finite": output.not_finite} if output.not_finite else {}
        if output.figures is None:
            return lost
        domain, figures = state.domains[int(state.current)], output.figures
        moved = (domain.norms.values - self.network.theta).square().mean().sqrt()
        restarts = sum(int(one.progress.restarts) for one in state.domains)
        agreement, known = (
            None if math.isnan(value) else value
            for value in (figures.agreement, figures.information)
        )
        abstain = figures.information < self.config.abstain_below
        return lost | {
            "domain": int(state.current),
            "domains_in_batch": output.parts,
            "belief": figures.belief,
            "confidence": figures.confidence,
            "step_size": step_size(figures.confidence, self.config),
            "changed": output.changed,
            "agreement": agreement,
            "distance": moved,
            "information": known,
            "restarts": restarts,
            "abstained": sum(int(one.progress.abstained) for one in state.domains),
            "verdict": verdict(
                figures.confidence, figures.belief, agreement, restarts, abstain=abstain
            ),
        }

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """The health figures of a batch."""
        return {"images": len(prediction.logits), **health(prediction.evidence)}

    def _merge(
        self, states: Sequence[Mapping[str, Tensor]], start: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """One state from several, with the domains that are the same joined."""
        trees = [unflatten(self._like, state) for state in states]
        shared = None if start is None else unflatten(self._like, start)
        return flatten(merge_states(trees, shared, self.network, self.config))

    @torch.no_grad()
    def frozen_model(self) -> FrozenModel:
        """What a single image of the domain in use is predicted by, without learning.

        The domain's LayerNorms, its share of the zero-shot prediction, its class weights and the
        votes of the remembered images are built in. Assigning domains and the votes of other images
        of a batch need more than one image and are left out.
        """
        state, config = self.state, self.config
        domain = state.domains[int(state.current)]
        prior = class_prior(domain.counts, replace(config, recent_images=0.0))
        held = min(int(domain.voters.next), config.vote_memory)
        abstain = bool(information(domain.counts) < config.abstain_below)
        learned = domain.norms.steps > 0 and not abstain
        size = step_size(float(prior.confidence), config)
        return FrozenDomain(
            self.model,
            self.network.text,
            start=self.network.start,
            norms=self.network.late.named(domain.norms.values) if learned else {},
            zero_shot_share=config.zero_shot_share * (1 - size),
            weight=torch.ones_like(prior.weights) if abstain else prior.weights,
            voters=domain.voters.features[:held],
            votes=domain.voters.predictions[:held],
            vote=(0.0 if abstain else config.vote_share, config.neighbours),
        )
