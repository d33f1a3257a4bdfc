"""``domain_norm`` once more, from docs/methods/domain_norm.md alone: loops over images in numpy.

The image tower and its derivative are torch's (whoever re-implements the method has a
CLIP); everything else is written out with the numbers of the page. Nothing of the
method is imported.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from cliquetta.model.clip import CLIP
from tests._helpers.arrays import Array, softmax


def entropy(p: Array) -> float:
    return float(-sum(x * math.log(x) for x in p))


def clip(x: float) -> float:
    return min(1.0, max(0.0, x))


def evenness(nu: Array) -> float:
    return math.exp(entropy(nu)) / len(nu)


def frequencies(mass: Array, n: float) -> Array:
    N = len(mass)
    return np.array([(C + 1 / N) / (n + 1) for C in mass])


def expected_evenness(n: float, w: float, N: float) -> float:  # Eq. 7
    draws = min(n / w, 100 * N)
    weight = n / draws
    rate = draws / N
    total = 0.0

    for k in range(256):
        # so many draws of a class, by Poisson
        log_chance = k * math.log(rate) - rate - math.lgamma(k + 1)
        chance = math.exp(log_chance)
        mass = weight * k
        nu = (mass + 1 / N) / (n + 1)
        total -= N * chance * nu * math.log(nu)
    return math.exp(total) / N


@dataclass
class Image:
    """One image with all that is computed of it."""

    row: int
    hidden: Tensor
    s: Array
    f: Array
    z: Array
    adapted: Array = field(default_factory=lambda: np.zeros(0))


@dataclass
class Key:
    n: float
    mu: Array
    S: Array

    @classmethod
    def of(cls, images: list[Array]) -> Key:
        n = len(images)
        zero = np.zeros_like(images[0])
        mu = sum(images, zero) / n
        squares = [(s - mu) ** 2 for s in images]
        return cls(n, mu, sum(squares, zero))

    def add(self, other: Key) -> None:
        n = self.n
        m = other.n
        total = n + m
        step = other.mu - self.mu
        between = step**2 * n * m / total
        self.n = total
        self.mu = self.mu + step * m / total
        self.S = self.S + other.S + between

    def distance(self, batch: Key) -> float:  # Eq. 3
        if self.n == 0:
            return math.inf
        # squared difference of the means in pooled deviations
        freedom = max(1, self.n + batch.n - 2)
        variance = (self.S + batch.S) / freedom
        variance = np.maximum(variance, 1e-6)
        difference = batch.mu - self.mu
        effect = difference**2 / variance
        # less what chance gives so many images
        by_chance = 1 / batch.n + 1 / self.n
        return float(np.mean(effect - by_chance))


class Domain:
    def __init__(self, theta: Array, N: int, F: int) -> None:
        self.theta = theta.copy()
        self.first = 0 * theta
        self.second = 0 * theta
        self.steps = 0
        self.images = 0
        self.due = 0
        self.last_used = 0
        self.T = 1.0
        self.key = Key(0, np.zeros(F), np.zeros(F))
        self.n = 0
        self.confidence = 0.0
        self.squares = 0.0
        self.recent_squares = 0.0
        self.mass = np.zeros(N)
        self.debiased = np.zeros(N)
        self.recent = np.zeros(N)
        self.plain = np.zeros(N)
        self.hub = -1
        self.hub_logits: list[tuple[float, Array]] = []
        self.A = np.zeros(N)
        self.B = np.zeros(N)


@dataclass
class Prior:
    m: Array
    pi: Array
    beta: float
    r: float
    weights: Array


class LiteralDomainNorm:
    """The method with the page's numbers; those that the test changes are arguments."""

    def __init__(
        self,
        model: CLIP,
        text: Tensor,
        *,
        domains: int = 4,
        W: int = 64,
        lr: float = 0.012,
        settled_steps: int = 32,
        settled_every: int = 256,
    ) -> None:
        self.model = model
        self.tower = model.require_vit()
        self.text = text
        self.T = text.numpy()
        self.tau = model.scale
        self.N = len(text)
        blocks = len(self.tower.blocks)
        self.start = min(1, blocks - 1)
        self.names = [
            f"tower.blocks.{i}.{norm}.{kind}"
            for i in range(self.start, blocks)
            for norm in ("ln_1", "ln_2")
            for kind in ("weight", "bias")
        ]
        self.late = Late(self.tower, self.start)
        loaded = dict(self.late.named_parameters())
        self.shapes = [loaded[name].shape for name in self.names]
        self.theta = torch.cat(
            [loaded[name].detach().flatten() for name in self.names]
        ).numpy()
        self.W = W
        self.lr = lr
        self.settled_steps = settled_steps
        self.settled_every = settled_every
        self.F = 2 * self.tower.config.width
        self.domains = [self.new() for _ in range(domains)]
        self.current = 0
        self.window: deque[tuple[int, Image]] = deque(maxlen=W)
        self.group: deque[Array] = deque([np.zeros(self.F)] * 16, maxlen=16)

    def new(self) -> Domain:
        return Domain(self.theta, self.N, self.F)

    # --- CLIP ---------------------------------------------------------------------------------

    def features(self, theta: Tensor, hidden: Tensor) -> Tensor:
        # the tower with its LayerNorms taken from theta
        sizes = [shape.numel() for shape in self.shapes]
        parts = torch.split(theta, sizes)
        norms = {}
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            norms[name] = part.view(shape)

        actual: Tensor = functional_call(self.late, norms, (hidden,))
        length = actual.norm(dim=1, keepdim=True)
        return actual / length

    def adapted(self, domain: Domain, images: list[Image]) -> list[Array]:
        theta = torch.from_numpy(domain.theta)
        with torch.no_grad():
            hidden = torch.stack([image.hidden for image in images])
            features = self.features(theta, hidden)
        return list(features.numpy())

    def encode(self, images: Tensor) -> list[Image]:
        with torch.no_grad():
            embedded = self.tower.embed(images)
            hidden = self.tower.run(embedded, 0, self.start)
            plain = self.model.encode_image(images, normalize=True).numpy()

        first = self.tower.config.class_tokens
        patches = hidden[:, first:].float().double().numpy()

        actual = []

        for i in range(len(images)):
            # Eq. 2
            mean = patches[i].mean(axis=0)
            deviation = patches[i].std(axis=0, ddof=1)
            s = np.concatenate([mean, deviation])
            # Eq. 1
            logits = self.tau * self.T @ plain[i]
            z = softmax(logits)
            actual.append(Image(i, hidden[i], s, plain[i], z))
        return arranged(actual)

    # --- Algorithm 1 --------------------------------------------------------------------------

    def interval(self, domain: Domain) -> int:
        return self.settled_every if domain.steps >= self.settled_steps else self.W

    def step(self, images: Tensor) -> Array:
        domain = self.domains[self.current]
        # a settled domain learns only at the end of its interval
        if domain.due + len(images) <= self.interval(domain) - self.W:
            output = self.between(domain, images)
            if output is not None:
                return output

        batch = self.encode(images)
        domain = self.assign(batch)
        prior = self.count(domain, batch)
        self.learn(domain, batch, prior)

        # Eq. 13
        output = np.zeros((len(images), self.N))

        for image in batch:
            logits = self.tau * self.T @ image.adapted / domain.T
            weighted = softmax(logits) * prior.weights
            output[image.row] = weighted / weighted.sum()
        return np.log(output)

    def between(self, domain: Domain, images: Tensor) -> Array | None:
        # predictions by the adapted features take the place of zero-shot ones
        batch = sorted(self.encode(images), key=lambda image: image.row)
        features = self.adapted(domain, batch)
        for image, feature in zip(batch, features, strict=True):
            logits = self.tau * self.T @ feature / domain.T
            image.z = softmax(logits)
        batch = arranged(batch)
        if self.choose(batch) != self.current:
            return None

        self.assign(batch)
        domain.images += len(batch)
        domain.due += len(batch)
        self.count_recent(domain, [image.z for image in batch])

        # with the prior of recent images
        prior = self.prior(domain)
        output = np.zeros((len(images), self.N))
        for image in batch:
            weighted = image.z * prior.weights
            output[image.row] = weighted / weighted.sum()
        return np.log(output)

    def assign(self, batch: list[Image]) -> Domain:
        number = self.choose(batch)
        if number is None:
            # a new domain takes the place of the one that was left first
            number = 0
            for k, domain in enumerate(self.domains):
                if domain.last_used < self.domains[number].last_used:
                    number = k
            self.domains[number] = self.new()
            kept = [(-1 if k == number else k, image) for k, image in self.window]
            self.window = deque(kept, self.W)

        for image in batch[:16]:
            self.group.append(image.s)
        domain = self.domains[number]
        domain.last_used = 1 + max(domain.last_used for domain in self.domains)
        domain.key.add(Key.of([image.s for image in batch]))
        self.current = number
        return domain

    def choose(self, batch: list[Image]) -> int | None:  # Eq. 4
        if len(self.domains) == 1:
            return self.current
        if self.domains[self.current].images < 32:
            return self.current
        signatures = [image.s for image in batch]
        if len(batch) < 16:
            signatures = [*self.group, *signatures][-16:]
        key = Key.of(signatures)
        far = [domain.key.distance(key) for domain in self.domains]
        least = min(far)
        reach = 0.6 * (1 + 3 / len(signatures))
        if least > reach:
            return None
        return far.index(least)

    def debiased(self, a: list[Array], A: Array, B: Array) -> list[Array]:  # Eq. 5
        images = max(A.sum(), 1e-6)
        common = B.sum() / images
        g = (B + common) / (A + 1)
        return [softmax(2 * (x - g)) for x in a]

    def count(self, domain: Domain, batch: list[Image]) -> Prior:
        # centred logarithms, without their bias
        logs = [np.log(image.z) for image in batch]
        a = [x - x.mean() for x in logs]
        first = self.debiased(a, domain.A, domain.B)

        for x, y in zip(first, a, strict=True):
            absence = (1 - x) ** 4
            domain.A = domain.A + absence
            domain.B = domain.B + absence * y

        q = self.debiased(a, domain.A, domain.B)

        for image, x in zip(batch, q, strict=True):
            domain.n += 1
            domain.mass = domain.mass + image.z
            domain.confidence += image.z.max()
            domain.debiased = domain.debiased + x
            domain.squares += (x**2).sum()
            domain.plain[image.z.argmax()] += 1

        self.count_recent(domain, q)

        # what is kept of the most frequent class starts anew with another one
        hub = int(domain.plain.argmax())
        if hub != domain.hub:
            domain.hub = hub
            domain.hub_logits = []
        for image, y in zip(batch, a, strict=True):
            domain.hub_logits.append((image.z[hub], y))
        return self.prior(domain)

    def count_recent(self, domain: Domain, q: list[Array]) -> None:
        kept = 0.5 ** (len(q) / 16)
        domain.recent = domain.recent * kept
        domain.recent_squares *= kept
        for x in q:
            domain.recent = domain.recent + x
            domain.recent_squares += (x**2).sum()

    def prior(self, domain: Domain) -> Prior:
        n = domain.n
        N = self.N
        c = domain.confidence / n
        m = domain.mass / n
        # Eq. 6
        nu = frequencies(domain.debiased, n)
        # Eq. 7
        w = max(domain.squares / n - 1 / N, 1e-4)
        e = evenness(nu) / expected_evenness(n, w, N)
        # Eq. 8
        limit = 0.72 + 0.2 * clip((c - 0.5) / 0.4)
        beta = clip((limit - e * self.chance(n, w)) / 0.1 + 0.5)

        rho = self.few(domain, c)
        plain = frequencies(domain.plain, n)
        pi = nu ** (beta * (1 - rho)) * plain**rho
        pi = pi / pi.sum()

        # Eq. 10
        n_r = domain.recent.sum()
        nu_r = frequencies(domain.recent, n_r)
        K = N * min(e, 1.0)
        w_r = max(domain.recent_squares / n_r - 1 / N, 1e-4)
        by_chance = expected_evenness(n_r, w_r, K) * K / N
        fewer = 1 - evenness(nu_r) / by_chance
        usual = frequencies(n_r * pi, n_r)
        more = evenness(nu_r) / evenness(usual) - 1
        r = clip(max(fewer, more) / 0.3)

        belief = beta + (1 - beta) * rho
        weights = pi ** (1 - r) * nu_r**r
        return Prior(m, pi, belief, r, weights)

    def chance(self, n: float, w: float) -> float:
        return math.exp(4 * w * math.sqrt((self.N - 1) / 2) / n)

    def few(self, domain: Domain, c: float) -> float:  # Eq. 9
        n = domain.n
        w = 1 - 1 / self.N
        # few classes are predicted
        plain = frequencies(domain.plain, n)
        e = evenness(plain) / expected_evenness(n, w, self.N)
        least = e * self.chance(n, w)
        few = clip((0.3 - least) / 0.1 + 0.5)
        # the most frequent of them is no hub
        skewness = self.skewness(domain)
        hub = clip((skewness - 0.6) / 0.2 + 0.5)
        # and predictions are sure
        sure = clip((c - 0.6) / 0.1 + 0.5)
        return sure * few * (1 - hub)

    def skewness(self, domain: Domain) -> float:
        weights = np.array([weight for weight, _ in domain.hub_logits])
        logits = np.stack([y for _, y in domain.hub_logits])
        actual = []

        for n in range(self.N):
            if n == domain.hub:
                continue
            mean = np.average(logits[:, n], weights=weights)
            off = logits[:, n] - mean
            variance = np.average(off**2, weights=weights)
            third = np.average(off**3, weights=weights)
            cubed_deviation = max(variance, 1e-6) ** 1.5
            actual.append(third / cubed_deviation)
        return float(np.mean(actual))

    def learn(self, domain: Domain, batch: list[Image], prior: Prior) -> None:
        young = domain.images < 4 * self.W
        waiting = []
        for first in range(0, len(batch), self.W):
            stretch = batch[first : first + self.W]
            self.window.extend((self.current, image) for image in stretch)
            domain.images += len(stretch)
            domain.due += len(stretch)
            actual = None
            interval = self.interval(domain)
            if domain.due >= interval:
                domain.due -= interval
                members = [x for k, x in self.window if k == self.current]
                actual = self.descend(domain, members, prior)
            for image in stretch:
                if actual is None or young:
                    waiting.append(image)
                else:
                    image.adapted = actual[id(image)]
        if domain.steps == 0:
            for image in batch:
                image.adapted = image.f
        elif waiting:
            for image, feature in zip(
                waiting, self.adapted(domain, waiting), strict=True
            ):
                image.adapted = feature

    def descend(
        self, domain: Domain, images: list[Image], prior: Prior
    ) -> dict[int, Array]:
        k = len(images)
        # Eq. 11: the classes that the prior expects
        z = np.mean([image.z for image in images], axis=0)
        t = z * prior.pi / prior.m
        t = t / t.sum()

        # uncertainty of each, and divergence of all from those classes
        theta = torch.from_numpy(domain.theta).requires_grad_()
        hidden = torch.stack([image.hidden for image in images])
        features = self.features(theta, hidden)
        p = (self.tau * features @ self.text.T).softmax(dim=1)
        uncertainty = -(p * p.log()).sum() / k
        mean = p.mean(dim=0)
        ratio = mean / torch.from_numpy(t)
        divergence = (mean * ratio.log()).sum()
        loss = uncertainty + divergence
        (gradient,) = torch.autograd.grad(loss, theta)
        g = gradient.numpy()

        # Eq. 12: Adam with a rate that falls with the steps and with the loss
        domain.steps += 1
        i = domain.steps
        share = clip(float(loss.detach()) / 0.3)
        rate = self.lr * max(i**-0.5, 0.25) * k / self.W * share
        domain.first = 0.9 * domain.first + 0.1 * g
        domain.second = 0.999 * domain.second + 0.001 * g**2
        first = domain.first / (1 - 0.9**i)
        second = domain.second / (1 - 0.999**i)
        step = first / (np.sqrt(second) + 1e-8)
        domain.theta = domain.theta - rate * step

        # Eq. 13: as sure as zero-shot
        actual = features.detach().numpy()
        confidence = float(np.mean([image.z.max() for image in images]))
        domain.T = self.temperature(actual, confidence)
        return {id(x): f for x, f in zip(images, actual, strict=True)}

    def temperature(self, features: Array, confidence: float) -> float:  # Eq. 13
        low = math.log(0.2)
        high = math.log(8.0)
        for _ in range(14):
            middle = (low + high) / 2
            logits = self.tau * features @ self.T.T / math.exp(middle)
            sure = np.mean([softmax(row).max() for row in logits])
            if sure > confidence:
                low = middle
            else:
                high = middle
        return math.exp((low + high) / 2)


class Late(torch.nn.Module):
    """The tower from a block on."""

    def __init__(self, tower: Any, start: int) -> None:
        super().__init__()
        self.tower = tower
        self.start = start

    def forward(self, hidden: Tensor) -> Tensor:
        actual: Tensor = self.tower.pool(self.tower.run(hidden, self.start))
        return actual


def arranged(images: list[Image]) -> list[Image]:
    ranked = sorted(images, key=lambda image: image.z.max())
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    return [ranked[position] for position in order.tolist()]
