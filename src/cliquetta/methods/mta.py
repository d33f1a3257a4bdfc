"""MTA: the mode of an image's views, found by a mean shift that doubts outliers; no training.

Zanella and Ben Ayed, On the Test-Time Zero-Shot Generalization of Vision-Language
Models: Do We Really Need Prompt Learning?, CVPR 2024. Alternates between inlierness
scores y of the views, a softmax of their density at the mode plus the agreement of
their predictions, and the mode m, their weighted mean shift. The mode replaces the
image feature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.building.config import Count, Fraction, NonNegative, Positive
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import ViewsConfig
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Prediction


@dataclass(frozen=True)
class MTAConfig(ViewsConfig):
    """MTA with its authors' defaults."""

    neighbour_fraction: Fraction = 0.3
    """Fraction of the other views, the nearest ones, that set a view's bandwidth."""
    affinity_weight: NonNegative = 4.0
    """λ: weight of the agreement between views' predictions."""
    entropy_weight: Positive = 0.2
    """λ_y: weight of the entropy of the inlierness scores; larger is closer to uniform."""
    iterations: Count = 5
    """Rounds of the alternation, and most iterations inside its halves."""
    tolerance: NonNegative = 1e-6  # Change below which a half of the alternation stops.


# Least squared bandwidth; float32 unit features that differ do so by more.
SMALLEST = 1e-12


def squared_bandwidth(features: Tensor, neighbours: float) -> Tensor:
    """Return h² (B, V): half the mean squared distance of views from their nearest."""
    views = features.shape[1]
    if views == 1:
        return features.new_full(features.shape[:2], SMALLEST)
    count = max(1, int(neighbours * (views - 1)))
    distances = torch.cdist(
        features, features, compute_mode="donot_use_mm_for_euclid_dist"
    )

    # the nearest of all is the view itself
    ascending = distances.sort(dim=-1).values
    nearest = ascending[..., 1 : count + 1]
    return (0.5 * nearest.square().mean(dim=-1)).clamp(min=SMALLEST)


def density(features: Tensor, mode: Tensor, h2: Tensor) -> Tensor:
    """Evaluate a Gaussian kernel (B, V) of views (B, V, E) around the modes (B, E)."""
    squared = (features - mode[:, None]).square().sum(dim=-1)
    return torch.exp(-squared / (2 * h2))


def find_mode(
    features: Tensor, probabilities: Tensor, config: MTAConfig
) -> tuple[Tensor, Tensor]:
    """Alternate between the inlierness of views and their mode.

    Args:
        features: Unit features (B, V, E).
        probabilities: Predictions (B, V, N) of the views.
        config: Settings.

    Returns:
        Modes (B, E) and inlierness (B, V).

    """
    h2 = squared_bandwidth(features, config.neighbour_fraction)

    # how far each two views predict the same, (B, V, V)
    agreement = probabilities @ probabilities.transpose(1, 2)

    # from the plain view, with all views alike
    mode = features[:, 0]
    inlierness = features.new_full(features.shape[:2], 1 / features.shape[1])
    for _ in range(config.iterations):
        # y for the mode of before, then the mode for that y
        kernel = density(features, mode, h2)
        inlierness = _settle_inlierness(inlierness, kernel, agreement, config)
        mode = _shift_mode(mode, features, inlierness, h2, config)
    return mode, inlierness


def _settle_inlierness(
    y: Tensor, kernel: Tensor, agreement: Tensor, config: MTAConfig
) -> Tensor:
    """Take the first half of a round: the inlierness for a mode, to its fixed point."""
    active = torch.ones(len(y), 1, dtype=torch.bool, device=y.device)
    for _ in range(config.iterations):
        # A y: support from views that predict the same, (B, V)
        support = (agreement @ y[:, :, None])[:, :, 0]

        # y = softmax((K + λ A y) / λ_y)
        logits = kernel + config.affinity_weight * support
        new = (logits / config.entropy_weight).softmax(dim=-1)

        # images that have settled stay as they are
        y, active = _advance(y, new, active, config.tolerance)
    return y


def _shift_mode(
    mode: Tensor, features: Tensor, inlierness: Tensor, h2: Tensor, config: MTAConfig
) -> Tensor:
    """Take the second half of a round: the mode's mean shift, by inlierness."""
    active = torch.ones(len(mode), 1, dtype=torch.bool, device=mode.device)
    for _ in range(config.iterations):
        # Σ_p y_p K_p f_p, normalised
        weight = inlierness * density(features, mode, h2)  # (B, V)
        new = l2_normalize((weight[:, None] @ features)[:, 0])

        # a mode whose weights have all vanished stays where it is
        alive = weight.sum(dim=-1, keepdim=True) > 0
        new = torch.where(alive, new, mode)

        # so do modes that have settled
        mode, active = _advance(mode, new, active, config.tolerance)
    return mode


def _advance(
    old: Tensor, new: Tensor, active: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Move the rows that are still active; return which of them stay so as well."""
    moved = (new - old).norm(dim=-1, keepdim=True) >= tolerance
    return torch.where(active, new, old), active & moved


@register("mta")
class MTA(FixedText):
    """Takes the mode of the views' features, outliers weighed down; no training."""

    config: MTAConfig

    def _predict_features(self, features: Tensor) -> Prediction:
        # predictions of the views, (B, V, N)
        logits = self.scale * features @ self.classifier.T
        mode, inlierness = find_mode(features, logits.softmax(dim=-1), self.config)

        # the mode replaces the feature of the image
        logits = self.scale * mode @ self.classifier.T
        return Prediction(logits, {"inlierness": inlierness})
