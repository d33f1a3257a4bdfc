"""SubTTA: turn the span of the image features towards that of the texts, then adapt inside it.

Zeng et al., Subspace Alignment for Vision-Language Model Test-time Adaptation, 2026.
B_T are the principal directions of the class texts, B_V those of a moving average of
the batches' covariances of image features that starts at the texts' (eqs. 1, 2), the
first one left out in both. For every batch one step of AdamW on the LayerNorms of the
image tower brings the two spans together,

    L_align = r - |B_T B_Vᵀ|²;                                                            (4)

the features under the new norms are projected on the texts' span, v B_Tᵀ B_T (eq. 5),
normalised and labelled by the texts, and a second step raises the variance between the
classes of the batch (Mint's loss). The batch is predicted after both steps, from plain
features. What was learned stays.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.batclip import class_means
from cliquetta.methods.building.adam import AdamState, AdamWConfig, adam_step
from cliquetta.methods.building.config import Count, Decay, Positive
from cliquetta.methods.building.layernorm import LayerNormAdapter
from cliquetta.methods.building.memory import VARIANCE
from cliquetta.methods.building.registry import register
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Batch, Prediction

# Least gap of eigenvalues inside and outside a span, as a share of the largest.
SMALLEST_GAP = 1e-4
NOISE = 1e-5
"""Share of the largest gradient of (4) below which it is rounding, of which Adam would
make a full step: centred covariances do not see the bias of the final norm."""


@dataclass(frozen=True)
class SubTTAConfig(AdamWConfig):
    """Subspace alignment with its authors' setting for ImageNet-C, never reset."""

    lr: Positive = 5e-4  # Learning rate of AdamW.
    rank: Count = 256
    """r: dimensions of both spans; at most the number of classes less two."""
    momentum: Decay = 0.5  # α: weight of the past in the moving average of covariances.


def covariance(features: Tensor) -> Tensor:
    """Return the covariance (E, E) of features (B, E), float64; zero of one alone."""
    centred = (features - features.mean(dim=0)).double()
    return centred.T @ centred / max(1, len(features) - 1)


def principal_directions(covariance: Tensor, rank: int, skipped: int) -> Tensor:
    """Return the directions of most variance but the first, eq. (2).

    Args:
        covariance: (E, E).
        rank: r, their number.
        skipped: Number of directions that are left out before them.

    Returns:
        Basis (r, E).

    """
    ascending: Tensor = torch.linalg.eigh(covariance).eigenvectors
    return ascending.flip(1)[:, skipped : skipped + rank].T


def chordal_distance(
    covariance: Tensor, basis: Tensor, skipped: int
) -> tuple[Tensor, Tensor]:
    """Compare a covariance's principal span with that of ``basis``.

    Args:
        covariance: (E, E).
        basis: B_T (r, E).
        skipped: Number of first directions that are left out.

    Returns:
        r - |B_T B_Vᵀ|², eq. (4), and its gradient (E, E) by the covariance.

    """
    rank = len(basis)

    # largest eigenvalue first
    ascending = torch.linalg.eigh(covariance)
    values = ascending.eigenvalues.flip(-1)
    vectors = ascending.eigenvectors.flip(-1)

    # directions inside the span, B_Vᵀ, and outside of it
    is_inside = torch.zeros_like(values, dtype=torch.bool)
    is_inside[skipped : skipped + rank] = True
    inside = vectors[:, is_inside]
    outside = vectors[:, ~is_inside]

    # how far the texts' directions lie in each
    text_inside = basis @ inside  # B_T B_Vᵀ, (r, r)
    text_outside = basis @ outside  # (r, E - r)

    # eigenvectors turn into one another at a rate of one over the gap of their values;
    # a least gap keeps that finite where values coincide
    gap = values[is_inside, None] - values[None, ~is_inside]
    least = SMALLEST_GAP * values[0]
    gap = torch.where(gap.abs() < least, least.copysign(gap), gap)

    # the gradient, symmetric as the covariance
    rates = text_inside.T @ text_outside / gap
    half = inside @ rates @ outside.T
    return rank - text_inside.square().sum(), -(half + half.T)


def batch_variance(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Subtract the variance of features (B, E) within classes from the total."""
    means, _ = class_means(features, labels, classes)

    # from the mean of the batch, and from those of its classes
    total = (features - features.mean(dim=0)).square().sum(dim=-1)
    within = (features - means[labels]).square().sum(dim=-1)

    # what separates the classes
    return (total - within).mean()


@register(
    "subtta",
    tuned={
        "cifar10-c": SubTTAConfig(lr=1e-3, momentum=0.1),
        # by Adam, whose decay goes through the moments
        "cifar100-c": SubTTAConfig(rank=64),
    },
    setting="CLIP ViT-B/16, ImageNet-C",
    for_batches=True,
)
class SubTTA(LayerNormAdapter):
    """LayerNorm steps that align images with the span of the texts and separate classes in it."""

    scaled_cosines = True
    config: SubTTAConfig

    def _setup(self) -> None:
        super()._setup()
        AdamState.begin(self.tower.start).declare(self.memory, "norms")

        # the first direction of both spans is left out, if there are three classes
        classes, width = self.classifier.shape
        self.skipped = int(classes > 2)
        rank = min(self.config.rank, max(1, classes - 2), width - 1 - self.skipped)

        # B_T, float64
        texts = covariance(self.classifier)
        self.basis = principal_directions(texts, rank, self.skipped)

        # the average of the images' covariances starts at the texts'
        self.memory.declare("covariance", texts, VARIANCE)

    def _predict(self, batch: Batch) -> Prediction:
        state = AdamState.load(self.memory, "norms")
        state = self._align_step(state, batch.images)
        state = self._variance_step(state, batch.images)
        state.store(self.memory, "norms")

        # predicted after both steps, from plain features
        with torch.no_grad():
            logits = self.logits(state.values, batch.images)
        return Prediction(logits.float())

    def _align_step(self, state: AdamState, images: Tensor) -> AdamState:
        """Take the first step, which brings the spans of images and texts together."""
        with torch.enable_grad():
            norms = state.values.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.align(norms, images), norms)

        # what is rounding only, Adam would make a full step of
        size = gradient.abs()
        gradient = gradient * (size > NOISE * size.max())
        return adam_step(state, gradient, self.config.adam)

    def _variance_step(self, state: AdamState, images: Tensor) -> AdamState:
        """Take the second step, which separates classes inside the texts' span."""
        with torch.enable_grad():
            norms = state.values.detach().requires_grad_()

            # v B_Tᵀ B_T, eq. (5), normalised
            projector = (self.basis.T @ self.basis).to(norms.dtype)
            features = l2_normalize(self.tower(norms, images) @ projector)

            # labelled by the texts
            labels = (features.detach() @ self.classifier.T).argmax(dim=-1)

            # a batch of one predicted class has no variance between classes
            if (labels == labels[0]).all():
                return state

            # up the variance, Mint's loss
            variance = batch_variance(features, labels, len(self.prompts))
            (gradient,) = torch.autograd.grad(-variance, norms)
        return adam_step(state, gradient, self.config.adam)

    def align(self, norms: Tensor, images: Tensor) -> Tensor:
        """Return L_align, eq. (4), of a batch, which enters the moving average."""
        momentum = self.config.momentum
        arriving = covariance(self.tower(norms, images))
        average = torch.lerp(arriving, self.memory["covariance"], momentum)
        self.memory["covariance"] = average

        # the distance, with its gradient in closed form: the product has the gradient,
        # and its value is subtracted again
        distance, gradient = chordal_distance(
            average.detach(), self.basis, self.skipped
        )
        product = (average * gradient).sum()
        loss = distance + product - product.detach()

        # per dimension, and per share of the batch in the average
        size = len(self.basis) * (1 - momentum)
        return (loss / size).to(norms.dtype)
