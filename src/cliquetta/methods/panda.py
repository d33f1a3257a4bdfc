"""Panda: take from every feature what images without objects have in common; around any method.

Deng et al., Panda: Test-Time Adaptation with Negative Data Augmentation, AAAI 2026.
Corruptions add a shared component to all features and so bias predictions. B/10 images,
rounded up, are put together from the batch: every patch is that of a random image at
the same position, so that they keep the corruption but no object. With n̄ the mean of
their unit features

    d_i = v_i - β n̄

replaces every unit image feature v_i in the method that Panda is put around, its
learning included; d is not normalised again. ``method`` names that method, ``options``
changes its settings.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.config import Count, MethodConfig, NonNegative
from cliquetta.methods.building.layernorm import LayerNormAdapter
from cliquetta.methods.building.registry import create_method, method_config, register
from cliquetta.methods.deyo import join_patches, split_patches
from cliquetta.model.clip import CLIP, MissingCapabilityError, l2_normalize
from cliquetta.model.vision import VisionTower
from cliquetta.types import Batch, Prediction, ViewSpec


@dataclass(frozen=True)
class PandaConfig(MethodConfig):
    """Negative data augmentation around another method."""

    method: str = "tent"  # Name of the method that gets the corrected features.
    options: tuple[str, ...] = ()  # Settings of that method, each as key=value.
    offset: NonNegative = 0.2
    """β: how much of the negatives' mean feature is subtracted; 0 is the method alone."""
    images_per_negative: Count = 10  # Images of a batch per negative that is made.
    patch_grid: Count = 7
    """Patches per side; the nearest number that divides the image is used."""
    predict_after: bool = True
    """Predict once more after the step, with new negatives; of methods that keep LayerNorms."""


def nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of ``size`` nearest to ``wanted``, the larger of two."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    return min(divisors, key=lambda n: (abs(n - wanted), -n))


def make_negatives(
    images: Tensor, count: int, grid: int, generator: torch.Generator
) -> Tensor:
    """Put ``count`` images together from patches of a batch, each at its own position.

    Every negative leaves one image out, so that none is an image again; a single image
    has no negatives.
    """
    others = len(images) - 1
    if not others:
        return images[:0]

    # ordered by brightness: the order inside of a batch does not matter
    brightness = images.double().mean(dim=(1, 2, 3))
    images = images[brightness.argsort(stable=True)]

    # for every patch one of the images that are not left out
    cells = grid * grid
    left_out = torch.randint(others + 1, (count, 1), generator=generator)
    source = torch.randint(others, (count, cells), generator=generator)
    source = (source + (source >= left_out)).to(images.device)

    # each patch stays where it was
    patches = split_patches(images, grid)
    positions = torch.arange(cells, device=images.device)
    return join_patches(patches[source, positions], images.shape[-1])


class Negatives:
    """The negatives of the batch being predicted; copies of a tower share them."""

    images: Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Negatives:
        return self


class OffsetTower(VisionTower):
    """An image tower whose unit features have the mean of those of negatives subtracted."""

    offset: float
    negatives: Negatives

    def forward(self, pixels: Tensor, **prompts: Any) -> Tensor:
        """Encode pixels (B, 3, S, S): features d_i = v_i - β n̄ (B, E)."""
        images = len(pixels)
        negatives = self.negatives.images.to(pixels)

        # one pass for both
        encoded = super().forward(torch.cat([pixels, negatives]), **prompts)
        features = l2_normalize(encoded)

        # n̄, zero where there are no negatives
        mean = features[images:].sum(dim=0) / max(1, len(negatives))

        # v_i - β n̄, which is not normalised again
        return features[:images] - self.offset * mean


class OffsetCLIP(CLIP):
    """A CLIP with such a tower: plain encoding, no prompts inside the image tower."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Return those of a CLIP that concern text and LayerNorms."""
        inside = {"visual-blocks", "visual-prefix", "visual-tokens", "attention"}
        return super().capabilities - inside

    def unit_image(self, features: Tensor) -> Tensor:
        """Return the features as they are: d is not normalised again."""
        return features


def with_offset(model: CLIP, offset: float) -> tuple[CLIP, Negatives]:
    """Return a model that shares the weights of ``model``, and its negatives."""
    tower = copy.copy(model.require_vit())
    tower.__class__ = OffsetTower
    assert isinstance(tower, OffsetTower)
    tower.offset = offset
    tower.negatives = Negatives()

    corrected = copy.copy(model)
    corrected.__class__ = OffsetCLIP
    corrected._modules = {**model._modules, "visual": tower}
    return corrected, tower.negatives


@register(
    "panda",
    tuned={"zero_shot": PandaConfig(method="zero_shot", offset=0.6)},
    setting="CLIP, Tent",
    for_batches=True,
)
class Panda(Adapter):
    """Any method on features less the mean of images made of the batch's shuffled patches."""

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"norm"})
    config: PandaConfig

    def _setup(self) -> None:
        name = self.config.method
        if name == "panda":
            raise UserError("panda cannot be put around itself; name another method")
        options = dict(option.partition("=")[::2] for option in self.config.options)
        corrected, self.negatives = with_offset(self.model, self.config.offset)
        try:
            config = method_config(name, options=options)
            self.inner = create_method(
                name, corrected, self.prompts, config, seed=self.seed
            )
        except MissingCapabilityError as error:
            raise UserError(
                f"panda cannot be put around {name!r}, which runs the image tower "
                "block by block; choose one that takes its features as they come, "
                "such as tent"
            ) from error
        self.grid = nearest_divisor(self.model.image_size, self.config.patch_grid)

        # the memory is that of the method inside, and the generator of negatives
        self.memory = self.inner.memory
        if self.inner.outlives_classes:
            self.class_free = self.inner.class_free | {"panda.generator"}
        self.memory.declare_generator("panda.generator", self.seed)

    @property
    def views(self) -> ViewSpec | None:
        """Return the views of the method inside."""
        return self.inner.views

    def _predict(self, batch: Batch) -> Prediction:
        self._draw(batch.images)
        prediction = self.inner._predict(batch)
        if not self.config.predict_after:
            return prediction

        # methods that keep LayerNorms predict once more, with new negatives
        if not isinstance(self.inner, LayerNormAdapter) or self.inner.learned is None:
            return prediction
        self._draw(batch.images)
        with torch.no_grad():
            logits = self.inner.logits(self.inner.learned, batch.images)
        return replace(prediction, logits=logits.float())

    def _draw(self, images: Tensor) -> None:
        """Make the negatives of a batch, B/10 rounded up by default."""
        count = math.ceil(len(images) / self.config.images_per_negative)
        with self.memory.generator("panda.generator") as generator:
            negatives = make_negatives(images, count, self.grid, generator)
        self.negatives.images = negatives
