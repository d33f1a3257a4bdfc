"""SubTTA: turn the span of the image features towards that of the texts, then adapt inside it.

Zeng et al., Subspace Alignment for Vision-Language Model Test-time Adaptation, 2026. B_T are the
top r eigenvectors of the texts' TᵀT, B_V those of a moving average of the batches' VᵀV that starts
at the texts' (eqs. 1, 2). For every batch one step of Adam on the LayerNorms of the image tower
lowers the squared chordal distance of the two spans,

    L_align = r - |B_T B_Vᵀ|²,                                                            (4)

then the features under the new norms are projected on the texts' span, v B_Tᵀ B_T (eq. 5), the
batch is answered with them, and a second step lowers a usual loss of theirs: BATCLIP's on the image
side (``batclip``) or entropy (``tent``). What was learned stays.

Written from the paper; the licence of its repository is unknown and it was not opened. Left open
there and chosen here: at most 64 dimensions (never more than classes), a moving average of weight
0.5, one Adam at 1e-3 for both steps. The gradient of (4) is taken in closed form, which stays
finite where eigenvalues inside a span coincide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cliquetta.methods._shared.adam import AdamConfig, AdamState, minimize
from cliquetta.methods._shared.config import Count, Fraction
from cliquetta.methods._shared.entropy import entropy
from cliquetta.methods._shared.layernorm import LayerNormAdapter
from cliquetta.methods.batclip import batclip_loss
from cliquetta.methods.registry import register
from cliquetta.model.clip import l2_normalize
from cliquetta.model.frozen import FrozenModel
from cliquetta.types import Batch, Prediction

SMALLEST_GAP = 1e-4
"""Least difference of eigenvalues inside and outside a span, as a share of the largest."""


@dataclass(frozen=True)
class SubTTAConfig(AdamConfig):
    """Subspace alignment, never reset."""

    rank: Count = 64
    """r: dimensions of both spans; at most the number of classes."""
    average_weight: Fraction = 0.5
    """α: weight of a batch in the moving average of image features' products."""
    objective: Literal["batclip", "tent"] = "batclip"
    """Loss of the second step."""


def top_eigenvectors(products: Tensor, rank: int) -> Tensor:
    """Orthonormal basis (rank, E) of the span of the largest eigenvalues of (E, E), eq. (2)."""
    vectors: Tensor = torch.linalg.eigh(products).eigenvectors
    return vectors[:, -rank:].T


def chordal_distance(products: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance (4) of the top span of ``products`` (E, E) from ``basis`` (r, E).

    The second result is its gradient by ``products``.
    """
    rank = len(basis)
    values, vectors = torch.linalg.eigh(products)
    outer, inner = vectors[:, :-rank], vectors[:, -rank:]
    seen_inner, seen_outer = basis @ inner, basis @ outer  # (r, r), (r, E - r)
    gap = values[-rank:, None] - values[None, :-rank]
    turned = seen_inner.T @ seen_outer / gap.clamp_min(SMALLEST_GAP * float(values[-1]))
    half = inner @ turned @ outer.T
    return rank - seen_inner.square().sum(), -(half + half.T)


@register(
    "subtta",
    paper="Zeng et al., Subspace Alignment for Vision-Language Model Test-time Adaptation, 2026",
)
class SubTTA(LayerNormAdapter):
    """LayerNorm steps that align the image span with the texts', then adapt inside it.

    logits = scale · cos(image projected on the texts' span, text), between the two steps.
    """

    config: SubTTAConfig

    def _setup(self) -> None:
        super()._setup()
        products = self.classifier.T @ self.classifier
        rank = min(self.config.rank, len(self.prompts), self.classifier.shape[1] - 1)
        self.basis = top_eigenvectors(products, rank)
        AdamState.begin(self.tower.start).declare(self.memory, "norms")
        self.memory.declare("products", products)

    def _predict(self, batch: Batch) -> Prediction:
        state = AdamState.load(self.memory, "norms")
        adam = self.config.adam
        state = minimize(state, lambda norms: self.align(norms, batch.images), 1, adam)
        answers: list[Tensor] = []

        def adapt(norms: Tensor) -> Tensor:
            features = self.tower(norms, batch.images) @ self.basis.T @ self.basis
            logits = self.scale * l2_normalize(features) @ self.classifier.T
            answers.append(logits.detach())
            if self.config.objective == "tent":
                return entropy(logits).mean()
            return batclip_loss(logits, features, self.classifier)

        minimize(state, adapt, 1, adam).store(self.memory, "norms")
        return Prediction(answers[0].float())

    def frozen_model(self) -> FrozenModel:
        """The tower under the norms learned so far, its features projected onto the text's."""
        frozen = super().frozen_model()
        E = self.basis.shape[1]
        project = nn.Linear(E, E, bias=False)
        project.weight = nn.Parameter(self.basis.T @ self.basis, requires_grad=False)
        frozen.visual = nn.Sequential(frozen.visual, project)
        return frozen

    def align(self, norms: Tensor, images: Tensor) -> Tensor:
        """L_align of a batch, which enters the moving average."""
        features = self.features(norms, images)
        weight = self.config.average_weight
        products = (1 - weight) * self.memory["products"] + weight * features.T @ features
        self.memory["products"] = products.detach()
        distance, gradient = chordal_distance(products.detach(), self.basis)
        pulled = (products * gradient).sum()  # has the gradient, not the value
        return distance + pulled - pulled.detach()
