"""One batch: predict it and learn from it (Algorithm 1; Eq. 11 to 13)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.entropy import log_prob_entropy
from cliquetta.methods.building.ring import write
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import (
    Encoded,
    assign_domain,
    encode,
    judged_signatures,
    key_distances,
    key_of,
)
from cliquetta.methods.domain_norm.prior import (
    ClassPrior,
    class_prior,
    count,
    count_recent,
)
from cliquetta.methods.domain_norm.state import (
    Counts,
    Domain,
    Key,
    Network,
    State,
    Window,
)
from cliquetta.model.cuda import Replayed, send

YOUNG_WINDOWS = 4
"""Windows of images before which a domain's batches are predicted after their step."""
FULL_LOSS = 0.3
"""Loss in nats from which steps are taken in full, Eq. 12."""
COLDEST = 0.2  # temperatures between which Eq. 13 is solved ...
HOTTEST = 8.0
HALVINGS = 14  # ... by so many halvings of their logarithm


class Setup(NamedTuple):
    """What a step depends on beside the state."""

    network: Network
    config: DomainNormConfig
    run: Replayed  # calls pure functions; on a GPU it replays recordings of them


class Output(NamedTuple):
    """The predictions of a batch, and what they rest on."""

    log_probabilities: Tensor  # (b, N)
    prior: ClassPrior | None = None  # of the domain; none if no image could be encoded
    zero_shot: Tensor | None = None  # z (b, N), where all of them were computed
    not_finite: int = 0
    """images without a finite feature: all classes alike, not remembered"""


def step(state: State, images: Tensor, setup: Setup) -> tuple[State, Output]:
    """Predict images (b, 3, S, S) and learn from them: Algorithm 1."""
    # Line 1: between the steps of a settled domain.
    if between_steps(state, len(images), setup.config):
        after = step_between(state, images, setup)
        if after is not None:
            return after

    # Lines 2 and 3: images without a finite feature get 1/N, and leave.
    network, config, run = setup
    batch, distances, finite = look(state, images, None, setup)
    classes = len(network.text)
    uniform = torch.full_like(batch.probabilities, 1 / classes).log()
    broken = len(images) - finite
    if broken == len(images):
        return state, Output(uniform, not_finite=broken)
    if broken:
        is_finite = batch.features.isfinite().all(dim=1)
        batch = batch.take(is_finite.nonzero()[:, 0])
        distances = measure(state, batch.signatures).tolist()

    # Line 4: the domain.
    state = assign_domain(state, batch, distances, network, config)
    domain = state.in_use()

    # Line 5: the class prior.
    counts, prior = run(count_batch, domain.counts, batch.probabilities, config)
    domain = domain._replace(counts=counts)
    state = state.with_domain(int(state.current), domain)

    # Lines 6 to 8: learning.
    state, features = learn(state, batch, prior, setup)

    # Line 9: predictions, in the order that the images came in.
    log_p = log_predictions(features, state.in_use().temperature, prior, network)
    predictions = uniform.index_copy(0, batch.rows, log_p)
    zero_shot = None if broken else batch.probabilities[batch.rows.argsort()]
    return state, Output(predictions, prior, zero_shot, broken)


def step_between(
    state: State, images: Tensor, setup: Setup
) -> tuple[State, Output] | None:
    """Predict images by one pass with the LayerNorms in use; none if they are of another domain."""
    network, config, run = setup
    domain = state.in_use()
    batch, distances, finite = look(state, images, domain, setup)
    if finite < len(images):
        return None
    assigned = assign_domain(state, batch, distances, network, config)
    if int(assigned.current) != int(state.current):
        return None

    # They count as recent images only: these are no zero-shot predictions.
    domain = assigned.in_use()
    counts, prior = run(count_between, domain.counts, batch.probabilities, config)
    domain = domain._replace(
        counts=counts,
        images=domain.images + len(images),
        due=domain.due + len(images),
    )
    after = assigned.with_domain(int(state.current), domain)

    # Some probabilities may have underflowed to 0.
    tiny = torch.finfo(batch.probabilities.dtype).tiny
    log_p = weigh(batch.probabilities.clamp_min(tiny).log(), prior)
    predictions = torch.empty_like(log_p).index_copy(0, batch.rows, log_p)
    return after, Output(predictions, prior)


def between_steps(state: State, images: int, config: DomainNormConfig) -> bool:
    """Tell whether so many images come early enough before the next step of a settled domain."""
    domain = state.in_use()
    # Until a domain has settled it is 0: its steps are a window apart.
    early = step_interval(domain, config) - config.window
    return int(domain.due) + images <= early


def step_interval(domain: Domain, config: DomainNormConfig) -> int:
    """Look up the images of a domain per step at its age."""
    settled = int(domain.norms.steps) >= config.settled_steps
    return config.settled_every if settled else config.window


# --- looking at a batch -------------------------------------------------------------------------


def look(
    state: State, images: Tensor, domain: Domain | None, setup: Setup
) -> tuple[Encoded, list[float], int]:
    """Encode a batch, by the LayerNorms of a domain if given; what the host has to know of it.

    Returns:
        The encoded images, the distance of the batch from every domain, and the number
        of images with finite features. Reading these is the only wait for a GPU in a
        step, unless images are broken or a batch between steps is of another domain.

    """
    theta = None if domain is None else domain.norms.values
    temperature = None if domain is None else domain.temperature
    keys = tuple(one.key for one in state.domains)
    batch, numbers = setup.run(
        encode_and_measure,
        images,
        theta,
        temperature,
        keys,
        state.group,
        setup.network,
    )
    *distances, finite = numbers.tolist()
    return batch, distances, int(finite)


def encode_and_measure(
    images: Tensor,
    theta: Tensor | None,
    temperature: Tensor | None,
    keys: tuple[Key, ...],
    group: Tensor,
    network: Network,
) -> tuple[Encoded, Tensor]:
    """Encode a batch; its distances from K domains and number of finite images, (K + 1,)."""
    batch = encode(images, theta, temperature, network)
    judged = judged_signatures(group, batch.signatures)
    distances = key_distances(key_of(judged), keys)

    # One tensor for the host, so that it waits once.
    is_finite = batch.features.isfinite().all(dim=1)
    finite = is_finite.sum(dim=0, keepdim=True)
    numbers = torch.cat([distances, finite.to(distances)])
    return batch, numbers


def measure(state: State, signatures: Tensor) -> Tensor:
    """Compute the distance (K,) of signatures (b, F) from every domain."""
    judged = judged_signatures(state.group, signatures)
    return key_distances(key_of(judged), tuple(domain.key for domain in state.domains))


def count_batch(
    counts: Counts, zero_shot: Tensor, config: DomainNormConfig
) -> tuple[Counts, ClassPrior]:
    """Count the zero-shot predictions (b, N) of a batch, and estimate the class prior."""
    counts = count(counts, zero_shot, config)
    return counts, class_prior(counts, config)


def count_between(
    counts: Counts, p: Tensor, config: DomainNormConfig
) -> tuple[Counts, ClassPrior]:
    """Count predictions (b, N) between steps as recent ones, and estimate the class prior."""
    counts = count_recent(counts, p, config)
    return counts, class_prior(counts, config)


# --- learning -----------------------------------------------------------------------------------


def learn(
    state: State, batch: Encoded, prior: ClassPrior, setup: Setup
) -> tuple[State, Tensor]:
    """Remember images and take the steps that fall due; features (b, E) to predict them by."""
    network, config, run = setup
    number = int(state.current)
    young = int(state.in_use().images) < YOUNG_WINDOWS * config.window
    stretches = batch.stretches(config.window)

    # The features that a step of a stretch gave, if one fell due.
    learned: list[Tensor | None] = []
    for stretch in stretches:
        state, slots = remember(state, stretch)
        domain = state.in_use()
        interval = step_interval(domain, config)
        features = None
        if int(domain.due) >= interval:
            members = (state.window.domain == number).nonzero()[:, 0]
            domain, by_member = take_step(domain, state.window, members, prior, setup)
            state = state.with_domain(
                number, domain._replace(due=domain.due - interval)
            )
            if not young:
                # The pass that was learned from is the prediction, which saves one.
                places = torch.searchsorted(members, slots)
                features = by_member[send(places, by_member.device)]
        learned.append(features)

    # Without a step so far, zero-shot predicts.
    domain = state.in_use()
    if domain.norms.steps == 0:
        return state, batch.features

    # What no step saw is predicted by the LayerNorms as they are now.
    if any(features is None for features in learned):
        after = run(network.features, batch.hidden, domain.norms.values)
        later = torch.split(after, config.window)
        learned = [later[i] if one is None else one for i, one in enumerate(learned)]
    return state, torch.cat([one for one in learned if one is not None])


def remember(state: State, images: Encoded) -> tuple[State, Tensor]:
    """Write images of the domain in use over the oldest of the window; their slots."""
    number = int(state.current)
    count = len(images.rows)
    window, slots = write(
        state.window,
        hidden=images.hidden,
        features=images.features,
        domain=torch.full((count,), number),
    )
    domain = state.domains[number]
    domain = domain._replace(images=domain.images + count, due=domain.due + count)
    return state._replace(window=window).with_domain(number, domain), slots


def take_step(
    domain: Domain, window: Window, members: Tensor, prior: ClassPrior, setup: Setup
) -> tuple[Domain, Tensor]:
    """Take a step on the images of a domain in the window, Eq. 12; their features before it."""
    network, config, run = setup
    hidden = window.hidden
    plain = window.features
    if len(members) < len(hidden):
        rows = send(members, hidden.device)
        hidden = hidden[rows]
        plain = plain[rows]
    before = domain.norms.values
    features, loss, gradient, temperature = run(
        loss_gradient, hidden, plain, before, prior, network, config
    )
    # It may overflow in half precision: then nothing is learned.
    gradient = gradient.where(gradient.isfinite().all(), 0.0)
    decay = rate_decay(int(domain.norms.steps) + 1, config.lr_floor)
    rate = config.lr * decay * len(members) / config.window
    norms: AdamState = adam_step(domain.norms, gradient, Adam(rate))
    # Adam's steps are as long for a loss of nearly nothing: they shrink with it.
    share = (loss / FULL_LOSS).clamp(0, 1)
    norms = norms._replace(values=torch.lerp(before, norms.values, share))
    return domain._replace(norms=norms, temperature=temperature), features


def rate_decay(step: int, floor: float) -> float:
    """Compute the learning rate of a step, 1 for the first, as a share of the first, Eq. 12."""
    return max(floor, float(step**-0.5))


def loss_gradient(
    hidden: Tensor,
    plain: Tensor,
    theta: Tensor,
    prior: ClassPrior,
    network: Network,
    config: DomainNormConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what a step on k images needs, Eq. 11 and 13.

    Args:
        hidden: h (k, T, D).
        plain: f(h; θ₀) (k, E).
        theta: θ (P,).
        prior: Class prior of the domain.
        network: The tower.
        config: Settings.

    Returns:
        Features f(h; θ) (k, E), the loss (), its gradient (P,), and the temperature ().

    """
    # The mean prediction t (N,) that is asked for: what zero-shot over-predicts is
    # divided out, Eq. 11.
    z = network.logits(plain).softmax(dim=1)  # (k, N)
    over_predicted = prior.marginal.clamp_min(1e-8) / prior.prior
    target = normalize(z.mean(dim=0) / over_predicted, p=1, dim=0)
    log_target = target.clamp_min(1e-8).log()

    # The loss: entropy, and the divergence of the mean prediction from t, Eq. 11.
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        features = network.features(hidden, leaf)
        logits = network.logits(features)
        log_p = logits.log_softmax(dim=1)  # (k, N)
        entropy = log_prob_entropy(log_p).mean()
        mean = log_p.exp().mean(dim=0)  # (N,)
        log_ratio = mean.clamp_min(1e-8).log() - log_target
        divergence = (mean * log_ratio).sum()
        loss = entropy + config.diversity * divergence
    (gradient,) = torch.autograd.grad(loss, leaf)

    # Predictions by these features are to be as sure as zero-shot ones, Eq. 13.
    confidence = z.amax(dim=1).mean()
    temperature = match_confidence(logits.detach(), confidence)
    return features.detach(), loss.detach(), gradient, temperature


def match_confidence(logits: Tensor, confidence: Tensor) -> Tensor:
    """Find the temperature () at which logits (k, N) are as sure on average as given, Eq. 13."""
    low = torch.full_like(confidence, COLDEST).log()
    high = torch.full_like(confidence, HOTTEST).log()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        probabilities = (logits / middle.exp()).softmax(dim=1)
        sure = probabilities.amax(dim=1).mean()

        # A higher temperature makes predictions less sure.
        too_sure = sure > confidence
        low = torch.where(too_sure, middle, low)
        high = torch.where(too_sure, high, middle)
    middle = (low + high) / 2
    return middle.exp()


# --- predicting ---------------------------------------------------------------------------------


def log_predictions(
    features: Tensor, temperature: Tensor, prior: ClassPrior, network: Network
) -> Tensor:
    """Compute log-probabilities (b, N) of features (b, E), Eq. 13."""
    return weigh(network.logits(features) / temperature, prior)


def weigh(logits: Tensor, prior: ClassPrior) -> Tensor:
    """Weigh predictions (b, N) by the classes that occur, Eq. 13."""
    return (logits + prior.log_weights).log_softmax(dim=1)
