"""C-TPT: TPT that also spreads the class texts, because spread texts are better calibrated.

Yoon et al., C-TPT: Calibrated Test-Time Prompt Tuning for Vision-Language Models via
Text Feature Dispersion, ICLR 2024. The loss of TPT minus a weight times the average
text feature dispersion (ATFD): the mean distance of the unit class features from their
centre. One joint step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.building.config import NonNegative, read_presets
from cliquetta.methods.building.registry import register
from cliquetta.methods.tpt import TPT, TPTConfig


@dataclass(frozen=True)
class CTPTConfig(TPTConfig):
    """C-TPT with its authors' defaults."""

    dispersion_weight: NonNegative = 50.0
    """Weight of the text feature dispersion; 0 is TPT."""


def text_dispersion(text: Tensor) -> Tensor:
    """Return the ATFD (...): mean distance of features (..., N, E) from their mean."""
    centre = text.mean(dim=-2, keepdim=True)
    distances: Tensor = torch.linalg.vector_norm(text - centre, dim=-1)
    return distances.mean(dim=-1)


@register("ctpt", tuned=read_presets("ctpt", CTPTConfig))
class CTPT(TPT):
    """TPT with class texts kept apart, for better calibration."""

    config: CTPTConfig

    def loss(self, features: Tensor, text: Tensor) -> Tensor:
        """Subtract the weighted dispersion from the marginal entropy: losses (B,)."""
        uncertainty = super().loss(features, text)
        return uncertainty - self.config.dispersion_weight * text_dispersion(text)
