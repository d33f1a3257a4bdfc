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
from cliquetta.methods.building.registry import register
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
    """Reorder the cells of images (B, 3, S, S) at random, in all of them alike."""
    order = torch.randperm(grid * grid, generator=generator).to(images.device)

    # the whole batch at once
    patches = split_patches(images, grid)
    return join_patches(patches[:, order], images.shape[-1])


def probability_drop(logits: Tensor, shuffled: Tensor) -> Tensor:
    """Return the PLPD (B,): by how much the predicted class loses probability."""
    label = logits.argmax(dim=-1, keepdim=True)

    # probabilities of that class, (B, 1)
    before = logits.softmax(dim=-1).gather(1, label)
    after = shuffled.softmax(dim=-1).gather(1, label)

    # positive where the prediction depends on the shape
    return (before - after)[:, 0]


def sample_weights(entropies: Tensor, drop: Tensor, margin: float) -> Tensor:
    """Weigh sure images that depend on their shape: exp(Ent₀ - H) + exp(PLPD), (B,)."""
    return (margin - entropies).exp() + drop.exp()


def split_patches(images: Tensor, grid: int) -> Tensor:
    """Cut images (B, 3, S, S) into patches (B, grid², 3, h, w), row by row.

    Where ``grid`` does not divide S, images are reduced to the next size that it does.
    """
    # the side of a patch
    side = images.shape[-1] // grid
    images = _resample(images, side * grid)

    # (B, 3, row, h, column, w) -> (B, row, column, 3, h, w)
    B, C = images.shape[:2]
    cells = images.view(B, C, grid, side, grid, side)
    cells = cells.permute(0, 2, 4, 1, 3, 5)
    return cells.flatten(1, 2)


def join_patches(patches: Tensor, size: int) -> Tensor:
    """Join patches (B, grid², 3, h, w) row by row: images (B, 3, size, size)."""
    B, count, C, h, w = patches.shape
    grid = round(count**0.5)

    # (B, row, column, 3, h, w) -> (B, 3, row, h, column, w)
    cells = patches.view(B, grid, grid, C, h, w)
    cells = cells.permute(0, 3, 1, 4, 2, 5)

    # back to the size before a reduction
    images = cells.reshape(B, C, grid * h, grid * w)
    return _resample(images, size)


def _resample(images: Tensor, size: int) -> Tensor:
    """Change images (B, 3, S, S) to another size, unless it is theirs."""
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
        # the same images with their shape destroyed
        with self.memory.generator("generator") as generator:
            shuffled = shuffle_patches(batch.images, self.config.patch_grid, generator)

        with torch.enable_grad():
            norms = self.memory["norms"].detach().requires_grad_()

            # the forward pass before the step is the prediction
            logits = self.logits(norms, batch.images)
            loss, teaching = self.loss(logits, norms.detach(), shuffled)

            # a batch in which no image teaches is predicted only
            if teaching.any():
                (gradient,) = torch.autograd.grad(loss, norms)
                self.step(gradient, len(batch))
        return Prediction(logits.detach().float(), {"teaching": teaching})

    def loss(
        self, logits: Tensor, norms: Tensor, shuffled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted mean entropy of images that teach, and which (B,) do."""
        config = self.config
        chance = math.log(len(self.prompts))  # entropy of a mere guess
        entropies = entropy(logits)

        # first condition: H(x) below τ_Ent
        teaching = entropies.detach() < config.entropy_threshold * chance
        rows = teaching.nonzero()[:, 0]
        if not len(rows):
            return entropies.mean(), teaching

        # second condition: PLPD(x) above τ_PLPD, of the images that fulfil the first
        with torch.no_grad():
            shuffled_logits = self.logits(norms, shuffled[rows])
            drop = probability_drop(logits[rows], shuffled_logits)
            teaching[rows] = drop > config.plpd_threshold
            margin = config.entropy_margin * chance
            weights = sample_weights(entropies[rows], drop, margin)

        # of those rows, the ones that fulfil both
        both = teaching[rows]
        return (entropies[rows] * weights)[both].mean(), teaching
