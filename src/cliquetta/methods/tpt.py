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
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.template import LearnableTemplate
from cliquetta.methods.building.views import (
    SelectiveConfig,
    confident_views,
    take_views,
)
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
        self.scale = self.model.scale
        self.template = LearnableTemplate(
            self.model, self.prompts, chunk=self.config.text_chunk, by=self.name
        )

        # with the context that every image starts from, (N, E)
        self.classifier = self.template.features(self.template.start[None])[0]

    def _predict_features(self, features: Tensor) -> Prediction:
        # the views that CLIP is surest of, by logits (B, V, N)
        logits = self.scale * features @ self.classifier.T
        index = confident_views(logits, self.config.selection_fraction)
        confident = take_views(features, index)

        # a context for each image
        context, loss = self.tune(confident)

        # the plain view is scored with the texts of its image, (B, N, E)
        text = self.template.features(context)
        logits = self.scale * torch.einsum("be,bne->bn", features[:, 0], text)
        return Prediction(logits, {"selected_views": index, "loss": loss})

    def tune(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Learn a context for each image from its selected views (B, K, E).

        Returns:
            Contexts (B, M, D), and losses (B,) at the start.

        """
        images = len(features)
        config = self.config
        adam = Adam(config.lr, weight_decay=config.weight_decay)

        # the template's words for every image
        state = AdamState.begin(self.template.start.repeat(images, 1, 1))

        # at the start all images have the same texts
        text = self.classifier.expand(images, -1, -1)
        first, gradient = self.gradient(features, state.values, text)
        state = adam_step(state, gradient, adam)

        # further steps on the same views
        for _ in range(config.steps - 1):
            text = self.template.features(state.values)
            _, gradient = self.gradient(features, state.values, text)
            state = adam_step(state, gradient, adam)
        return state.values, first

    def loss(self, features: Tensor, text: Tensor) -> Tensor:
        """Return losses (B,) of selected views (B, K, E) under texts (B, N, E)."""
        return marginal_entropy(self.scale * features @ text.transpose(1, 2))

    def gradient(
        self, features: Tensor, context: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Differentiate losses of selected views by contexts, whose texts are ``text``.

        Returns:
            Losses (B,), and gradients (B, M, D).

        """
        # by the texts first, then through the text tower
        with torch.enable_grad():
            leaf = text.detach().requires_grad_()
            losses = self.loss(features, leaf)
            (by_text,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), self.template.gradient(context, by_text)
