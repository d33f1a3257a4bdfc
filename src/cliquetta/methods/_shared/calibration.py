"""A temperature for adapted answers, from the stream and without labels.

Learning from its own answers makes a method surer of them; zero-shot CLIP is not taught by the
stream. The temperature is that at which adapted answers are, on average, as sure as zero-shot CLIP
finds the same answers probable: never surer than CLIP is of its own, and the less so the more
answers were changed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TEMPERATURES = tuple(float(t) for t in torch.logspace(math.log10(0.2), math.log10(5), 33))
"""At which confidences are counted; the temperature is between the first and the last."""
HALF_LIFE = 16
"""Images after which an image counts half: methods change their answers as fast as they learn."""
CONFIDENCES = "confidences"
"""The sums in a method's memory."""


def no_confidences() -> Tensor:
    """Sums (1 + len(TEMPERATURES),) before the first image; see :func:`count_confidences`."""
    return torch.zeros(1 + len(TEMPERATURES))


def count_confidences(sums: Tensor, logits: Tensor, zero_shot: Tensor) -> Tensor:
    """Add a batch's probabilities of its classes: ``zero_shot`` (B, N), then per temperature."""
    logits = logits.float()
    backing = zero_shot.gather(1, logits.argmax(dim=1, keepdim=True)).sum()
    sure = [(logits / t).softmax(dim=1).amax(dim=1).sum() for t in TEMPERATURES]
    return sums * math.pow(0.5, len(logits) / HALF_LIFE) + torch.stack([backing, *sure]).to(sums)


def find_temperature(sums: Tensor) -> Tensor:
    """The temperature () at which answers are as sure as zero-shot CLIP backs them; 1 of none."""
    backing, sure = sums[0], sums[1:]
    high = (sure > backing).sum().clamp(1, len(sure) - 1)
    fall = (sure[high - 1] - sure[high]).clamp_min(torch.finfo(sums.dtype).tiny)
    weight = ((sure[high - 1] - backing) / fall).clamp(0, 1)
    scale = torch.tensor(TEMPERATURES).log().to(sums)
    found = scale[high - 1].lerp(scale[high], weight).exp()
    return torch.where(sums.sum() > 0, found, torch.ones_like(found))
