"""One batch: predict it and learn from it (Algorithm 1; Eq. 14 to 19)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods._shared.adam import Adam, AdamState, adam_step
from cliquetta.methods._shared.entropy import log_prob_entropy
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import assign_domain
from cliquetta.methods.domain_norm.network import Encoded, Network, encode, encode_adapted
from cliquetta.methods.domain_norm.prior import ClassPrior, Figures, observe, recall, watch
from cliquetta.methods.domain_norm.run import Setup
from cliquetta.methods.domain_norm.state import Domain, State, Voters, Window, ring, start_domain
from cliquetta.model.transfer import send


class Output(NamedTuple):
    """The predictions of a batch, and what they rest on."""

    log_probabilities: Tensor  # (b, N)
    figures: Figures | None = None  # of the domain in use; none if no image could be encoded
    parts: int = 0  # domains in the batch
    changed: Tensor | None = None  # share of images whose class is not the zero-shot one
    not_finite: int = 0  # images without a finite feature: all classes alike, not remembered


def step(state: State, images: Tensor, setup: Setup) -> tuple[State, Output]:
    """Predict images (b, 3, S, S) and learn from them: Algorithm 1."""
    network, config, run = setup
    if between_steps(state, len(images), config):
        settled = predict_settled(state, images, setup)
        if settled is not None:
            return settled
    batch = run(encode, images, network)
    predictions = torch.full_like(batch.zero_shot, 1 / len(network.text))
    broken = len(images) - int(run.read(run(count_finite, batch.features))[0])
    if broken == len(images):
        return state, Output(predictions.log(), not_finite=broken)
    if broken:
        batch = batch.take(batch.features.isfinite().all(dim=1).nonzero()[:, 0])
    state, parts = assign_domain(state, batch.signatures, setup)
    figures = {}
    for number, rows in parts:
        part = batch if len(parts) == 1 else batch.take(rows)
        domain, window = state.domains[number], state.window
        seen = run(observe, domain.counts, domain.predicted, part.zero_shot, config)
        domain = domain._replace(counts=seen.counts)
        figures[number] = own = Figures(*run.read(seen.figures))
        if own.collapsed:
            domain = restart(domain, network, config)
        size = step_size(own.confidence, config)
        domain, window, found = learn(domain, number, window, part, seen.prior, size, setup)
        domain, features, p = adapt(domain, part, found, size, setup)
        domain, p = vote(domain, part, features, p, config)
        p = p * seen.prior.weights
        abstains, progress = own.information < config.abstain_below, domain.progress
        if abstains:
            p = part.zero_shot
        abstained = progress.abstained + abstains * len(rows)
        progress = progress._replace(abstained=abstained, abstains=torch.tensor(int(abstains)))
        domain = domain._replace(progress=progress)
        predictions[part.rows] = p / p.sum(dim=1, keepdim=True)
        state = state.with_domain(number, domain, window)
    changed = predictions[batch.rows].argmax(dim=1) != batch.zero_shot.argmax(dim=1)
    output = predictions.clamp_min(1e-12).log(), figures[int(state.current)], len(parts)
    return state, Output(*output, changed.float().mean(), broken)


def between_steps(state: State, images: int, config: DomainNormConfig) -> bool:
    """Whether so many images of the domain in use come before those that its next step needs.

    Only a settled domain has such images, and not while it is left to zero-shot CLIP.
    """
    domain = state.domains[int(state.current)]
    early = step_interval(int(domain.norms.steps), config) - config.step_every
    return int(domain.progress.due) + images <= early and not domain.progress.abstains


def predict_settled(state: State, images: Tensor, setup: Setup) -> tuple[State, Output] | None:
    """Predict a batch of a settled domain by its LayerNorms alone.

    ``None`` if it is of another domain, or has images without a finite feature.
    """
    network, config, run = setup
    number = int(state.current)
    batch = run(encode_adapted, images, state.domains[number].norms.values, network)
    finite = run.read(run(count_finite, batch.features))[0] == len(images)
    after, parts = assign_domain(state, batch.signatures, setup)
    domain = after.domains[number]
    seen = run(recall, domain.counts, batch.zero_shot, config)
    own = Figures(*run.read(seen.figures))
    if not finite or [part for part, _ in parts] != [number]:
        return None
    domain, p = vote(domain, batch, batch.features, batch.zero_shot, config)
    progress, b = domain.progress, len(images)
    progress = progress._replace(images=progress.images + b, due=progress.due + b)
    domain = domain._replace(counts=seen.counts, progress=progress)
    p = p * seen.prior.weights
    predictions = torch.empty_like(p)
    predictions[batch.rows] = p / p.sum(dim=1, keepdim=True)
    after = after.with_domain(number, domain, after.window)
    return after, Output(predictions.clamp_min(1e-12).log(), own, 1)


def restart(domain: Domain, network: Network, config: DomainNormConfig) -> Domain:
    """Forget what a collapsed domain has learned, its voters included, Eq. 21; counts stay."""
    fresh, progress = start_domain(network, config), domain.progress
    progress = progress._replace(due=fresh.progress.due, restarts=progress.restarts + 1)
    return fresh._replace(key=domain.key, counts=domain.counts, progress=progress)


def learn(
    domain: Domain,
    number: int,
    window: Window,
    part: Encoded,
    prior: ClassPrior,
    size: float,
    setup: Setup,
) -> tuple[Domain, Window, list[Tensor | None]]:
    """Remember the images of a domain, and take the steps that fall due, Eq. 15 to 17.

    Also their features, by stretches, where predictions are made by the pass that a step learned
    from, which saves one; not while the domain is young.
    """
    network, config, run = setup
    young = int(domain.progress.images) < config.warmup_images
    found: list[Tensor | None] = []
    for images in part.split(config.step_every):
        b, progress, features = len(images.rows), domain.progress, None
        window, slots = remember(window, number, images)
        due, interval = progress.due + b, step_interval(int(domain.norms.steps), config)
        if due >= interval:
            members = (window.domain == number).nonzero()[:, 0]
            hidden, plain, device = window.hidden, window.features, window.hidden.device
            if len(members) < len(hidden):
                rows = send(members, device)
                hidden, plain = hidden[rows], plain[rows]
            given = hidden, plain, domain.norms.values, prior, network, config
            features, gradient = run(loss_gradient, *given)
            rate = size * min(1.0, len(members) / config.step_every)
            domain = domain._replace(norms=adam_update(domain.norms, gradient, rate, config))
            features = features[send(torch.searchsorted(members, slots), device)]
            due = due - interval
        domain = domain._replace(progress=progress._replace(images=progress.images + b, due=due))
        found.append(None if young else features)
    return domain, window, found


def adapt(
    domain: Domain, part: Encoded, found: list[Tensor | None], size: float, setup: Setup
) -> tuple[Domain, Tensor, Tensor]:
    """Features (b, E) and predictions (b, N) of images of a domain, Eq. 18.

    ``found`` are features of some stretches; the others are computed after the last step.
    """
    network, config, run = setup
    stretches = zip(part.split(config.step_every), found, strict=True)
    waiting = [images.hidden for images, features in stretches if features is None]
    if waiting and domain.norms.steps == 0:
        return domain, part.features, part.zero_shot
    rest: Iterator[Tensor] = iter(())
    if waiting:
        hidden = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        after = run(network.features, hidden, domain.norms.values)
        rest = iter(torch.split(after, [len(hidden) for hidden in waiting]))
    features = torch.cat([next(rest) if one is None else one for one in found])
    p = network.probabilities(features)
    domain = domain._replace(predicted=watch(domain.predicted, p, part.zero_shot))
    return domain, features, p.lerp(part.zero_shot, config.zero_shot_share * (1 - size))


def step_size(confidence: float, config: DomainNormConfig) -> float:
    """Share λ of a full step at a mean zero-shot confidence, Eq. 14."""
    scale = config.uncertainty_scale
    return min(1.0, (1 - confidence) / scale) if scale > 0 else 1.0


def step_interval(steps: int, config: DomainNormConfig) -> int:
    """Images of a domain until its next step, after ``steps`` of them: the schedule of Eq. 17."""
    return config.settled_every if steps >= config.settled_steps else config.step_every


def rate_decay(step: int, floor: float) -> float:
    """Learning rate of a step, 1 for the first, as a share of that of the first, Eq. 17."""
    return max(floor, math.pow(step, -0.5))


def remember(window: Window, number: int, images: Encoded) -> tuple[Window, Tensor]:
    """Write images of a domain over the oldest of the window; their slots in it, on the CPU."""
    b, W, hidden = len(images.rows), len(window.domain), images.hidden.to(window.hidden.dtype)
    if b == W:  # all of it, without a copy
        numbers = torch.full_like(window.domain, number)
        return Window(hidden, images.features, numbers, torch.tensor(W)), torch.arange(W)
    slots, position = ring(window.next, b, W)
    rows = send(slots, hidden.device)
    return Window(
        window.hidden.index_copy(0, rows, hidden),
        window.features.index_copy(0, rows, images.features),
        window.domain.index_fill(0, slots, number),
        position,
    ), slots


def adam_update(
    norms: AdamState, gradient: Tensor, share: float, config: DomainNormConfig
) -> AdamState:
    """Take a share of a step of Adam on LayerNorms, Eq. 17; none on a gradient that overflowed."""
    rate = config.lr * rate_decay(int(norms.steps) + 1, config.lr_floor) * share
    after, finite = adam_step(norms, gradient, Adam(rate)), gradient.isfinite().all()
    return AdamState(
        torch.where(finite, after.values, norms.values),
        torch.where(finite, after.first, norms.first),
        torch.where(finite, after.second, norms.second),
        after.steps,
    )


def loss_gradient(
    hidden: Tensor,
    plain: Tensor,
    theta: Tensor,
    prior: ClassPrior,
    network: Network,
    config: DomainNormConfig,
) -> tuple[Tensor, Tensor]:
    """Features f(h; θ) (b, E) of images, f(h; θ₀) given, and the gradient (P,) of their loss."""
    fraction = config.confident_fraction
    certain = certain_weights(len(hidden), fraction + (1 - fraction) * prior.belief.double())
    target = target_marginal(network.probabilities(plain).mean(dim=0), prior)
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        features = network.features(hidden, leaf)
        loss = domain_loss(network.logits(features), target, certain.to(target), config.diversity)
    return features.detach(), torch.autograd.grad(loss, leaf)[0]


def target_marginal(marginal: Tensor, prior: ClassPrior) -> Tensor:
    """Target t (N,) of the marginal of a window whose zero-shot marginal is given, Eq. 15."""
    corrected = marginal * prior.prior / prior.marginal.clamp_min(1e-8)
    return corrected / corrected.sum()


def certain_weights(count: int, confident_fraction: Tensor) -> Tensor:
    """Weights (count,), by rank of certainty, of a mean over the most certain images, Eq. 16."""
    most = (confident_fraction * count).floor().clamp_min(1)
    return (torch.arange(count, device=most.device) < most).to(most.dtype) / most


def domain_loss(logits: Tensor, target: Tensor, certain: Tensor, diversity: float) -> Tensor:
    """Mean entropy of the most certain images, and KL(marginal || target), Eq. 16."""
    log_p = logits.log_softmax(dim=-1)
    marginal = log_p.exp().mean(dim=0)
    log_ratio = marginal.clamp_min(1e-8).log() - target.clamp_min(1e-8).log()
    uncertain = (log_prob_entropy(log_p).sort().values * certain).sum()
    return uncertain + diversity * (marginal * log_ratio).sum()


def vote(
    domain: Domain, part: Encoded, features: Tensor, p: Tensor, config: DomainNormConfig
) -> tuple[Domain, Tensor]:
    """Predictions (b, N) with the votes of recent images, which these join, Eq. 19."""
    voters, V = domain.voters, config.vote_memory
    held = min(int(voters.next), V)
    nearest = nearest_images(features, voters.features[:held], config.neighbours)
    voted = add_votes(p, voters.predictions[:held], nearest, config.vote_share)
    classes = part.zero_shot.argmax(dim=1)
    same = torch.cat([classes, voters.zero_shot[:held]])[nearest] == classes[:, None]
    agreement = domain.counts.agreement + same.sum() / max(1, nearest.shape[1])
    slots, position = ring(voters.next, min(len(p), V), V)
    slots = send(slots, p.device)
    voters = Voters(
        voters.features.index_copy(0, slots, features[:V]),
        voters.predictions.index_copy(0, slots, p[:V]),
        voters.zero_shot.index_copy(0, slots, classes[:V]),
        position,
    )
    return domain._replace(counts=domain.counts._replace(agreement=agreement), voters=voters), voted


def nearest_images(features: Tensor, others: Tensor, neighbours: int) -> Tensor:
    """Rows (b, k) of ``cat([features, others])`` that are most similar to each image but itself."""
    b = len(features)
    similarity = features @ torch.cat([features, others]).T
    similarity[:, :b].fill_diagonal_(-2.0)
    return similarity.topk(min(neighbours, b + len(others) - 1), dim=1).indices


def add_votes(p: Tensor, others: Tensor, nearest: Tensor, share: float) -> Tensor:
    """Mix the mean prediction of the nearest of ``cat([p, others])`` into each of ``p``, Eq. 19."""
    if nearest.shape[1] == 0 or share == 0:
        return p
    return (1 - share) * p + share * torch.cat([p, others])[nearest].mean(dim=1)


def count_finite(features: Tensor) -> Tensor:
    """Number (1,) of images whose features (b, E) are finite."""
    return features.isfinite().all(dim=1).sum(dim=0, keepdim=True)
