"""The adapter owns the state; it saves, merges, freezes and explains what ``step`` makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.layernorm import LateBlocks
from cliquetta.methods.building.registry import register
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.health import describe, health
from cliquetta.methods.domain_norm.merging import PER_CLASS, merge_states, ranges
from cliquetta.methods.domain_norm.prior import class_prior
from cliquetta.methods.domain_norm.state import Network, State, start_state
from cliquetta.methods.domain_norm.step import Setup, step, weigh
from cliquetta.model.clip import CLIP, FrozenModel, l2_normalize
from cliquetta.model.cuda import Replayed
from cliquetta.model.vision import VisionTower
from cliquetta.tensor_tree import flatten, map_tensors, unflatten
from cliquetta.types import Batch, Prediction


@register("domain_norm", paper="ours, after Zhang et al., CVPR 2025")
class DomainNorm(Adapter):
    """Visual LayerNorms per domain of the stream, learned and kept, with its class prior."""

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"visual-blocks"})
    config: DomainNormConfig

    def _setup(self) -> None:
        self.network = Network(self.model, self.prompts)
        self.setup = Setup(network=self.network, config=self.config, run=Replayed())

        # The memory is the state's tensors by their paths in the tree.
        start = start_state(self.network, self.config)
        self.memory.declare_tree(start, ranges(self.config.domains))
        self._like = map_tensors(lambda value: value.to("meta"), start)

        # What another class list leaves as it is.
        class_free = []
        for path in flatten(start):
            names = set(path.split("."))
            if not PER_CLASS & names:
                class_free.append(path)
        self.class_free = frozenset(class_free)

    @property
    def state(self) -> State:
        """The state as a tree."""
        return unflatten(self._like, self.memory)

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        state, output = step(self.state, batch.images, self.setup)
        self.memory.store_tree(state)
        evidence = describe(state, output, self.network)
        if output.not_finite:
            evidence["non_finite"] = output.not_finite
        return Prediction(output.log_probabilities.float(), evidence)

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """The figures of a batch."""
        return {"images": len(prediction.logits), **health(prediction.evidence)}

    def _merge(
        self, states: Sequence[Mapping[str, Tensor]], start: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        trees = [unflatten(self._like, state) for state in states]
        shared = None if start is None else unflatten(self._like, start)
        merged = merge_states(trees, shared, self.network, self.config)
        return flatten(merged)

    @torch.no_grad()
    def frozen_model(self) -> FrozenDomain:
        """Freeze the domain in use: predicts single images, without learning."""
        return FrozenDomain(self.model, self.network, self.state, self.config)


class FrozenDomain(FrozenModel):
    """Log-probabilities of single images by the LayerNorms and class prior of the domain in use.

    Assigning domains and recognising bursts need more than one image.
    """

    temperature: Tensor
    log_weights: Tensor

    def __init__(
        self, model: CLIP, network: Network, state: State, config: DomainNormConfig
    ) -> None:
        super().__init__(model, network.text)
        domain = state.in_use()
        self.prior = class_prior(domain.counts, replace(config, recent_images=0.0))
        norms = (
            network.late.named(domain.norms.values) if domain.norms.steps > 0 else {}
        )
        self.start = network.start
        self.norms = tuple(norms)
        for number, value in enumerate(norms.values()):
            self.register_buffer(f"norm_{number}", value.clone())
        self.register_buffer("temperature", domain.temperature.clone())
        self.register_buffer("log_weights", self.prior.log_weights.clone())

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (B, N)."""
        tower = self.visual
        assert isinstance(tower, VisionTower)
        late = LateBlocks(tower, self.start)
        hidden = tower.run(tower.embed(pixels), 0, self.start)
        norms = {
            name: getattr(self, f"norm_{number}").to(hidden.dtype)
            for number, name in enumerate(self.norms)
        }
        features = l2_normalize(functional_call(late, norms, (hidden,)))
        logits = self.text_logits(features) / self.temperature
        return (
            weigh(logits, self.prior._replace(log_weights=self.log_weights)) + self.bias
        )
