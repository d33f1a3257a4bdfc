"""Settings of ``domain_norm``."""

from dataclasses import dataclass
from typing import Literal

from cliquetta.errors import UserError
from cliquetta.methods.building.config import (
    Count,
    Fraction,
    MethodConfig,
    NonNegative,
    NonNegativeCount,
    Positive,
    Weight,
)


@dataclass(frozen=True)
class DomainNormConfig(MethodConfig):
    """Settings of the domain LayerNorms."""

    # --- LayerNorms and optimiser
    shared_depth: Weight = 1 / 6
    """Share of the blocks, rounded down but at least one, whose LayerNorms stay as they are. They
    are computed once for the plain and the adapted pass, and the backward pass stops there."""
    lr: NonNegative = 0.012
    """Learning rate of Adam's first step; see ``uncertainty_scale``. It falls with the square root
    of the number of steps ..."""
    lr_floor: Weight = 0.25  # ... to this share of it.
    step_every: Count = 64
    """Images of a domain per Adam step, whatever the batch size; also the number of recent images
    that are remembered and learned from."""
    settled_steps: Count = 32  # Steps after which a domain has settled ...
    settled_every: Count = 256
    """... and images per step from then on. Images that come earlier than ``step_every`` before a
    step are predicted without their zero-shot prediction, which saves most of the cost."""
    warmup_images: NonNegativeCount = 256
    """While a domain has seen fewer images than this, a batch is predicted after its step. Later
    the learning pass itself is the prediction, which saves a forward pass."""

    # --- loss
    confident_fraction: Fraction = 0.7
    """Share of the recent images, the most certain, whose entropy is minimised. Where the zero-shot
    marginal is believed, all of them."""
    diversity: NonNegative = 1.0
    """Weight of the KL divergence of the marginal from its target; 0 leaves the marginal free."""
    uncertainty_scale: NonNegative = 0.3
    """Zero-shot uncertainty (1 - mean confidence) from which steps are full; below, they shrink in
    proportion. 0 takes full steps always."""

    # --- which classes occur
    prior: Literal["estimated", "uniform", "zero-shot"] = "estimated"
    """Class prior: estimated, and believed as far as it is uneven; all classes equally frequent; or
    the zero-shot marginal."""
    background_images: Positive = 1.0
    """Images that the mean background of all classes counts for in the background of each class,
    which is learned from the images that are not of the class."""
    evenness_floor: Weight = 0.72
    """Evenness of the estimated frequencies (effective share of the classes) below which they are
    believed, up to a mean confidence of ``evenness_knee`` ..."""
    evenness_knee: Weight = 0.5  # ... the confidence from which that limit rises ...
    evenness_slope: NonNegative = 0.5
    """... its rise with confidence: the more confident, the less uneven they need to be ..."""
    evenness_cap: Weight = 0.92  # ... and the most that it rises to.
    evenness_band: Positive = 0.1  # Width, centred on the limit, over which belief falls to 0.
    frequency_power: Weight = 1 / 3
    """Power of the estimated frequencies that weights predictions where they are believed."""
    recent_images: NonNegative = 16.0
    """Images after which one counts half in the recent frequencies, which weight predictions
    in bursts of classes; 0 leaves bursts alone."""

    # --- predictions
    zero_shot_share: Weight = 0.5
    """Share of the zero-shot prediction where CLIP has no uncertainty; none from
    ``uncertainty_scale`` on."""
    vote_share: Weight = 0.4  # Share of its neighbours' votes in an image's prediction; 0 is none.
    neighbours: Count = 10  # Most similar recent images that vote.
    vote_memory: Count = 256  # Recent images of a domain that can vote.

    abstain_below: Weight = 0.1
    """Information of the zero-shot predictions (the share of their entropy that the images explain)
    below which a domain is left to zero-shot CLIP: near 0 its predictions are those for noise,
    and nothing can be learned from them. 0 never abstains."""

    # --- domains
    domains: Count = 4  # Domains that are remembered; the least recently used one goes.
    domain_threshold: NonNegative = 0.6
    """Distance of a batch from all known domains from which it opens a new one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settled_every < self.step_every:
            raise UserError(
                f"settled_every ({self.settled_every}) must not be below step_every "
                f"({self.step_every})"
            )
        if self.evenness_floor > self.evenness_cap:
            raise UserError(
                f"evenness_floor ({self.evenness_floor}) must not be above evenness_cap "
                f"({self.evenness_cap})"
            )
