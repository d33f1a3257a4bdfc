"""Settings of ``domain_norm``."""

from dataclasses import dataclass
from typing import Literal

from cliquetta.errors import UserError
from cliquetta.methods.building.config import (
    Count,
    MethodConfig,
    NonNegative,
    Weight,
)

MOST_DOMAINS = 1000
"""Domains beyond which comparing a batch with all of them would take longer than predicting it."""


@dataclass(frozen=True)
class DomainNormConfig(MethodConfig):
    """Settings of the domain LayerNorms."""

    # --- learning
    lr: NonNegative = 0.012
    """Learning rate of Adam's first step; it falls with the square root of the number of steps."""
    lr_floor: Weight = 0.25
    """Share of the first learning rate below which it does not fall."""
    window: Count = 64
    """Images that a step learns from, the last ones of the stream, and images of a
    domain per step, whatever the batch size. While a domain has seen fewer than four
    times as many images, a batch is predicted after its step; later the pass of the
    step is the prediction."""
    settled_steps: Count = 32
    """Steps after which a domain has settled."""
    settled_every: Count = 256
    """Images of a settled domain per step. Images that come earlier than ``window``
    before a step are predicted by one pass, without their zero-shot prediction."""
    diversity: NonNegative = 1.0
    """Weight of the KL divergence of the mean prediction from its target; at 0
    predictions may collapse to few classes."""

    # --- which classes occur
    prior: Literal["estimated", "uniform"] = "estimated"
    """Class prior: estimated from the stream, and believed as far as it is uneven; or
    all classes equally frequent, if that is known."""
    evenness_limits: tuple[Weight, Weight] = (0.72, 0.92)
    """Relative evenness of the estimated frequencies below which they are believed: at
    a mean confidence of 0.5 or less and of 0.9 or more, on a straight line between."""
    recent_images: NonNegative = 16.0
    """Images after which one counts half in the frequencies that recognise bursts of
    classes; 0 leaves bursts alone."""

    # --- domains
    domains: Count = 4
    """Domains that are remembered; the least recently used one is replaced."""
    domain_threshold: NonNegative = 0.6
    """Distance of a batch from all known domains beyond which it opens a new one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settled_every < self.window:
            raise UserError(
                f"settled_every ({self.settled_every}) must not be below window ({self.window})"
            )
        if self.domains > MOST_DOMAINS:
            raise UserError(f"domains is at most {MOST_DOMAINS}, got {self.domains}")
        low, high = self.evenness_limits
        if low > high:
            raise UserError(
                f"evenness_limits rise with confidence: got {low} before {high}"
            )
