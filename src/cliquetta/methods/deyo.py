"""DeYO: learn from sure images whose prediction breaks when their shape is destroyed.

Lee et al., Entropy is not Enough for Test-Time Adaptation: From the Perspective of
Disentangled Factors, ICLR 2024. Of every batch those images teach that have an entropy
below 0.5 ln N and whose probability of the predicted class falls by more than a
threshold when the cells of a 4 x 4 grid are shuffled (PLPD); they lower the weighted
mean of

    H(x) · (exp(0.4 ln N - H(x)) + exp(PLPD(x)))

by one step on the LayerNorms of the image tower, those of the last quarter of the
blocks and the final one left out. The prediction is that of the forward pass before the
step; the step stays.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.config import Count, NonNegative
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.layernorm import MomentumAdapter, MomentumConfig
from cliquetta.methods.registry import register
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class DeYOConfig(MomentumConfig):
    """Entropy minimisation on images that depend on shape, never reset."""

    entropy_threshold: NonNegative = 0.5
    """τ_Ent as a multiple of ln N: images of higher entropy do not teach."""
    entropy_margin: NonNegative = 0.4
    """Ent₀ as a multiple of ln N: entropy at which the weight of certainty is 1."""
    plpd_threshold: float = 0.2
    """τ_PLPD: images whose probability falls less do not teach."""
    patch_grid: Count = 4  # Cells per side of the grid that is shuffled.


def shuffle_patches(images: Tensor, grid: int, generator: torch.Generator) -> Tensor:
    """Images (B, 3, S, S) with their cells in one random order, the same for all of them."""
    order = torch.randperm(grid * grid, generator=generator).to(images.device)
    return join_patches(split_patches(images, grid)[:, order], images.shape[-1])


def probability_drop(logits: Tensor, shuffled: Tensor) -> Tensor:
    """PLPD (B,): probability of the predicted class minus that for the shuffled image."""
    label = logits.argmax(dim=-1, keepdim=True)
    drop = logits.softmax(dim=-1).gather(1, label) - shuffled.softmax(dim=-1).gather(
        1, label
    )
    return drop[:, 0]


def sample_weights(entropies: Tensor, drop: Tensor, margin: float) -> Tensor:
    """exp(Ent₀ - H) + exp(PLPD), (B,)."""
    return (margin - entropies).exp() + drop.exp()


def split_patches(images: Tensor, grid: int) -> Tensor:
    """Patches (B, grid², 3, h, w) of images (B, 3, S, S), reduced where ``grid`` does not fit."""
    side = images.shape[-1] // grid * grid
    if side != images.shape[-1]:
        images = F.interpolate(
            images, size=(side, side), mode="bilinear", antialias=True
        )
    B, C = images.shape[:2]
    cells = images.view(B, C, grid, side // grid, grid, side // grid)
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def join_patches(patches: Tensor, size: int) -> Tensor:
    """Images (B, 3, size, size) of patches (B, grid², 3, h, w), row by row."""
    B, cells, C, h, w = patches.shape
    grid = round(cells**0.5)
    images = patches.view(B, grid, grid, C, h, w).permute(0, 3, 1, 4, 2, 5)
    images = images.reshape(B, C, grid * h, grid * w)
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


@register(
    "deyo",
    tuned={"mild": DeYOConfig(plpd_threshold=0.3)},
    setting="ViT-B/16, ImageNet-C, wild",
)
class DeYO(MomentumAdapter):
    """Entropy steps on LayerNorms from images whose prediction depends on their shape."""

    merge_rules = (("norms", "mean"), ("velocity", "mean"), ("generator", "first"))
    config: DeYOConfig

    def _setup(self) -> None:
        super()._setup()
        self.memory.declare_generator("generator", self.seed)

    def _predict(self, batch: Batch) -> Prediction:
        config, memory = self.config, self.memory
        with memory.generator("generator") as generator:
            shuffled = shuffle_patches(batch.images, config.patch_grid, generator)
        with torch.enable_grad():
            values = memory["norms"].detach().requires_grad_()
            logits = self.logits(values, batch.images)
            loss, teaching = self.loss(logits, values.detach(), shuffled)
            if teaching.any():
                (gradient,) = torch.autograd.grad(loss, values)
                self.step(gradient, len(batch))
        return Prediction(logits.detach().float(), {"teaching": teaching})

    def loss(
        self, logits: Tensor, norms: Tensor, shuffled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted mean entropy of the images that teach, and which (B,) do."""
        config, chance = self.config, math.log(len(self.prompts))
        entropies = entropy(logits)
        teaching = entropies.detach() < config.entropy_threshold * chance
        rows = teaching.nonzero()[:, 0]
        if not len(rows):
            return entropies.mean(), teaching
        with torch.no_grad():
            drop = probability_drop(logits[rows], self.logits(norms, shuffled[rows]))
            teaching[rows] = drop > config.plpd_threshold
            weights = sample_weights(
                entropies[rows], drop, config.entropy_margin * chance
            )
        still = teaching[rows]
        return (entropies[rows] * weights)[still].mean(), teaching
