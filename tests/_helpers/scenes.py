"""Small worlds for SCAP: a double-precision model, and batches with cliques."""

import torch
from torch import Tensor

from cliquetta.model.clip import CLIP, initialise
from cliquetta.model.config import CLIPConfig, TextConfig, VisionConfig

NAMES = ("cat", "dog", "big red car", "ship", "tree frog", "old truck")


def build_model(seed: int, layers: int = 3, scale: float = 30.0) -> CLIP:
    """A random double-precision CLIP whose features spread, so that cliques differ."""
    vision = VisionConfig(16, 4, width=32, layers=layers, heads=2, hidden=64)
    text = TextConfig(
        24, 512 + 256 + 2, width=24, layers=2, heads=2, hidden=48, merges=256
    )
    model = initialise(
        CLIP(CLIPConfig(16, vision, text), id=f"scene-{seed}"), seed
    ).double()
    model.logit_scale.data = torch.tensor(scale).double().log()
    tower = model.require_vit()
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(64, 3, 16, 16, generator=generator).double()
    tokens = tower.run(tower.embed(pixels))[:, 0]
    # All random images share most of their feature; without that part they differ.
    tower.ln_post.bias.data -= tower.ln_post(tokens).mean(dim=0)
    return model


def make_batches(seed: int, count: int, size: int) -> list[Tensor]:
    """Batches of noisy copies of a few patterns."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(3, 3, 16, 16, generator=generator).double()
    batches = []
    for _ in range(count):
        which = torch.randint(0, 3, (size,), generator=generator)
        noise = torch.randn(size, 3, 16, 16, generator=generator).double()
        batches.append(patterns[which] + 0.6 * noise)
    return batches


def between_similarities(model: CLIP, images: Tensor, quantile: float) -> float:
    """A threshold in the middle of a gap, so that rounding decides no membership."""
    features = model.encode_image(images, normalize=True)
    values = (features @ features.T).flatten().sort().values
    inside = values[int(quantile * len(values)) :]
    wide = (inside.diff() > 1e-6).nonzero()[:, 0]
    if len(wide) == 0:
        return float(values[-1]) + 1.0
    return float((inside[wide[0]] + inside[wide[0] + 1]) / 2)
