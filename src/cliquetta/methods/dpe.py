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

from cliquetta.methods.building.adam import Adam, AdamState, minimize
from cliquetta.methods.building.base import BatchDependence
from cliquetta.methods.building.cache import declare, insert
from cliquetta.methods.building.config import Count, NonNegative, read_presets
from cliquetta.methods.building.entropy import entropy, marginal_entropy
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.memory import SHORT
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import (
    SelectiveConfig,
    ViewKind,
    confident_views,
    take_views,
)
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
    """Return InfoNCE of visual prototypes (C, E), whose positives are texts (C, E)."""
    cosines = F.normalize(visual, dim=-1) @ F.normalize(text, dim=-1).T

    # the positive of a prototype is the text of its class
    positives = torch.arange(len(visual), device=visual.device)
    return F.cross_entropy(cosines / CONTRAST_TEMPERATURE, positives)


@register("dpe", tuned=read_presets("dpe", DPEConfig), setting="ImageNet")
class DPE(FixedText):
    """Text and visual prototypes step together on each image; sure text steps are kept."""

    batch_dependence = BatchDependence.SEQUENTIAL
    config: DPEConfig

    def _setup(self) -> None:
        super()._setup()
        self.adam = Adam(
            self.config.lr,
            eps=EPS,
            weight_decay=self.config.weight_decay,
        )

        # the running mean of the text prototypes, and how many have entered it
        self.memory.declare("text", self.classifier, SHORT)
        self.memory.declare("updates", torch.zeros((), dtype=torch.long))

        # the surest images of every predicted class
        declare(self.memory, self.classifier, self.config.capacity, keys=SHORT)

    def _predict_features(self, features: Tensor) -> Prediction:
        logits = [self._predict_image(views) for views in features]
        return Prediction(torch.stack(logits).float())

    def _predict_image(self, views: Tensor) -> Tensor:
        """Predict one image whose views are (V, E): logits (N,)."""
        config = self.config
        text = self.memory["text"]
        feature = self._cache(views, F.normalize(text, dim=-1))
        visual, present = self._visual_prototypes()

        def prototypes(residuals: Tensor) -> tuple[Tensor, Tensor]:
            """Return unit t (N, E) and v (C, E) with their residuals (N + C, E)."""
            # residuals of all texts come first
            t = F.normalize(text + residuals[: len(text)], dim=-1)
            v = F.normalize(visual + residuals[len(text) :], dim=-1)
            return t, v

        def loss(residuals: Tensor) -> Tensor:
            """Return H(scale f·t + α exp(-β (1 - f·v))) + a · InfoNCE(v, t)."""
            t, v = prototypes(residuals)
            uncertainty = entropy(self._scores(feature, t, v, present))

            # v has the classes with a cache only
            return uncertainty + config.alignment_weight * alignment(v, t[present])

        # one AdamW step on the residuals of all prototypes, from zero
        zeros = torch.zeros_like(torch.cat([text, visual]))
        state = minimize(AdamState.begin(zeros), loss, 1, self.adam)
        t, v = prototypes(state.values)

        # the plain view, or the confident ones, are scored with the shifted prototypes
        if config.scored == "plain":
            scored = views[0]
        else:
            scored = self._confident(views, t).mean(dim=0)
        logits = self._scores(scored, t, v, present)

        # a sure prediction's text prototypes enter the running mean
        if float(entropy(logits)) < config.update_threshold * math.log2(len(text)):
            updates = self.memory["updates"] + 1
            self.memory["updates"] = updates
            self.memory["text"] = torch.lerp(text, t, 1 / (int(updates) + 1))
        return logits

    def _cache(self, views: Tensor, text: Tensor) -> Tensor:
        """Offer the mean (E,) of the confident views to the cache; return it."""
        confident = self._confident(views, text)
        feature = confident.mean(dim=0)

        # the class that the views predict, and how surely they do
        logits = self.scale * confident @ text.T
        label = logits.mean(dim=0).argmax(dim=-1, keepdim=True)
        offered = marginal_entropy(logits)[None]

        insert(self.memory, label, offered, {"keys": feature[None]})
        return feature

    def _visual_prototypes(self) -> tuple[Tensor, Tensor]:
        """Average the cache by class: prototypes (C, E) of the classes (C,) in it."""
        filled = self.memory["entropy"].isfinite()  # (N, K)

        # v_k, the mean of what is cached of a class
        keys = self.memory["keys"] * filled[:, :, None]
        counts = filled.sum(dim=1).clamp_min(1)
        means = keys.sum(dim=1) / counts[:, None]

        # only of classes with entries
        present = filled.any(dim=1).nonzero()[:, 0]
        return means[present], present

    def _confident(self, views: Tensor, text: Tensor) -> Tensor:
        """Choose the views (K, E) of which unit texts (N, E) are surest."""
        logits = self.scale * views @ text.T
        index = confident_views(logits, self.config.selection_fraction)
        return take_views(views, index)

    def _scores(
        self, feature: Tensor, text: Tensor, visual: Tensor, present: Tensor
    ) -> Tensor:
        """Return logits (N,) of a feature (E,), by texts and by visual prototypes."""
        # exp(-β (1 - f·v)), (C,)
        closeness = ((feature @ visual.T - 1) * self.config.beta).exp()

        # classes without a visual prototype have their text only
        logits = self.scale * feature @ text.T
        return logits.index_add(0, present, self.config.alpha * closeness)
