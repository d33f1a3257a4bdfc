"""``domain_norm`` once more, from docs/methods/domain_norm.md alone: loops over images in numpy.

The image tower and its derivative are torch's (whoever re-implements the method has a CLIP);
everything else is written out with the numbers of the page. Nothing of the method is imported.
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
    return float(-sum(max(x, 1e-8) * math.log(max(x, 1e-8)) for x in p))


def clip(x: float) -> float:
    return min(1.0, max(0.0, x))


def evenness(nu: Array) -> float:
    return math.exp(entropy(nu)) / len(nu)


@dataclass
class Image:
    """One image with all that is computed of it."""

    row: int
    hidden: Tensor
    s: Array
    f: Array
    z: Array
    adapted: Array = field(default_factory=lambda: np.zeros(0))
    p: Array = field(default_factory=lambda: np.zeros(0))


@dataclass
class Key:
    n: float
    mu: Array
    S: Array

    @classmethod
    def of(cls, images: list[Array]) -> Key:
        mu = sum(images, np.zeros_like(images[0])) / len(images)
        return cls(len(images), mu, sum(((s - mu) ** 2 for s in images), np.zeros_like(mu)))

    def add(self, other: Key) -> None:  # Eq. 4
        n, m, step = self.n, other.n, other.mu - self.mu
        self.n, self.mu = n + m, self.mu + step * m / (n + m)
        self.S = self.S + other.S + step**2 * n * m / (n + m)

    def distance(self, batch: Key) -> float:  # Eq. 5
        if self.n == 0:
            return math.inf
        variance = np.maximum((self.S + batch.S) / max(1, self.n + batch.n - 2), 1e-6)
        return float(np.mean((batch.mu - self.mu) ** 2 / variance - 1 / batch.n - 1 / self.n))


class Domain:
    def __init__(self, theta: Array, N: int, F: int, voters: int) -> None:
        self.theta, self.first, self.second = theta.copy(), 0 * theta, 0 * theta
        self.steps = self.images = self.due = self.last_used = self.restarts = 0
        self.key = Key(0, np.zeros(F), np.zeros(F))
        self.n, self.confidence, self.entropy = 0, 0.0, 0.0
        self.plain, self.mass, self.debiased, self.recent = (np.zeros(N) for _ in range(4))
        self.A, self.B = np.zeros(N), np.zeros(N)
        self.hub = -1
        self.hub_logits: list[tuple[float, Array]] = []
        self.argmax_p, self.argmax_z = np.zeros(N), np.zeros(N)
        self.voters: deque[tuple[Array, Array]] = deque(maxlen=voters)


class LiteralDomainNorm:
    """The method with the page's numbers; those that the test changes are arguments."""

    def __init__(
        self,
        model: CLIP,
        text: Tensor,
        *,
        domains: int = 4,
        W: int = 64,
        warmup: int = 256,
        voters: int = 256,
        lr: float = 0.012,
        settled_steps: int = 32,
        settled_every: int = 256,
    ) -> None:
        self.model, self.tower, self.text = model, model.require_vit(), text
        self.T, self.tau, self.N = text.numpy(), model.scale, len(text)
        blocks = len(self.tower.blocks)
        self.start = min(max(1, blocks // 6), blocks - 1)
        self.names = [
            f"tower.blocks.{i}.{norm}.{kind}"
            for i in range(self.start, blocks)
            for norm in ("ln_1", "ln_2")
            for kind in ("weight", "bias")
        ]
        self.late = Late(self.tower, self.start)
        loaded = dict(self.late.named_parameters())
        self.shapes = [loaded[name].shape for name in self.names]
        self.theta = torch.cat([loaded[name].detach().flatten() for name in self.names]).numpy()
        self.W, self.warmup, self.voters, self.lr = W, warmup, voters, lr
        self.settled_steps, self.settled_every = settled_steps, settled_every
        self.F = 2 * self.tower.config.width
        self.domains = [self.new() for _ in range(domains)]
        self.current = 0
        self.window: deque[tuple[int, Image]] = deque(maxlen=W)
        self.group: deque[Array] = deque(maxlen=16)

    def new(self) -> Domain:
        return Domain(self.theta, self.N, self.F, self.voters)

    # --- CLIP ---------------------------------------------------------------------------------

    def features(self, theta: Tensor, hidden: Tensor) -> Tensor:
        parts = torch.split(theta, [shape.numel() for shape in self.shapes])
        norms = {n: x.view(s) for n, x, s in zip(self.names, parts, self.shapes, strict=True)}
        actual: Tensor = functional_call(self.late, norms, (hidden,))
        return actual / actual.norm(dim=1, keepdim=True)

    def encode(self, images: Tensor) -> list[Image]:
        with torch.no_grad():
            early = self.tower.run(self.tower.embed(images), 0, 1)
            hidden = self.tower.run(early, 1, self.start)
            plain = self.model.encode_image(images, normalize=True).numpy()
        patches = early[:, self.tower.config.class_tokens :].float().double().numpy()
        actual = []
        for i in range(len(images)):
            s = np.concatenate([patches[i].mean(axis=0), patches[i].std(axis=0, ddof=1)])  # Eq. 2
            z = softmax(self.tau * self.T @ plain[i])  # Eq. 1
            actual.append(Image(i, hidden[i], s, plain[i], z))
        return arranged(actual)

    # --- Algorithm 1 --------------------------------------------------------------------------

    def interval(self, domain: Domain) -> int:
        return self.settled_every if domain.steps >= self.settled_steps else self.W

    def step(self, images: Tensor) -> Array:
        domain = self.domains[self.current]
        if domain.due + len(images) <= self.interval(domain) - self.W:
            output = self.settled(domain, images)
            if output is not None:
                return output
        batch = self.encode(images)
        output = np.full((len(images), self.N), 1 / self.N)
        parts = self.assign(batch)
        for number, part in parts:
            domain, stretch = self.domains[number], arranged(part) if len(parts) > 1 else part
            pi, m, beta, w, c, information = self.count(domain, stretch)
            if self.collapsed(domain):
                self.restart(domain)
            size = min(1.0, (1 - c) / 0.3)  # Eq. 14
            self.learn(number, stretch, pi, m, beta, size)
            self.vote(domain, stretch, w, output)
            if information < 0.1:
                for image in stretch:
                    output[image.row] = image.z
        return np.asarray(np.log(np.maximum(output, 1e-12)))

    def settled(self, domain: Domain, images: Tensor) -> Array | None:
        batch = self.encode(images)
        with torch.no_grad():
            hidden = torch.stack([image.hidden for image in batch])
            adapted = self.features(torch.from_numpy(domain.theta), hidden).numpy()
        for image, feature in zip(batch, adapted, strict=True):
            image.adapted, image.p = feature, softmax(self.tau * self.T @ feature)
            image.z = image.p
        batch = arranged(sorted(batch, key=lambda image: image.row))
        before = list(self.group)
        for image in batch[:16]:
            self.group.append(image.s)
        chosen = self.choose(batch)
        if [number for number, _ in chosen] != [self.current] or self.information(domain) < 0.1:
            self.group = deque(before, 16)
            return None
        domain.last_used = 1 + max(other.last_used for other in self.domains)
        domain.key.add(key_of(batch))
        domain.recent = domain.recent * 0.5 ** (len(batch) / 16)
        for image in batch:
            domain.recent = domain.recent + image.p
        domain.images += len(batch)
        domain.due += len(batch)
        output = np.zeros((len(images), self.N))
        self.vote(domain, batch, self.prior(domain)[3], output)
        return np.asarray(np.log(np.maximum(output, 1e-12)))

    def assign(self, batch: list[Image]) -> list[tuple[int, list[Image]]]:
        for image in batch[:16]:
            self.group.append(image.s)
        parts: list[tuple[int, list[Image]]] = []
        for number, part in self.choose(batch):
            if number is None:
                number = min(range(len(self.domains)), key=lambda k: self.domains[k].last_used)
                self.domains[number] = self.new()
                self.window = deque(((-1 if k == number else k, x) for k, x in self.window), self.W)
            self.domains[number].last_used = 1 + max(domain.last_used for domain in self.domains)
            self.domains[number].key.add(Key.of([image.s for image in part]))
            parts.append((number, part))
        self.current = max(parts, key=lambda one: len(one[1]))[0]
        return parts

    def choose(self, batch: list[Image]) -> list[tuple[int | None, list[Image]]]:
        if len(self.domains) == 1 or self.domains[self.current].images < 32:
            return [(self.current, batch)]
        b = len(batch)
        if b < 16:
            return [(self.nearest(list(self.group)), batch)]
        alone = [self.nearest_alone(image) for image in batch]
        numbers = [k for k in sorted(set(alone)) if alone.count(k) >= max(4, b / 8)]
        if len(numbers) > 1:
            parts = {
                k: [x for x, own in zip(batch, alone, strict=True) if own == k] for k in numbers
            }
            near = {
                k: [j for j in numbers if self.domains[j].key.distance(key_of(part)) <= 0.6]
                for k, part in parts.items()
            }
            if all(near[k] == [k] for k in numbers):
                largest = max(numbers, key=lambda k: len(parts[k]))
                own = [k if k in numbers else largest for k in alone]
                return [
                    (k, [x for x, o in zip(batch, own, strict=True) if o == k]) for k in numbers
                ]
        return [(self.nearest([image.s for image in batch]), batch)]

    def nearest(self, signatures: list[Array]) -> int | None:  # Eq. 6
        far = [domain.key.distance(Key.of(signatures)) for domain in self.domains]
        least = min(far)
        return far.index(least) if least <= 0.6 * (1 + 3 / len(signatures)) else None

    def nearest_alone(self, image: Image) -> int:
        far = []
        for domain in self.domains:
            key = domain.key
            variance = np.maximum(key.S / max(1, key.n - 1), 1e-6)
            far.append(
                math.inf if key.n < 2 else float(np.mean((image.s - key.mu) ** 2 / variance))
            )
        return far.index(min(far))

    def count(self, domain: Domain, part: list[Image]) -> Any:
        logs = [np.log(image.z) for image in part]
        a = [x - x.mean() for x in logs]
        A, B = domain.A, domain.B
        for round in range(4):  # Eq. 7 and 8
            common = B.sum() / max(A.sum(), 1e-6)
            g = (B + common) / (A + 1)
            q = [softmax(2 * (x - g)) for x in a]
            if round < 3:
                A = domain.A + sum((1 - x) ** 4 for x in q)
                B = domain.B + sum((1 - x) ** 4 * y for x, y in zip(q, a, strict=True))
        domain.A, domain.B = A, B
        domain.recent = domain.recent * 0.5 ** (len(part) / 16)
        for image, x in zip(part, q, strict=True):
            domain.n += 1
            domain.plain[image.z.argmax()] += 1
            domain.mass = domain.mass + image.z
            domain.confidence += image.z.max()
            domain.entropy += entropy(image.z)
            domain.debiased = domain.debiased + x
            domain.recent = domain.recent + x
        hub = int(domain.plain.argmax())
        if hub != domain.hub:
            domain.hub, domain.hub_logits = hub, []
        domain.hub_logits += [(image.z[hub], x) for image, x in zip(part, a, strict=True)]
        return self.prior(domain)

    def prior(self, domain: Domain) -> Any:
        n, N, c, m = domain.n, self.N, domain.confidence / domain.n, domain.mass / domain.n
        nu_q, nu_plain = ((C + 1 / N) / (n + 1) for C in (domain.debiased, domain.plain))  # Eq. 9
        limit = min(0.72 + 0.5 * max(c - 0.5, 0), 0.92)
        beta = clip((limit - evenness(nu_q)) / 0.1 + 0.5)  # Eq. 10
        rho = clip((c - 0.6) / 0.1 + 0.5) * clip((0.3 - evenness(nu_plain)) / 0.1 + 0.5)  # Eq. 11
        rho *= 1 - clip((self.skewness(domain) - 0.6) / 0.2 + 0.5)
        tempered = nu_q**beta / (nu_q**beta).sum()
        pi = tempered ** (1 - rho) * nu_plain**rho  # Eq. 12
        pi, beta = pi / pi.sum(), beta + (1 - beta) * rho
        nu = nu_q ** (1 - rho) * nu_plain**rho
        w = (nu / nu.max()) ** (beta / 3)  # Eq. 13
        recent_images, e = domain.recent.sum(), evenness(nu_q)
        nu_r = (domain.recent + 1 / N) / (recent_images + 1)
        beta_r = clip((limit - evenness(nu_r)) / 0.1 + 0.5)
        of_domain = (recent_images * nu_q + 1 / N) / (recent_images + 1)
        o = clip((evenness(nu_r) / evenness(of_domain) - 1) / 0.3)
        w = w ** (1 - o) * (nu_r / nu_r.max()) ** (o * beta_r / 3)
        r = clip((1 - evenness(nu_r) / (e * (1 - math.exp(-recent_images / (e * N))))) / 0.3)
        w = w ** (1 - r) * (nu_r / nu_r.max()) ** r
        return pi, m, beta, w, c, self.information(domain)

    def information(self, domain: Domain) -> float:  # Eq. 20
        n = domain.n
        return math.inf if n < 64 else 1 - domain.entropy / n / entropy(domain.mass / n)

    def skewness(self, domain: Domain) -> float:
        weights = np.array([weight for weight, _ in domain.hub_logits])
        logits = np.stack([x for _, x in domain.hub_logits])
        actual = []
        for n in range(self.N):
            if n != domain.hub:
                mean = np.average(logits[:, n], weights=weights)
                variance = np.average((logits[:, n] - mean) ** 2, weights=weights)
                third = np.average((logits[:, n] - mean) ** 3, weights=weights)
                actual.append(third / max(variance, 1e-6) ** 1.5)
        return float(np.mean(actual))

    def collapsed(self, domain: Domain) -> bool:  # Eq. 21
        p, z = domain.argmax_p, domain.argmax_z
        if p.sum() < 128:
            return False
        return bool(p.max() > 0.95 * p.sum() and z[p.argmax()] < 0.5 * z.sum())

    def restart(self, domain: Domain) -> None:
        fresh = self.new()
        for name in ("theta", "first", "second", "steps", "due", "argmax_p", "argmax_z", "voters"):
            setattr(domain, name, getattr(fresh, name))
        domain.restarts += 1

    def learn(
        self, number: int, part: list[Image], pi: Array, m: Array, beta: float, size: float
    ) -> None:
        domain, W = self.domains[number], self.W
        young, waiting = domain.images < self.warmup, []
        for first in range(0, len(part), W):
            stretch = part[first : first + W]
            self.window.extend((number, image) for image in stretch)
            domain.images += len(stretch)
            domain.due += len(stretch)
            actual = None
            interval = self.interval(domain)
            if domain.due >= interval:
                domain.due -= interval
                actual = self.descend(
                    domain, [x for k, x in self.window if k == number], pi, m, beta, size
                )
            for image in stretch:
                if actual is None or young:
                    waiting.append(image)
                else:
                    image.adapted = actual[id(image)]
        if domain.steps == 0:
            for image in part:
                image.adapted, image.p = image.f, image.z
            return
        if waiting:
            with torch.no_grad():
                hidden = torch.stack([image.hidden for image in waiting])
                after = self.features(torch.from_numpy(domain.theta), hidden).numpy()
            for image, feature in zip(waiting, after, strict=True):
                image.adapted = feature
        fade = 0.5 ** (len(part) / 128)
        domain.argmax_p, domain.argmax_z = domain.argmax_p * fade, domain.argmax_z * fade
        alpha = (1 - size) / 2
        for image in part:
            p = softmax(self.tau * self.T @ image.adapted)
            domain.argmax_p[p.argmax()] += 1
            domain.argmax_z[image.z.argmax()] += 1
            image.p = (1 - alpha) * p + alpha * image.z  # Eq. 18

    def descend(
        self, domain: Domain, images: list[Image], pi: Array, m: Array, beta: float, size: float
    ) -> dict[int, Array]:
        k = len(images)
        t = np.mean([image.z for image in images], axis=0) * pi / m  # Eq. 15
        t = t / t.sum()
        theta = torch.from_numpy(domain.theta).requires_grad_()
        features = self.features(theta, torch.stack([image.hidden for image in images]))
        p = (self.tau * features @ self.text.T).softmax(dim=1)
        uncertain = sorted(-(row * row.log()).sum() for row in p)
        certain = uncertain[: max(1, math.floor((0.7 + 0.3 * beta) * k))]
        mean = p.mean(dim=0)
        loss = sum(certain) / len(certain) + (mean * (mean / torch.from_numpy(t)).log()).sum()  # 16
        g = torch.autograd.grad(loss, theta)[0].numpy()
        domain.steps += 1
        i = domain.steps
        rate = self.lr * max(i**-0.5, 0.25) * size * k / self.W  # Eq. 17
        domain.first = 0.9 * domain.first + 0.1 * g
        domain.second = 0.999 * domain.second + 0.001 * g**2
        first, second = domain.first / (1 - 0.9**i), domain.second / (1 - 0.999**i)
        domain.theta = domain.theta - rate * first / (np.sqrt(second) + 1e-8)
        return {id(x): f for x, f in zip(images, features.detach().numpy(), strict=True)}

    def vote(self, domain: Domain, part: list[Image], w: Array, output: Array) -> None:
        for image in part:  # Eq. 19
            others = [(x.adapted, x.p) for x in part if x is not image] + list(domain.voters)
            nearest = sorted(others, key=lambda one: -float(one[0] @ image.adapted))[:10]
            v = image.p
            if nearest:
                v = 0.6 * v + 0.4 * sum(p for _, p in nearest) / len(nearest)
            output[image.row] = v * w / (v * w).sum()
        domain.voters.extend((image.adapted, image.p) for image in part[: self.voters])


class Late(torch.nn.Module):
    """The tower from a block on."""

    def __init__(self, tower: Any, start: int) -> None:
        super().__init__()
        self.tower, self.start = tower, start

    def forward(self, hidden: Tensor) -> Tensor:
        actual: Tensor = self.tower.pool(self.tower.run(hidden, self.start))
        return actual


def key_of(images: list[Image]) -> Key:
    return Key.of([image.s for image in images])


def arranged(images: list[Image]) -> list[Image]:  # Eq. 3
    ranked = sorted(images, key=lambda image: image.z.max())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return [ranked[position] for position in order.tolist()]
