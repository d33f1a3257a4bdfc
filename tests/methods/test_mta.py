"""MTA against a plain numpy version of one image's alternation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cliquetta.methods.mta import MTAConfig

Array = npt.NDArray[np.float64]


def numpy_mta(f: Array, s: Array, config: MTAConfig) -> tuple[Array, Array, int]:
    """Mode, inlierness and iterations of one image: features (V, E), predictions (V, N)."""
    V, most = len(f), config.iterations
    h2 = np.empty(V)
    for p in range(V):
        others = sorted(((f[p] - f[q]) ** 2).sum() for q in range(V) if q != p)
        h2[p] = 0.5 * np.mean(others[: int(config.neighbour_fraction * (V - 1))])

    def kernel(m: Array) -> Array:
        return np.exp(-((f - m) ** 2).sum(axis=1) / (2 * h2))

    m, y, iterations = f[0], np.full(V, 1 / V), 0
    for _ in range(most):
        k = kernel(m)
        for _ in range(most):
            iterations += 1
            z = (k + config.affinity_weight * (s @ s.T) @ y) / config.entropy_weight
            old, y = y, np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            if np.linalg.norm(y - old) < config.tolerance:
                break
        for _ in range(most):
            iterations += 1
            w = y * kernel(m)
            old, m = m, (w[:, None] * f).sum(axis=0) / w.sum()
            m = m / np.linalg.norm(m)
            if np.linalg.norm(m - old) < config.tolerance:
                break
    return m, y, iterations


def scattered(images: int, views: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit features around one centre per image, some far off, and predictions for them."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(images, 1, 16, generator=generator)
    spread = torch.rand(images, views, 1, generator=generator) ** 3
    features = centre + 2 * spread * torch.randn(images, views, 16, generator=generator)
    features = torch.nn.functional.normalize(features, dim=-1)
    text = torch.nn.functional.normalize(torch.randn(6, 16, generator=generator), dim=-1)
    return features, (10 * features @ text.T).softmax(dim=-1)
