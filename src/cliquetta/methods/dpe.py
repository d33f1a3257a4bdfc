"""DPE: text and visual prototypes that evolve together over the stream.

Zhang et al., Dual Prototype Evolving for Test-Time Generalization of Vision-Language
Models, NeurIPS 2024. The three surest images of every predicted class are cached; their
mean is the class's visual prototype v_k. For each image residuals of all prototypes
start at zero and take one AdamW step down

    H( scale f·t + α exp(-β (1 - f·v)) ) + a · InfoNCE(v, t)

where t and v are the prototypes with their residuals, normalised, and the contrast at
temperature 0.01 pairs the two prototypes of each class that has both. The plain view is
scored with them; if that prediction is sure, the text prototypes enter the running mean
that the next image starts from.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.base import BatchDependence
from cliquetta.methods.building.adam import Adam, AdamState, minimize
from cliquetta.methods.building.cache import declare, insert
from cliquetta.methods.building.config import Count, NonNegative, read_presets
from cliquetta.methods.building.entropy import entropy, marginal_entropy
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.memory import SHORT
from cliquetta.methods.building.views import (
    SelectiveConfig,
    ViewKind,
    confident_views,
    take_views,
)
from cliquetta.methods.registry import register
from cliquetta.types import Prediction

CONTRAST_TEMPERATURE = 0.01
EPS = 1e-3


@dataclass(frozen=True)
class DPEConfig(SelectiveConfig):
    """Dual prototypes with their authors' setting for ImageNet."""

    view_kind: ViewKind = "augmix"
    capacity: Count = 3  # Images cached per class.
    alpha: NonNegative = 6.0  # α: weight of the visual prototypes.
    beta: NonNegative = 5.0  # β: how fast a prototype's weight falls with its distance.
    lr: NonNegative = 6e-4  # Learning rate of AdamW for both residuals.
    weight_decay: NonNegative = 0.1
    """Weight decay of AdamW; idle in the one step from zero."""
    alignment_weight: NonNegative = 0.5
    """a: weight of the contrast between the prototypes."""
    scored: Literal["plain", "confident"] = "plain"
    """View that is scored: the plain one, or the mean of the confident ones (ImageNet-A)."""
    update_threshold: NonNegative = 0.1
    """Entropy over log2 of the number of classes below which text prototypes are remembered."""


def alignment(visual: Tensor, text: Tensor) -> Tensor:
    """InfoNCE of visual prototypes (C, E) as queries and texts (C, E) as their positives."""
    cosines = F.normalize(visual, dim=-1) @ F.normalize(text, dim=-1).T
    own = torch.arange(len(visual), device=visual.device)
    return F.cross_entropy(cosines / CONTRAST_TEMPERATURE, own)


@register("dpe", tuned=read_presets("dpe", DPEConfig), setting="ImageNet")
class DPE(FixedText):
    """Text and visual prototypes step together on each image; sure text steps are kept."""

    batch_dependence = BatchDependence.SEQUENTIAL
    config: DPEConfig

    def _setup(self) -> None:
        super()._setup()
        self.adam = Adam(self.config.lr, eps=EPS, weight_decay=self.config.weight_decay)
        self.memory.declare("text", self.classifier, SHORT)
        self.memory.declare("updates", torch.zeros((), dtype=torch.long))
        declare(self.memory, self.classifier, self.config.capacity, keys=SHORT)

    def _predict_features(self, features: Tensor) -> Prediction:
        return Prediction(
            torch.stack([self._predict_image(views) for views in features]).float()
        )

    def _predict_image(self, views: Tensor) -> Tensor:
        """Logits (N,) of one image whose views are (V, E)."""
        config, memory = self.config, self.memory
        text = memory["text"]
        sure = self._confident(views, F.normalize(text, dim=-1))
        feature, logits = (
            sure.mean(dim=0),
            self.scale * sure @ F.normalize(text, dim=-1).T,
        )
        label = logits.mean(dim=0).argmax(dim=-1, keepdim=True)
        insert(memory, label, marginal_entropy(logits)[None], {"keys": feature[None]})
        filled = memory["entropy"].isfinite()
        present = filled.any(dim=1).nonzero()[:, 0]
        sums = (memory["keys"] * filled[:, :, None]).sum(dim=1)
        visual = (sums / filled.sum(dim=1).clamp_min(1)[:, None])[present]

        def loss(residuals: Tensor) -> Tensor:
            t = F.normalize(text + residuals[: len(text)], dim=-1)
            v = F.normalize(visual + residuals[len(text) :], dim=-1)
            scores = self._scores(feature, t, v, present)
            return entropy(scores) + config.alignment_weight * alignment(v, t[present])

        start = AdamState.begin(text.new_zeros(len(text) + len(present), text.shape[1]))
        residuals = minimize(start, loss, 1, self.adam).values
        t = F.normalize(text + residuals[: len(text)], dim=-1)
        v = F.normalize(visual + residuals[len(text) :], dim=-1)
        scored = (
            views[0]
            if config.scored == "plain"
            else self._confident(views, t).mean(dim=0)
        )
        final = self._scores(scored, t, v, present)
        if float(entropy(final)) < config.update_threshold * math.log2(len(text)):
            memory["updates"] = memory["updates"] + 1
            memory["text"] = torch.lerp(text, t, 1 / (int(memory["updates"]) + 1))
        return final

    def _confident(self, views: Tensor, text: Tensor) -> Tensor:
        """The views (K, E) among (V, E) that unit texts (N, E) predict most surely."""
        logits = self.scale * views @ text.T
        return take_views(
            views, confident_views(logits, self.config.selection_fraction)
        )

    def _scores(
        self, feature: Tensor, text: Tensor, visual: Tensor, present: Tensor
    ) -> Tensor:
        """Logits (N,) of a feature (E,): those of all texts, and of the visual prototypes."""
        closeness = (
            (feature @ visual.T - 1) * self.config.beta
        ).exp()  # exp(-β (1 - f·v))
        return (self.scale * feature @ text.T).index_add(
            0, present, self.config.alpha * closeness
        )
