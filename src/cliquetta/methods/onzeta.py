"""OnZeta: strictly online zero-shot labels with balanced classes and learned vision proxies.

Qian and Hu, Online Zero-Shot Classification with CLIP, ECCV 2024. Images come one by
one; for the t-th feature f, with text classifier T, proxies w (at first T) and a dual ρ
≥ 0 per class

    q ∝ softmax(f·T / τ) exp(ρ)                     label from text, balanced by the dual
    ρ ← max(0, ρ - (c_r / √t) (q - α / N))          every class gets at least α / N on average
    r = softmax(f·w / τ_v)                          label from vision
    p = β_t r + (1 - β_t) q,  β_t = β √(t / n)      the prediction, n the length of the stream
    w_k ← normalised w_k - (c_w / (√t τ_v)) (r_k - q_k) f

as in the official code (Apache-2.0), whose constants for ImageNet are the defaults. A
deployed stream has no known length: ours takes ``horizon`` for n, after which β_t stays
at β. Ours also: the vision temperature is given as a multiple of the model's own, 4 for
CLIP's 0.04.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.config import (
    Count,
    MethodConfig,
    NonNegative,
    Positive,
    Weight,
)
from cliquetta.methods.building.feature_level import GROUP, ImageByImage
from cliquetta.methods.building.memory import SHORT
from cliquetta.methods.registry import register
from cliquetta.model.clip import l2_normalize


@dataclass(frozen=True)
class OnZetaConfig(MethodConfig):
    """Online labels and proxies with the authors' constants."""

    dual_lr: NonNegative = 20.0
    """c_r: step of the dual at the first image; it falls with √t."""
    proxy_lr: NonNegative = 0.5
    """c_w: step of the proxies at the first image; it falls with √t."""
    balance: NonNegative = 1.0
    """α: share of an even distribution that each class is to get at least; 0 switches it off."""
    vision_weight: Weight = 0.8
    """β: weight of the vision label at the end of the stream."""
    vision_temperature: Positive = 4.0
    """τ_v as a multiple of the model's own temperature."""
    horizon: Count = 1000
    """n: images after which the vision label has its full weight; the stream's length if known."""


def balanced_labels(
    logits: Tensor, dual: Tensor, lrs: Tensor, balance: float
) -> tuple[Tensor, Tensor]:
    """Labels q (B, N) of logits (B, N), row by row, and ρ (N,) less a constant after them."""
    gained = (lrs * balance / logits.shape[1]).cumsum(dim=0)
    labels = []
    for row, lr, least in zip(logits, lrs, -gained, strict=True):
        label = (row + dual).softmax(dim=0)
        dual = torch.maximum(torch.addcmul(dual, label, lr, value=-1), least)
        labels.append(label)
    return torch.stack(labels), dual + gained[-1]


def vision_labels(
    products: Tensor, gram: Tensor, labels: Tensor, lrs: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Labels r (B, N), row after row, and the ``shares`` (B, N) of images in the proxies.

    ``products`` (B, N) are of images and proxies at the start, ``gram`` (B, B) of
    images; proxies end as normalised start_k + Σ_j shares_jk f_j. Steps are longer than
    proxies: give float64.
    """
    cosines, weighted, one = (
        scale * products,
        lrs[:, None] * labels,
        torch.ones_like(labels[0]),
    )
    rows = []
    for row, lr in enumerate(lrs):
        label = cosines[row].softmax(dim=0)
        step = torch.addcmul(weighted[row], label, lr, value=-1)  # c = lr (q - r)
        squared = torch.addcmul(
            one, step, step.add(cosines[row], alpha=2 / scale)
        )  # |w + c f|²
        shrink = squared.rsqrt()
        cosines[row + 1 :].addr_(gram[row, row + 1 :], step, alpha=scale).mul_(shrink)
        rows.append((label, step, shrink))
    vision, steps, shrinks = (torch.stack(values) for values in zip(*rows, strict=True))
    return vision, steps * shrinks / shrinks.cumprod(dim=0)


@register("onzeta", setting="ImageNet")
class OnZeta(ImageByImage):
    """Image by image: balanced labels teach vision proxies beside the texts; no training."""

    config: OnZetaConfig

    def _setup(self) -> None:
        super()._setup()
        self._replayed.shapes = GROUP.bit_length()
        self.vision_scale = self.scale / self.config.vision_temperature
        N, device = len(self.prompts), self.model.device
        self.memory.declare("dual", torch.zeros(N, dtype=torch.float64, device=device))
        self.memory.declare("proxies", self.classifier, SHORT)
        self.memory.declare("images", torch.zeros((), dtype=torch.long, device=device))

    def predict_group(self, features: Tensor) -> Tensor:
        """Mixtures of the balanced text label and the vision label."""
        B = len(features)
        if features.is_cuda:  # a few sizes are recorded
            features = F.pad(features, (0, 0, 0, (1 << (B - 1).bit_length()) - B))
        return self.replay(self._learn, features)[0][:B]

    def _learn(self, features: Tensor) -> tuple[Tensor]:
        """Predictions of a group; rows of zeros are no images."""
        config, memory, (N, B) = (
            self.config,
            self.memory,
            (len(self.prompts), len(features)),
        )
        others = torch.cat([self.scale * self.classifier, memory["proxies"], features])
        products = features.double() @ others.double().T
        logits, products, gram = torch.split(products, [N, N, B], dim=1)
        present = features.any(dim=1)
        time = (
            memory["images"] + torch.arange(1, B + 1, device=features.device)
        ).double()
        fade = present * time.rsqrt()
        text, dual = balanced_labels(
            logits, memory["dual"], config.dual_lr * fade, config.balance
        )
        lrs = config.proxy_lr * self.vision_scale * fade
        vision, shares = vision_labels(products, gram, text, lrs, self.vision_scale)
        moved = torch.addmm(memory["proxies"].double(), shares.T, features.double())
        memory["dual"] = dual
        memory["proxies"] = l2_normalize(moved).to(memory["proxies"].dtype)
        memory["images"] = memory["images"] + present.sum()
        weight = config.vision_weight * (time / config.horizon).clamp(max=1).sqrt()
        return (torch.lerp(text, vision, weight[:, None]),)
