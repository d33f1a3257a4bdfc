"""What a GPU computes before the host knows whether it is needed.

A step asks the device several questions, and every wait for an answer leaves the device idle.
Mostly the whole batch is of the domain in use: what the step needs in that case is computed along
with plain CLIP, and read at once. The functions are pure, so that a result for the very same
tensors is the result; where the batch turns out otherwise, it is not asked for.
"""

from __future__ import annotations

from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import absorb, domain_figures
from cliquetta.methods.domain_norm.network import Encoded, Network, encode, encode_adapted
from cliquetta.methods.domain_norm.prior import Observed, observe, recall
from cliquetta.methods.domain_norm.run import Run, Setup
from cliquetta.methods.domain_norm.state import Counts, Key, Predicted, State
from cliquetta.methods.domain_norm.step import (
    between_steps,
    count_finite,
    loss_gradient,
    step_interval,
)
from cliquetta.model.cuda_graph import Replayed
from cliquetta.model.transfer import Fetched


class Ahead:
    """Starts the run of a step with results that are likely to be asked for.

    Where not ``enabled`` (without a GPU there is nothing to wait for) the step computes them
    itself, to the same bits.
    """

    def __init__(self, network: Network, config: DomainNormConfig, *, enabled: bool) -> None:
        self.network, self.config, self.enabled = network, config, enabled
        self.replayed = Replayed()

    def begin(self, state: State, images: Tensor) -> Setup:
        """The setup of a step on ``images`` (b, 3, S, S)."""
        run, network, config = Run(self.replayed), self.network, self.config
        setup = Setup(network, config, run)
        if not self.enabled:
            return setup
        domain, keys = state.domains[int(state.current)], tuple(d.key for d in state.domains)
        theta, own = domain.norms.values, (domain.counts, domain.predicted)
        fixed, settled = (network, config), between_steps(state, len(images), config)
        if settled:
            found = self.replayed(
                look_settled, images, keys, domain.key, domain.counts, theta, *fixed
            )
        else:
            found = self.replayed(look, images, keys, domain.key, *own, *fixed)
        batch, finite, key, seen, figures = found
        reading = finite, seen.figures, figures
        fetched = Fetched(*reading)
        run.know(finite, count_finite, batch.features)
        run.know(figures, domain_figures, batch.signatures, keys)
        run.know(key, absorb, domain.key, batch.signatures)
        if settled:
            run.know(batch, encode_adapted, images, theta, network)
            run.know(seen, recall, domain.counts, batch.zero_shot, config)
        else:
            run.know(batch, encode, images, network)
            run.know(seen, observe, *own, batch.zero_shot, config)
        b, due = len(images), int(domain.progress.due) + len(images)
        if b == config.step_every and due >= step_interval(int(domain.norms.steps), config):
            window = batch.hidden, batch.features, theta
            learned = self.replayed(loss_gradient, *window, seen.prior, *fixed)
            run.know(learned, loss_gradient, *window, seen.prior, *fixed)
        for value, numbers in zip(reading, fetched.wait(), strict=True):
            run.know_read(value, numbers.tolist())
        return setup


def look_settled(
    images: Tensor,
    keys: tuple[Key, ...],
    key: Key,
    counts: Counts,
    theta: Tensor,
    network: Network,
    config: DomainNormConfig,
) -> tuple[Encoded, Tensor, Key, Observed, Tensor]:
    """Encode a batch by adapted LayerNorms, and treat it as one of the domain in use."""
    batch = encode_adapted(images, theta, network)
    return (
        batch,
        count_finite(batch.features),
        absorb(key, batch.signatures),
        recall(counts, batch.zero_shot, config),
        domain_figures(batch.signatures, keys),
    )


def look(
    images: Tensor,
    keys: tuple[Key, ...],
    key: Key,
    counts: Counts,
    predicted: Predicted,
    network: Network,
    config: DomainNormConfig,
) -> tuple[Encoded, Tensor, Key, Observed, Tensor]:
    """Encode a batch, and treat it as one of the domain in use."""
    batch = encode(images, network)
    return (
        batch,
        count_finite(batch.features),
        absorb(key, batch.signatures),
        observe(counts, predicted, batch.zero_shot, config),
        domain_figures(batch.signatures, keys),
    )
