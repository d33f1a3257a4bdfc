"""Results that a GPU computes before the host knows whether they are needed.

A step asks the device several questions, and every wait for a reply leaves the device idle.
Mostly the whole batch is of the domain in use: what the step needs in that case is computed along
with plain CLIP, and read at once. The functions are pure, so that a result for the very same
tensors is the result; where the batch turns out otherwise, it is not asked for.
"""

from typing import NamedTuple

from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import Encoded, domain_figures, encode
from cliquetta.methods.domain_norm.prior import ClassPrior, class_prior, count, count_recent
from cliquetta.methods.domain_norm.run import Runner, Setup
from cliquetta.methods.domain_norm.state import Counts, Key, Network, State
from cliquetta.methods.domain_norm.step import (
    between_steps,
    count_finite,
    loss_gradient,
    step_interval,
)
from cliquetta.model.cuda import Fetched, Replayed


class Ahead:
    """Starts a step's run with results likely to be asked for; none unless ``enabled``."""

    def __init__(self, network: Network, config: DomainNormConfig, *, enabled: bool) -> None:
        self.network, self.config, self.enabled = network, config, enabled
        self.replayed = Replayed()

    def begin(self, state: State, images: Tensor) -> Setup:
        """The setup of a step on ``images`` (b, 3, S, S)."""
        run, network, config = Runner(self.replayed), self.network, self.config
        setup = Setup(network, config, run)
        if not self.enabled:
            return setup
        domain, keys = state.domains[int(state.current)], tuple(d.key for d in state.domains)
        settled, b = between_steps(state, len(images), config), len(images)
        theta, counting = (domain.norms.values, count_recent) if settled else (None, count)
        seen = self.replayed(look, images, theta, keys, domain.counts, network, config)
        batch, finite, domains, counts, prior = seen
        reading = finite, prior.figures, domains
        fetched = Fetched(*reading)
        run.know(batch, encode, images, theta, network)
        run.know(finite, count_finite, batch.features)
        run.know(domains, domain_figures, batch.signatures, keys)
        run.know(counts, counting, domain.counts, batch.zero_shot, config)
        run.know(prior, class_prior, counts, config)
        if b == config.step_every and int(domain.due) + b >= step_interval(domain, config):
            given = batch.hidden, batch.features, domain.norms.values, prior, network, config
            run.know(self.replayed(loss_gradient, *given), loss_gradient, *given)
        for value, numbers in zip(reading, fetched.wait(), strict=True):
            run.know_read(value, numbers.tolist())
        return setup


class Look(NamedTuple):
    """The results that a batch of the domain in use needs."""

    batch: Encoded
    finite: Tensor
    domains: Tensor
    counts: Counts
    prior: ClassPrior


def look(
    images: Tensor,
    theta: Tensor | None,
    keys: tuple[Key, ...],
    counts: Counts,
    network: Network,
    config: DomainNormConfig,
) -> Look:
    """Encode a batch, between steps by ``theta``, and treat it as one of the domain in use."""
    batch = encode(images, theta, network)
    counts = (count if theta is None else count_recent)(counts, batch.zero_shot, config)
    domains, prior = domain_figures(batch.signatures, keys), class_prior(counts, config)
    return Look(batch, count_finite(batch.features), domains, counts, prior)
