"""One batch: predict it and learn from it (Algorithm 1; Eq. 15 to 19)."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.entropy import log_prob_entropy
from cliquetta.methods.building.ring import write
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import Encoded, assign_domain, encode
from cliquetta.methods.domain_norm.prior import (
    WATCHED,
    ClassPrior,
    Figures,
    class_prior,
    count,
    count_classes,
    count_recent,
    step_size,
)
from cliquetta.methods.domain_norm.run import Setup
from cliquetta.methods.domain_norm.state import Domain, Network, State, Window, start_domain
from cliquetta.model.cuda import send


class Output(NamedTuple):
    """The predictions of a batch, and what they rest on."""

    log_probabilities: Tensor  # (b, N)
    figures: Figures | None = None  # of the domain in use; none if no image could be encoded
    parts: int = 0  # domains in the batch
    changed: Tensor | None = None  # share of images whose class is not the zero-shot one
    zero_shot: Tensor | None = None  # (b, N) probabilities of plain CLIP, where all are computed
    not_finite: int = 0  # images without a finite feature: all classes alike, not remembered


def step(state: State, images: Tensor, setup: Setup, *, full: bool = False) -> tuple[State, Output]:
    """Predict images (b, 3, S, S) and learn from them: Algorithm 1; ``full``: without line 0."""
    network, config, run = setup
    settled, current = not full and between_steps(state, len(images), config), int(state.current)
    batch = run(encode, images, state.domains[current].norms.values if settled else None, network)
    broken = len(images) - int(run.read(run(count_finite, batch.features))[0])
    predictions = torch.full_like(batch.zero_shot, 1 / len(network.text))
    if broken and settled:
        return step(state, images, setup, full=True)
    if broken == len(images):
        return state, Output(predictions.log(), not_finite=broken)
    if broken:
        batch = batch.take(batch.features.isfinite().all(dim=1).nonzero()[:, 0])
    after, parts = assign_domain(state, batch.signatures, setup)
    if settled and [number for number, _ in parts] != [current]:
        return step(state, images, setup, full=True)
    figures = {}
    for number, rows in parts:
        part = batch if len(parts) == 1 else batch.take(rows)
        domain, b = after.domains[number], len(rows)
        counts = run(count_recent if settled else count, domain.counts, part.zero_shot, config)
        prior = run(class_prior, counts, config)
        domain, own = domain._replace(counts=counts), Figures(*run.read(prior.figures))
        if settled:
            features, p = part.features, part.zero_shot
            domain = domain._replace(images=domain.images + b, due=domain.due + b)
        else:
            domain = restart(domain, network, config) if own.collapsed else domain
            size = step_size(own.confidence, config)
            after = after.with_domain(number, domain)
            after, features = learn(after, number, part, prior, size, setup)
            domain, p = predict(after.domains[number], part, features, size, setup)
        domain, p = vote(domain, part, features, p, config)
        p, abstains = p * prior.weights, own.information < config.abstain_below
        if abstains:
            p, domain = part.zero_shot, domain._replace(abstained=domain.abstained + b)
        domain = domain._replace(abstains=torch.tensor(int(abstains)))
        predictions[part.rows] = p / p.sum(dim=1, keepdim=True)
        figures[number], after = own, after.with_domain(number, domain)
    changed = predictions[batch.rows].argmax(dim=1) != batch.zero_shot.argmax(dim=1)
    share = None if settled else changed.float().mean()
    logits, own = predictions.clamp_min(1e-12).log(), figures[int(after.current)]
    plain = None if settled or broken else batch.zero_shot[batch.rows.argsort()]
    return after, Output(logits, own, len(parts), share, plain, broken)


def between_steps(state: State, images: int, config: DomainNormConfig) -> bool:
    """Whether so many images of a settled domain come before those that its next step needs."""
    domain = state.domains[int(state.current)]
    early = step_interval(domain, config) - config.step_every
    return int(domain.due) + images <= early and not domain.abstains


def step_interval(domain: Domain, config: DomainNormConfig) -> int:
    """Images of a domain per step at its age: the schedule of Eq. 17."""
    settled = int(domain.norms.steps) >= config.settled_steps
    return config.settled_every if settled else config.step_every


def restart(domain: Domain, network: Network, config: DomainNormConfig) -> Domain:
    """Forget what a collapsed domain has learned, its voters included, Eq. 21; counts stay."""
    fresh = start_domain(network, config)
    counts = domain.counts._replace(predicted=fresh.counts.predicted)
    domain = domain._replace(counts=counts, due=fresh.due, restarts=domain.restarts + 1)
    return domain._replace(norms=fresh.norms, voters=fresh.voters)


def learn(
    state: State, number: int, part: Encoded, prior: ClassPrior, size: float, setup: Setup
) -> tuple[State, Tensor]:
    """Remember images of a domain and take the steps that fall due; features for Eq. 18."""
    (network, config, run), domain, window = setup, state.domains[number], state.window
    young, learned = int(domain.images) < config.warmup_images, {}
    stretches = part.split(config.step_every)
    for i, images in enumerate(stretches):
        b, interval = len(images.rows), step_interval(domain, config)
        new = {"hidden": images.hidden, "features": images.features}
        window, slots = write(window, **new, domain=torch.full((b,), number))
        domain = domain._replace(images=domain.images + b, due=domain.due + b)
        if domain.due >= interval:
            members = (window.domain == number).nonzero()[:, 0]
            norms, features = take_step(domain.norms, window, members, prior, size, setup)
            domain = domain._replace(norms=norms, due=domain.due - interval)
            if not young:  # predicted by the pass that was learned from, which saves one
                learned[i] = features[send(torch.searchsorted(members, slots), features.device)]
    state = state.with_domain(number, domain)._replace(window=window)
    if domain.norms.steps == 0:
        return state, part.features
    if len(learned) < len(stretches):
        after = run(network.features, part.hidden, domain.norms.values)
        learned = dict(enumerate(torch.split(after, config.step_every))) | learned
    return state, torch.cat([learned[i] for i in range(len(stretches))])


def take_step(
    norms: AdamState, window: Window, members: Tensor, prior: ClassPrior, size: float, setup: Setup
) -> tuple[AdamState, Tensor]:
    """Take a step on the images of a domain in the window, Eq. 17; their features before it."""
    network, config, run = setup
    hidden, plain = window.hidden, window.features
    if len(members) < len(hidden):
        rows = send(members, hidden.device)
        hidden, plain = hidden[rows], plain[rows]
    features, gradient = run(loss_gradient, hidden, plain, norms.values, prior, network, config)
    rate = config.lr * rate_decay(int(norms.steps) + 1, config.lr_floor) * size
    gradient = gradient.where(gradient.isfinite().all(), 0.0)  # it may overflow in half precision
    return adam_step(norms, gradient, Adam(rate * len(members) / config.step_every)), features


def rate_decay(step: int, floor: float) -> float:
    """Learning rate of a step, 1 for the first, as a share of that of the first, Eq. 17."""
    return max(floor, float(step**-0.5))


def loss_gradient(
    hidden: Tensor,
    plain: Tensor,
    theta: Tensor,
    prior: ClassPrior,
    network: Network,
    config: DomainNormConfig,
) -> tuple[Tensor, Tensor]:
    """Features f(h; θ) (k, E) of images, f(h; θ₀) given; gradient (P,) of the loss, Eq. 15, 16."""
    k, fraction = len(hidden), config.confident_fraction
    most = ((fraction + (1 - fraction) * prior.belief.double()) * k).floor().clamp_min(1)
    certain = (torch.arange(k, device=most.device) < most).to(most) / most  # by rank
    z = network.logits(plain).softmax(dim=1).mean(dim=0)
    target = normalize(z * prior.prior / prior.marginal.clamp_min(1e-8), p=1, dim=0)
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        features = network.features(hidden, leaf)
        log_p = network.logits(features).log_softmax(dim=-1)
        entropies = log_prob_entropy(log_p).sort().values
        marginal = log_p.exp().mean(dim=0)
        log_ratio = marginal.clamp_min(1e-8).log() - target.clamp_min(1e-8).log()
        loss = (entropies * certain.to(target)).sum()
        loss = loss + config.diversity * (marginal * log_ratio).sum()
    return features.detach(), torch.autograd.grad(loss, leaf)[0]


def predict(
    domain: Domain, part: Encoded, features: Tensor, size: float, setup: Setup
) -> tuple[Domain, Tensor]:
    """Predictions (b, N) by features of a domain, Eq. 18, which are watched for a collapse."""
    network, config, _ = setup
    if domain.norms.steps == 0:
        return domain, part.zero_shot
    p = network.logits(features).softmax(dim=1)
    new = torch.stack([count_classes(p), count_classes(part.zero_shot)])
    predicted = domain.counts.predicted * 0.5 ** (len(p) / WATCHED) + new
    domain = domain._replace(counts=domain.counts._replace(predicted=predicted))
    return domain, p.lerp(part.zero_shot, config.zero_shot_share * (1 - size))


def vote(
    domain: Domain, part: Encoded, features: Tensor, p: Tensor, config: DomainNormConfig
) -> tuple[Domain, Tensor]:
    """Predictions (b, N) with the votes of recent images, which these join, Eq. 19."""
    voters, V, b, share = domain.voters, config.vote_memory, len(p), config.vote_share
    held = min(int(voters.next), V)
    similarity = features @ torch.cat([features, voters.features[:held]]).T
    similarity[:, :b].fill_diagonal_(-2.0)
    nearest = similarity.topk(min(config.neighbours, b + held - 1), dim=1).indices  # (b, k)
    classes = torch.cat([part.zero_shot.argmax(dim=1), voters.zero_shot[:held]])
    votes = torch.cat([p, voters.predictions[:held]])[nearest].mean(dim=1)
    voted = (1 - share) * p + share * votes if nearest.shape[1] else p
    same, counts = classes[nearest] == classes[:b, None], domain.counts
    agreement = counts.agreement + same.sum() / max(1, same.shape[1])
    counts = counts._replace(agreement=agreement, asked=counts.asked + b)
    new = {"features": features[:V], "predictions": p[:V], "zero_shot": classes[: min(b, V)]}
    return domain._replace(counts=counts, voters=write(voters, **new)[0]), voted


def count_finite(features: Tensor) -> Tensor:
    """Number (1,) of images whose features (b, E) are finite."""
    return features.isfinite().all(dim=1).sum(dim=0, keepdim=True)
