"""A small random CLIP and images for it: what most tests run on."""

import torch
from torch import Tensor

from cliquetta.model.clip import CLIP
from cliquetta.model.config import CLIPConfig, TextConfig, VisionConfig

TINY_NAMES = ("airplane", "cat", "frog", "ship", "truck")
MERGES = 512


def build_tiny_clip(seed: int = 0) -> CLIP:
    """A random CLIP of 32 px, width 32, 2 + 2 blocks, whose features differ between inputs."""
    vision = VisionConfig(
        image_size=32, patch_size=8, width=32, layers=2, heads=2, hidden=64
    )
    text = TextConfig(
        context_length=32,
        vocab_size=512 + MERGES + 2,
        width=32,
        layers=2,
        heads=2,
        hidden=64,
        merges=MERGES,
    )
    model = CLIP(CLIPConfig(embed_dim=24, vision=vision, text=text), id="tiny")
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name == "logit_scale":
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:  # gains near one, biases near zero
            start = 1.0 if name.endswith("weight") and ".ln" in f".{name}" else 0.0
            weight.data = start + 0.1 * noise
        elif name.endswith(("position", "tokens.weight")):
            weight.data = 0.5 * noise
        else:
            weight.data = noise * weight[0].numel() ** -0.5
    _centre(model)
    model.logit_scale.data.fill_(
        torch.tensor(10.0).log()
    )  # 100 would saturate every softmax
    return model


def _centre(model: CLIP) -> None:
    """Take away what all images, and all texts, have in common: it drowns what tells them apart."""
    images = model.require_vit()
    tokens = images.run(images.embed(make_tiny_images()))[:, 0]
    images.ln_post.bias.data -= images.ln_post(tokens).mean(dim=0)
    text = model.require_text()
    features = model.encode_text([f"a photo of a {name}." for name in TINY_NAMES])
    # the projection is wide enough to be inverted: move the bias by what maps to the
    # mean
    text.ln_final.bias.data -= features.mean(dim=0) @ torch.linalg.pinv(text.projection)


def make_tiny_images() -> Tensor:
    """Ten preprocessed images (10, 3, 32, 32): smooth random patterns in pairs that resemble."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.randn(5, 3, 4, 4, generator=generator).repeat_interleave(2, dim=0)
    coarse = coarse + 0.3 * torch.randn(10, 3, 4, 4, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
