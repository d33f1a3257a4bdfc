"""The adapter owns the state; it saves, merges, freezes and explains what ``step`` makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.domain_norm.ahead import Ahead
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.frozen import FrozenDomain
from cliquetta.methods.domain_norm.health import describe, health
from cliquetta.methods.domain_norm.merging import PER_CLASS, merge_states, ranges
from cliquetta.methods.domain_norm.state import Network, State, start_state
from cliquetta.methods.domain_norm.step import step
from cliquetta.methods.registry import register
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
        """What is remembered."""
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
        if output.zero_shot is not None:
            evidence["zero_shot"] = output.zero_shot
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
        """What a single image of the domain in use is predicted by, without learning."""
        return FrozenDomain(self.model, self.network, self.state, self.config)
