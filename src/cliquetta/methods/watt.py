"""WATT: adapt visual LayerNorms under several templates and average the weights.

Osowiechi et al., WATT: Weight Average Test-Time Adaptation of CLIP, NeurIPS 2024. The
loss is CLIPArTT's with the text of each image's likeliest class, in one of eight
templates at a time. For every batch the norms start from the loaded ones.
``sequential`` (WATT-S): two steps of Adam under each template after the other, then the
average of the eight results is the start of the next of five rounds. ``parallel``
(WATT-P, preset): each template starts from the round's common weights, fifty rounds.
The batch is predicted under the last average by the templates' mean text.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.adam import AdamConfig, AdamState, minimize
from cliquetta.methods.building.config import Count, Positive, Template
from cliquetta.methods.building.layernorm import EpisodicLayerNormAdapter
from cliquetta.methods.building.registry import register
from cliquetta.methods.clipartt import transductive_loss
from cliquetta.model.clip import l2_normalize
from cliquetta.prompts.classes import ClassPrompts

TEMPLATES = (
    "a photo of a {}",
    "itap of a {}",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)


@dataclass(frozen=True)
class WATTConfig(AdamConfig):
    """Weight averages over templates; LayerNorms reset for every batch."""

    mode: Literal["sequential", "parallel"] = "sequential"
    """``sequential`` carries weights from template to template, ``parallel`` starts each alike."""
    steps: Count = 2  # Adam steps under each template.
    rounds: Count = 5
    """Passes over all templates, each followed by averaging; 50 for ``parallel``."""
    temperature: Positive = 0.01
    """Divides the similarities in the softmax of the targets."""
    templates: tuple[Template, ...] = TEMPLATES
    """Templates to adapt under; the class texts used to predict are their mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.templates:
            raise UserError(
                "no templates: give at least one, such as 'a photo of a {}'"
            )


@register(
    "watt",
    presets={
        "parallel": WATTConfig(mode="parallel", rounds=50),
        # The authors' rate on everything but the CIFAR sets.
        "large-images": WATTConfig(lr=1e-4),
    },
)
class WATT(EpisodicLayerNormAdapter):
    """CLIPArTT's loss under eight templates, averaging the LayerNorms they lead to."""

    config: WATTConfig

    def _setup(self) -> None:
        if self.prompts.features is not None:
            raise UserError(
                "watt writes class names in its own templates, but the class list has "
                "fixed text features; give it names only"
            )
        classifiers = []
        for template in self.config.templates:
            prompts = ClassPrompts(
                self.prompts.names, (template,), allow_duplicates=True
            )
            classifiers.append(self.model.classifier(prompts))
        self.texts = torch.stack(classifiers)  # (T, N, E)

        # predictions are by the templates' mean text
        super()._setup()
        self.classifier = l2_normalize(self.texts.mean(dim=0))

    def adapt(self, images: Tensor) -> Tensor:
        """Return flat LayerNorm parameters after all rounds on one batch."""
        is_parallel = self.config.mode == "parallel"
        start = AdamState.begin(self.tower.start)
        state = start
        average = start.values
        for round_ in range(self.config.rounds):
            state = state._replace(values=average)
            reached = []
            for texts in self.texts:
                # WATT-P: every template starts from the common weights of the round
                if is_parallel:
                    state = start if round_ == 0 else state._replace(values=average)
                state = self._minimize(state, images, texts)
                reached.append(state.values)
            average = torch.stack(reached).mean(dim=0)
        return average

    def _minimize(self, state: AdamState, images: Tensor, texts: Tensor) -> AdamState:
        """Take the steps under one template, whose class texts are ``texts`` (N, E)."""
        config = self.config

        def loss(norms: Tensor) -> Tensor:
            features = self.features(norms, images)

            # the text of each image's likeliest class
            labels = (features.detach() @ texts.T).argmax(dim=-1)
            return transductive_loss(
                images=features,
                texts=texts[labels],
                scale=self.scale,
                temperature=config.temperature,
            )

        return minimize(state, loss, config.steps, config.adam)
