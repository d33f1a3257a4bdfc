"""BATCLIP: adapt the LayerNorms of both towers so that the classes of a batch separate.

Maharana et al., BATCLIP: Bimodal Online Test-Time Adaptation for CLIP, ICCV 2025. One
AdamW step per batch on all LayerNorms of image and text tower, down

    mean entropy - mean over predicted classes of m_c·t_c - sum over c ≠ d of (1 - cos(m_c, m_d))

with m_c the mean image feature of the images predicted as c, **before** normalisation,
and t_c the unit text feature. The prediction is that of the forward pass before the
step, which stays. The authors reset at every change of corruption: call ``reset`` where
a stream is known to change.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.adam import AdamState, AdamWConfig, adam_step
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.config import Positive
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.layernorm import LayerNormTower
from cliquetta.methods.building.registry import register
from cliquetta.model.clip import FrozenModel, l2_normalize
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class BATCLIPConfig(AdamWConfig):
    """Bimodal adaptation of LayerNorms, never reset."""

    lr: Positive = 5e-4
    """Learning rate of AdamW; the default is the authors' for ImageNet-C."""
    adapt_text: bool = True
    """Also adapt the text tower's LayerNorms; otherwise class texts stay."""


def class_means(
    features: Tensor, labels: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Average the features (B, E) of each class: means (N, E), and its presence (N,).

    The mean of an absent class is zero.
    """
    # which image is of which class, (B, N)
    member = F.one_hot(labels, classes).to(features.dtype)
    counts = member.sum(dim=0)

    # an absent class divides its zero sum by one
    sums = member.T @ features
    means = sums / counts.clamp_min(1)[:, None]
    return means, counts > 0


def projection_matching(means: Tensor, present: Tensor, text: Tensor) -> Tensor:
    """Average (class mean)·(unit text feature) over the classes present."""
    products = (means * text).sum(dim=-1)  # (N,)
    return products[present].mean()


def inter_class_separation(means: Tensor, present: Tensor) -> Tensor:
    """Sum 1 - cos of the means u over ordered pairs of classes present: C² - |Σ u|²."""
    units = F.normalize(means[present], dim=-1)  # (C, E)

    # Σ_c Σ_d u_c·u_d, where a class with itself adds 1 to both terms
    cosines = units.sum(dim=0).square().sum()
    return len(units) ** 2 - cosines


def batclip_loss(logits: Tensor, features: Tensor, text: Tensor) -> Tensor:
    """Return the loss of a batch.

    Args:
        logits: (B, N), whose largest is an image's predicted class.
        features: Raw image features (B, E).
        text: Unit text features (N, E).

    """
    # m_c, the mean feature of the images predicted as c
    labels = logits.argmax(dim=-1)
    means, present = class_means(features, labels, logits.shape[1])

    # predictions are certain, class means close to their texts and far from one another
    uncertainty = entropy(logits).mean()
    matching = projection_matching(means, present, text)
    separation = inter_class_separation(means, present)
    return uncertainty - matching - separation


@register(
    "batclip",
    tuned={"cifar10": BATCLIPConfig(lr=1e-3)},
    setting="CLIP, ImageNet-C",
    for_batches=True,
)
class BATCLIP(Adapter):
    """One step per batch on the LayerNorms of both towers: certain, matched, separated."""

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"norm"})
    merge_rules = (("image_norms", "mean"), ("text_norms", "mean"))
    class_free = AdamState.names("image_norms") | AdamState.names("text_norms")
    scaled_cosines = True
    config: BATCLIPConfig

    def _setup(self) -> None:
        model = self.model
        prompts = self.prompts
        adapt_text = self.config.adapt_text
        if adapt_text and (model.text is None or prompts.features is not None):
            raise UserError(
                "batclip learns the text tower's LayerNorms, but text is fixed here; "
                "give it a model with a text tower and class names, or set "
                "adapt_text=False"
            )

        self.scale = model.scale
        self.images = LayerNormTower(model.visual)
        AdamState.begin(self.images.start).declare(self.memory, "image_norms")
        self.norm_names = ["image_norms"]

        # otherwise class texts stay
        if not adapt_text:
            self.fixed = model.classifier(prompts)
            return
        self.texts = LayerNormTower(model.require_text())
        AdamState.begin(self.texts.start).declare(self.memory, "text_norms")
        self.norm_names.append("text_norms")

        # of the class texts in each template
        self.ids = [
            model.tokenizer(prompts.texts(template)).to(model.device)
            for template in prompts.templates
        ]

    def _predict(self, batch: Batch) -> Prediction:
        states = [AdamState.load(self.memory, name) for name in self.norm_names]
        with torch.enable_grad():
            norms = [state.values.detach().requires_grad_() for state in states]
            features = self.images(norms[0], batch.images)
            if self.config.adapt_text:
                text = self.classifier(norms[1])
            else:
                text = self.fixed

            # the forward pass before the step is the prediction
            units = self.model.unit_image(features)
            logits = self.scale * units @ text.T

            # class means are of features that are not normalised
            loss = batclip_loss(logits, features, text)
            gradients = torch.autograd.grad(loss, norms)

        # one AdamW step on the norms of each tower, which stays
        for name, state, gradient in zip(
            self.norm_names, states, gradients, strict=True
        ):
            stepped = adam_step(state, gradient, self.config.adam)
            stepped.store(self.memory, name)
        return Prediction(logits.detach().float(), {"loss": loss.detach()})

    def classifier(self, norms: Tensor) -> Tensor:
        """Encode the class texts (N, E) under LayerNorms of the text tower."""
        templates = [l2_normalize(self.texts(norms, ids)) for ids in self.ids]
        return l2_normalize(torch.stack(templates).mean(dim=0))

    @torch.no_grad()
    def frozen_model(self) -> FrozenModel:
        """Freeze the image tower and the texts under the norms learned so far."""
        visual = self.images.frozen(self.memory["image_norms.values"])
        if self.config.adapt_text:
            text = self.classifier(self.memory["text_norms.values"])
        else:
            text = self.fixed
        return FrozenModel(self.model, text, visual=visual)
