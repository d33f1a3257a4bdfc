"""TransCLIP against a numpy version with a loop for every index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cliquetta.methods.transclip import TransCLIPConfig

Array = npt.NDArray[np.float64]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def l2_normalize(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def numpy_transclip(f: Array, prior: Array, config: TransCLIPConfig) -> Array:
    """Assignments (B, N) by the update rules as they are printed."""
    B, N = prior.shape
    E = f.shape[1]
    w = np.zeros((B, B))
    for i in range(B):
        others = sorted((j for j in range(B) if j != i), key=lambda j: -f[i] @ f[j])
        for j in others[: config.neighbours]:
            w[i, j] = max(0.0, f[i] @ f[j])
    mu = np.zeros((N, E))
    for k in range(N):
        best = sorted(range(B), key=lambda i: -prior[i, k])[: config.init_images]
        mu[k] = l2_normalize(sum(prior[i, k] * f[i] for i in best))
    variance = np.full(E, 1 / E)
    z = prior.copy()
    tau = config.gaussian_temperature
    for step in range(config.rounds + 1):
        for _ in range(config.inner_steps):
            old = z.copy()
            for i in range(B):
                exponent = np.zeros(N)
                for k in range(N):
                    likelihood = -0.5 * ((f[i] - mu[k]) ** 2 / variance).sum()
                    near = sum((w[i, j] + w[j, i]) * old[j, k] for j in range(B))
                    exponent[k] = (likelihood + tau / (2 * config.neighbours) * near) / tau
                z[i] = softmax(config.text_weight * np.log(prior[i]) + exponent)
        if step == config.rounds:
            break
        for k in range(N):
            mu[k] = l2_normalize(sum(z[i, k] * f[i] for i in range(B)))
        residual = sum(z[i, k] * (f[i] - mu[k]) ** 2 for i in range(B) for k in range(N))
        variance = np.maximum(residual / B, 1e-6)
    return z
