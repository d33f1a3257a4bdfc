"""TPT: tune the context on each image so that its confident views agree.

Shu et al., Test-Time Prompt Tuning for Zero-Shot Generalization in Vision-Language
Models, NeurIPS 2022. For every image the context starts at the template's words, takes
one AdamW step down the marginal entropy of the tenth of its views that CLIP is surest
of, and scores the plain view. Every image starts anew.

Many images are tuned at once, each with a context of its own; AdamW works coordinate by
coordinate, so that stacked contexts step as if alone. Of several templates, which are
averaged, one is learned.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.config import Count, NonNegative, read_presets
from cliquetta.methods.building.entropy import marginal_entropy
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.template import LearnableTemplate
from cliquetta.methods.building.views import (
    SelectiveConfig,
    confident_views,
    take_views,
)
from cliquetta.methods.registry import register
from cliquetta.types import Prediction


@dataclass(frozen=True)
class TPTConfig(SelectiveConfig):
    """TPT with its authors' defaults."""

    lr: NonNegative = 5e-3
    """Learning rate of AdamW: about how far one step moves a coordinate."""
    weight_decay: NonNegative = 0.01
    """Weight decay of AdamW, PyTorch's default as theirs."""
    steps: Count = 1  # AdamW steps per image; views are selected before the first.
    text_chunk: Count = 1024
    """Texts (images x classes) encoded at once. Bounds memory only."""


@register("tpt", tuned=read_presets("tpt", TPTConfig))
class TPT(FeatureLevel):
    """Tunes the context words on each image so that its confident views agree."""

    needs = frozenset({"text-prompts"})
    config: TPTConfig

    def _setup(self) -> None:
        chunk = self.config.text_chunk
        self.template = LearnableTemplate(
            self.model, self.prompts, chunk=chunk, by=self.name
        )
        self.classifier = self.template.features(self.template.start[None])[0]  # (N, E)
        self.scale = self.model.scale

    def _predict_features(self, features: Tensor) -> Prediction:
        logits = self.scale * features @ self.classifier.T
        index = confident_views(logits, self.config.selection_fraction)
        context, loss = self.tune(take_views(features, index))
        text = self.template.features(context)  # (B, N, E)
        logits = self.scale * torch.einsum("be,bne->bn", features[:, 0], text)
        return Prediction(logits, {"selected_views": index, "loss": loss})

    def tune(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Contexts (B, M, D) learned on selected views (B, K, E), and losses (B,) at the start."""
        B, config = len(features), self.config
        adam = Adam(config.lr, weight_decay=config.weight_decay)
        state = AdamState.begin(self.template.start.repeat(B, 1, 1))
        first = torch.empty(0)
        for step in range(config.steps):
            context = state.values
            text = (
                self.template.features(context)
                if step
                else self.classifier.expand(B, -1, -1)
            )
            loss, gradient = self.gradient(features, context, text)
            state = adam_step(state, gradient, adam)
            first = first if step else loss
        return state.values, first

    def loss(self, features: Tensor, text: Tensor) -> Tensor:
        """Losses (B,) of selected views (B, K, E) under classifiers (B, N, E)."""
        return marginal_entropy(self.scale * features @ text.transpose(1, 2))

    def gradient(
        self, features: Tensor, context: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses (B,) and their gradients (B, M, D) by contexts whose classifiers are ``text``."""
        with torch.enable_grad():
            leaf = text.detach().requires_grad_()
            losses = self.loss(features, leaf)
            cotangent = torch.autograd.grad(losses.sum(), leaf)[0]
        return losses.detach(), self.template.gradient(context, cotangent)
