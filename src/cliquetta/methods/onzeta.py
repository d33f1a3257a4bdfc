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
from cliquetta.methods.building.registry import register
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
    """Label images from text, balanced by the dual.

    Args:
        logits: f·T / τ (B, N), row by row.
        dual: ρ (N,) before the first row.
        lrs: c_r / √t (B,).
        balance: α.

    Returns:
        Labels q (B, N), and ρ after them.

    """
    # ρ ← max(0, ρ - lr (q - α / N)): what α / N adds is the same for all classes and
    # no softmax feels it, so that it is left out of ρ and lowers the bound instead
    gained = (lrs * balance / logits.shape[1]).cumsum(dim=0)
    labels = []
    for row, lr, least in zip(logits, lrs, -gained, strict=True):
        # q ∝ softmax(f·T / τ) exp(ρ)
        label = (row + dual).softmax(dim=0)
        labels.append(label)

        # ρ - lr q, at least zero with what was gained
        lowered = torch.addcmul(dual, label, lr, value=-1)
        dual = torch.maximum(lowered, least)

    # ρ itself again
    return torch.stack(labels), dual + gained[-1]


def vision_labels(
    products: Tensor, gram: Tensor, labels: Tensor, lrs: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Label images from vision, row after row, by proxies that learn from each.

    Proxies are not computed on the way: their products with later images follow from
    ``products`` and ``gram``. Steps are longer than proxies: give float64.

    Args:
        products: f·w (B, N) of images and proxies at the start.
        gram: Products (B, B) of images.
        labels: q (B, N).
        lrs: c_w / (√t τ_v) (B,).
        scale: 1 / τ_v.

    Returns:
        Labels r (B, N), and ``shares`` (B, N) of images in the proxies, which end as
        normalised start_k + Σ_j shares_jk f_j.

    """
    cosines = scale * products
    weighted = lrs[:, None] * labels
    one = torch.ones_like(labels[0])
    vision = []
    steps = []
    shrinks = []
    for row, lr in enumerate(lrs):
        # r = softmax(f·w / τ_v)
        label = cosines[row].softmax(dim=0)

        # w_k + c_k f with c = lr (q - r), whose squared length is 1 + c (c + 2 f·w)
        step = torch.addcmul(weighted[row], label, lr, value=-1)
        doubled = step.add(cosines[row], alpha=2 / scale)
        shrink = torch.addcmul(one, step, doubled).rsqrt()

        # products of later images with the proxies after this step
        later = cosines[row + 1 :]
        later.addr_(gram[row, row + 1 :], step, alpha=scale).mul_(shrink)

        vision.append(label)
        steps.append(step)
        shrinks.append(shrink)

    # a step shrinks with its own normalisation and all later ones, the start with all
    shrunk = torch.stack(shrinks)
    shares = torch.stack(steps) * shrunk / shrunk.cumprod(dim=0)
    return torch.stack(vision), shares


@register("onzeta", setting="ImageNet")
class OnZeta(ImageByImage):
    """Image by image: balanced labels teach vision proxies beside the texts; no training."""

    config: OnZetaConfig

    def _setup(self) -> None:
        super()._setup()

        # a recording for each size of a group
        self._replayed.shapes = GROUP.bit_length()

        # 1 / τ_v
        self.vision_scale = self.scale / self.config.vision_temperature

        # ρ and w
        device = self.model.device
        dual = torch.zeros(len(self.prompts), dtype=torch.float64, device=device)
        self.memory.declare("dual", dual)
        self.memory.declare("proxies", self.classifier, SHORT)

        # t, the number of images so far
        images = torch.zeros((), dtype=torch.long, device=device)
        self.memory.declare("images", images)

    def predict_group(self, features: Tensor) -> Tensor:
        """Mix the balanced text label and the vision label of each image: (B, N)."""
        images = len(features)

        # few sizes are recorded, powers of two; rows of zeros fill up to the next
        if features.is_cuda:
            size = 1 << (images - 1).bit_length()
            features = F.pad(features, (0, 0, 0, size - images))
        (predictions,) = self.replay(self._learn, features)
        return predictions[:images]

    def _learn(self, features: Tensor) -> tuple[Tensor]:
        """Predict a group (B, E) and learn from it; rows of zeros are no images."""
        config = self.config
        memory = self.memory
        classes = len(self.prompts)
        images = len(features)

        # all products at once: with texts, with proxies, and of the images
        others = torch.cat([self.scale * self.classifier, memory["proxies"], features])
        products = features.double() @ others.double().T
        parts = [classes, classes, images]
        logits, products, gram = torch.split(products, parts, dim=1)

        # t of each image
        present = features.any(dim=1)
        order = torch.arange(1, images + 1, device=features.device)
        time = (memory["images"] + order).double()

        # steps fade with 1 / √t; what is no image takes none
        fade = present * time.rsqrt()

        # q from text, with ρ after it
        lrs = config.dual_lr * fade
        text, dual = balanced_labels(logits, memory["dual"], lrs, config.balance)

        # r from vision, with w after it
        lrs = config.proxy_lr * self.vision_scale * fade
        vision, shares = vision_labels(products, gram, text, lrs, self.vision_scale)

        # w, normalised in the end alone
        proxies = torch.addmm(memory["proxies"].double(), shares.T, features.double())
        memory["dual"] = dual
        memory["proxies"] = l2_normalize(proxies).to(memory["proxies"].dtype)
        memory["images"] = memory["images"] + present.sum()

        # p = β_t r + (1 - β_t) q with β_t = β √(t / n)
        elapsed = (time / config.horizon).clamp(max=1)
        weight = config.vision_weight * elapsed.sqrt()
        return (torch.lerp(text, vision, weight[:, None]),)
