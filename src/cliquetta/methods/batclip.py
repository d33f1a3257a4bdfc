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
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.building.adam import AdamState, AdamWConfig, adam_step
from cliquetta.methods.building.config import Positive
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.layernorm import LayerNormTower
from cliquetta.methods.registry import register
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
    """Mean feature (N, E) of each class, zero where there is none, and which are there (N,)."""
    member = F.one_hot(labels, classes).to(features.dtype)  # (B, N)
    counts = member.sum(dim=0)
    return member.T @ features / counts.clamp_min(1)[:, None], counts > 0


def projection_matching(means: Tensor, present: Tensor, text: Tensor) -> Tensor:
    """Mean over the classes present of (class mean)·(unit text feature)."""
    return (means * text).sum(dim=-1)[present].mean()


def inter_class_separation(means: Tensor, present: Tensor) -> Tensor:
    """C² - |Σ u|²: sum over ordered pairs of classes present of 1 - cos of their means u."""
    units = F.normalize(means[present], dim=-1)
    return len(units) ** 2 - units.sum(dim=0).square().sum()


def batclip_loss(logits: Tensor, features: Tensor, text: Tensor) -> Tensor:
    """The loss of a batch: logits (B, N), raw image features (B, E), unit text features (N, E)."""
    means, present = class_means(features, logits.argmax(dim=-1), logits.shape[1])
    matching = projection_matching(means, present, text)
    return entropy(logits).mean() - matching - inter_class_separation(means, present)


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
        model, prompts, config = self.model, self.prompts, self.config
        if config.adapt_text and (model.text is None or prompts.features is not None):
            raise UserError(
                "batclip learns the text tower's LayerNorms, but text is fixed here; give it a "
                "model with a text tower and class names, or set adapt_text=False"
            )
        self.scale = model.scale
        self.images = LayerNormTower(model.visual)
        AdamState.begin(self.images.start).declare(self.memory, "image_norms")
        if config.adapt_text:
            self.texts = LayerNormTower(model.require_text())
            AdamState.begin(self.texts.start).declare(self.memory, "text_norms")
            texts = (prompts.texts(template) for template in prompts.templates)
            self.ids = [model.tokenizer(some).to(model.device) for some in texts]
        else:
            self.fixed = model.classifier(prompts)

    def _predict(self, batch: Batch) -> Prediction:
        names = (
            ["image_norms", "text_norms"] if self.config.adapt_text else ["image_norms"]
        )
        learned = [AdamState.load(self.memory, name) for name in names]
        with torch.enable_grad():
            values = [part.values.detach().requires_grad_() for part in learned]
            features = self.images(values[0], batch.images)
            text = self.classifier(values[1]) if self.config.adapt_text else self.fixed
            logits = self.scale * self.model.unit_image(features) @ text.T
            loss = batclip_loss(logits, features, text)
            gradients = torch.autograd.grad(loss, values)
        for name, part, gradient in zip(names, learned, gradients, strict=True):
            adam_step(part, gradient, self.config.adam).store(self.memory, name)
        return Prediction(logits.detach().float(), {"loss": loss.detach()})

    def classifier(self, norms: Tensor) -> Tensor:
        """Unit text classifier (N, E) under flat LayerNorm parameters of the text tower."""
        each = [l2_normalize(self.texts(norms, ids)) for ids in self.ids]
        return l2_normalize(torch.stack(each).mean(dim=0))

    @torch.no_grad()
    def frozen_model(self) -> FrozenModel:
        """The image tower and the texts under the norms learned so far."""
        visual = self.images.frozen(self.memory["image_norms.values"])
        adapted = self.config.adapt_text
        text = (
            self.classifier(self.memory["text_norms.values"]) if adapted else self.fixed
        )
        return FrozenModel(self.model, text, visual=visual)
