"""OnZeta: strictly online zero-shot labels with balanced classes and learned vision proxies.

Qian and Hu, Online Zero-Shot Classification with CLIP, ECCV 2024. Images come one by one; for the
t-th feature f, with text classifier T, proxies w (at first T) and a dual ρ ≥ 0 per class

    q ∝ softmax(f·T / τ) exp(ρ)                     label from text, balanced by the dual
    ρ ← max(0, ρ - (c_r / √t) (q - α / N))          every class gets at least α / N on average
    r = softmax(f·w / τ_v)                          label from vision
    p = β_t r + (1 - β_t) q,  β_t = β √(t / n)      the answer, n the length of the stream
    w_k ← normalised w_k - (c_w / (√t τ_v)) (r_k - q_k) f

as in the official code (Apache-2.0), whose constants for ImageNet are the defaults. A deployed
stream has no known length: ours takes ``horizon`` for n, after which β_t stays at β. Ours also: the
vision temperature is given as a multiple of the model's own, 4 for CLIP's 0.04.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods._shared.config import Count, MethodConfig, NonNegative, Positive, Weight
from cliquetta.methods._shared.feature_level import ImageByImage, Numbers, numbers, softmax
from cliquetta.methods.registry import register


@dataclass(frozen=True)
class OnZetaConfig(MethodConfig):
    """Online labels and proxies with the authors' constants."""

    dual_lr: NonNegative = 20.0
    """c_r: step of the dual at the first image; it falls with √t."""
    proxy_lr: NonNegative = 0.5
    """c_w: step of the vision proxies at the first image; it falls with √t."""
    balance: NonNegative = 1.0
    """α: share of an even distribution that each class is to get at least; 0 switches it off."""
    vision_weight: Weight = 0.8
    """β: weight of the vision label at the end of the stream."""
    vision_temperature: Positive = 4.0
    """τ_v as a multiple of the model's own temperature."""
    horizon: Count = 1000
    """n: images after which the vision label has its full weight; the stream's length if known."""


def dual_step(dual: Numbers, label: Numbers, lr: float, balance: float) -> Numbers:
    """ρ after one image of label q (N,)."""
    return np.maximum(dual - lr * (label - balance / len(label)), 0)


class Proxies:
    """Unit proxies w_k = length_k (start_k + Σ_j share_jk f_j) of a group of images f.

    A step w_k ← normalised w_k - c_k f needs products of images and proxies only. Steps are longer
    than proxies: float64, or the sums would lose what is left of the start.
    """

    def __init__(self, start: Tensor, features: Tensor) -> None:
        self.start, self.features = start, features
        both = torch.cat([start, features]).double()
        products = numbers(features.double() @ both.T)
        self.products, self.gram = products[:, : len(start)], products[:, len(start) :]
        self.length, self.shares = np.ones(len(start)), np.zeros_like(self.products)

    def cosines(self, row: int) -> Numbers:
        """w·f (N,) of image ``row`` after the steps of those before it."""
        moved = self.products[row] + self.gram[row, :row] @ self.shares[:row]
        found: Numbers = self.length * moved
        return found

    def step(self, row: int, cosines: Numbers, size: Numbers) -> None:
        """Move by ``size`` c (N,) away from image ``row``, whose ``cosines`` are known."""
        self.shares[row] = -size / self.length
        self.length /= np.sqrt(1 + size * (size - 2 * cosines))

    def proxies(self) -> Tensor:
        """W (N, E) after all steps."""
        shares = torch.from_numpy(self.shares).to(self.start.device)
        moved = self.start.double() + shares.T @ self.features.double()
        return F.normalize(moved, dim=-1).to(self.start.dtype)


@register(
    "onzeta",
    paper="Qian and Hu, Online Zero-Shot Classification with CLIP, ECCV 2024",
)
class OnZeta(ImageByImage):
    """Image by image: balanced labels teach vision proxies beside the texts; no training.

    log of the mixture of the balanced text label and the vision label.
    """

    config: OnZetaConfig

    def _setup(self) -> None:
        super()._setup()
        self.vision_scale = self.scale / self.config.vision_temperature
        self.memory.declare("dual", torch.zeros(len(self.prompts), dtype=torch.float64))
        self.memory.declare("proxies", self.classifier)
        self.memory.declare("images", torch.zeros((), dtype=torch.long))

    def answer(self, features: Tensor) -> Numbers:
        """Mixtures of the balanced text label and the vision label."""
        config, memory = self.config, self.memory
        logits = numbers(self.scale * features.double() @ self.classifier.double().T)
        proxies = Proxies(memory["proxies"], features)
        dual, seen = numbers(memory["dual"]), int(memory["images"])
        answers = np.empty_like(logits)
        for row, t in enumerate(range(seen + 1, seen + len(features) + 1)):
            text = softmax(logits[row] + dual)
            dual = dual_step(dual, text, config.dual_lr / t**0.5, config.balance)
            cosines = proxies.cosines(row)
            vision = softmax(self.vision_scale * cosines)
            difference = vision - text
            weight = config.vision_weight * min(1.0, t / config.horizon) ** 0.5
            answers[row] = text + weight * difference
            lr = config.proxy_lr / t**0.5 * self.vision_scale
            proxies.step(row, cosines, lr * difference)
        memory["dual"], memory["proxies"] = torch.from_numpy(dual), proxies.proxies()
        memory["images"] = memory["images"] + len(features)
        return answers
