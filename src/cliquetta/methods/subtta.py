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
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.adam import AdamState, AdamWConfig, adam_step
from cliquetta.methods.building.config import Count, Decay, Positive
from cliquetta.methods.building.layernorm import LayerNormAdapter
from cliquetta.methods.building.memory import VARIANCE
from cliquetta.methods.registry import register
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Batch, Prediction

# Least gap of eigenvalues inside and outside a span, by the largest.
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
    """Covariance (E, E) of features (B, E), float64; zero of a single one."""
    centred = (features - features.mean(dim=0)).double()
    return centred.T @ centred / max(1, len(features) - 1)


def principal_directions(covariance: Tensor, rank: int, skipped: int) -> Tensor:
    """Basis (rank, E) of the largest eigenvalues of (E, E) but the ``skipped`` first, eq. (2)."""
    vectors: Tensor = torch.linalg.eigh(covariance).eigenvectors
    return vectors.flip(1)[:, skipped : skipped + rank].T


def chordal_distance(
    covariance: Tensor, basis: Tensor, skipped: int
) -> tuple[Tensor, Tensor]:
    """Squared distance (4) of a covariance's principal span from ``basis``; its gradient."""
    rank = len(basis)
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(covariance))
    inside = torch.zeros_like(values, dtype=torch.bool)
    inside[skipped : skipped + rank] = True
    outer, inner = vectors[:, ~inside], vectors[:, inside]
    seen_inner, seen_outer = basis @ inner, basis @ outer  # (r, r), (r, E - r)
    gap = values[inside, None] - values[None, ~inside]
    least = SMALLEST_GAP * values[0]
    gap = torch.where(gap.abs() < least, least.copysign(gap), gap)
    half = inner @ (seen_inner.T @ seen_outer / gap) @ outer.T
    return rank - seen_inner.square().sum(), -(half + half.T)


def batch_variance(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean squared distance of features (B, E) from their mean, less that from their class's."""
    member = F.one_hot(labels, classes).to(features.dtype)
    means = member.T @ features / member.sum(dim=0).clamp_min(1)[:, None]
    total = (features - features.mean(dim=0)).square().sum(dim=-1)
    return (total - (features - means[labels]).square().sum(dim=-1)).mean()


@register(
    "subtta",
    tuned={
        "cifar10-c": SubTTAConfig(lr=1e-3, momentum=0.1),
        "cifar100-c": SubTTAConfig(
            rank=64
        ),  # by Adam, whose decay goes through the moments
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
        N, E = self.classifier.shape
        self.skipped = int(N > 2)
        rank = min(self.config.rank, max(1, N - 2), E - 1 - self.skipped)
        texts = covariance(self.classifier)
        self.basis = principal_directions(texts, rank, self.skipped)  # float64
        AdamState.begin(self.tower.start).declare(self.memory, "norms")
        self.memory.declare("covariance", texts, VARIANCE)

    def _predict(self, batch: Batch) -> Prediction:
        state, adam = AdamState.load(self.memory, "norms"), self.config.adam
        with torch.enable_grad():
            norms = state.values.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.align(norms, batch.images), norms)
        gradient = gradient * (gradient.abs() > NOISE * gradient.abs().max())
        state = adam_step(state, gradient, adam)

        with torch.enable_grad():
            norms = state.values.detach().requires_grad_()
            projector = (self.basis.T @ self.basis).to(norms.dtype)
            features = l2_normalize(self.tower(norms, batch.images) @ projector)
            labels = (features.detach() @ self.classifier.T).argmax(dim=-1)
            if (labels != labels[0]).any():
                variance = batch_variance(features, labels, len(self.prompts))
                (gradient,) = torch.autograd.grad(-variance, norms)
                state = adam_step(state, gradient, adam)
        state.store(self.memory, "norms")
        with torch.no_grad():
            return Prediction(self.logits(state.values, batch.images).float())

    def align(self, norms: Tensor, images: Tensor) -> Tensor:
        """L_align of a batch, which enters the moving average."""
        own, momentum = covariance(self.tower(norms, images)), self.config.momentum
        moved = torch.lerp(own, self.memory["covariance"], momentum)
        self.memory["covariance"] = moved
        distance, gradient = chordal_distance(moved.detach(), self.basis, self.skipped)
        pulled = (moved * gradient).sum()  # has the gradient, not the value
        size = len(self.basis) * (1 - momentum)
        return ((distance + pulled - pulled.detach()) / size).to(norms.dtype)
