"""A made-up dataset and a method with memory, for tests of streams and runs."""

from dataclasses import dataclass

import numpy as np
import torch

from cliquetta.data.dataset import ArrayDataset
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction, ViewSpec
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.trees import random_pixels


def made_up_dataset(
    images: int = 50,
    side: int = 32,
    seed: int = 0,
    id: str = "made-up",
    labelled: bool = True,
) -> ArrayDataset:
    """Coarse random patterns; labels in blocks, as folders would list them."""
    coarse = random_pixels(images, 4, 4, 3, seed=seed)
    pictures = coarse.repeat(side // 4, axis=1).repeat(side // 4, axis=2)
    labels = (np.arange(images) * len(TINY_NAMES) // images).tolist()
    return ArrayDataset(
        id,
        pictures,
        names=TINY_NAMES,
        keys=[f"{i:04d}" for i in range(images)],
        labels=labels if labelled else None,
    )


@dataclass(frozen=True)
class DriftConfig:
    """Config of :class:`Drift`."""

    rate: float = 0.1  # share of a batch's mean logits in the running mean
    views: int = 0  # views wanted, 0 for none


class Drift(Adapter):
    """Zero-shot logits less their running mean, with noise: memory, order and chance matter."""

    batch_dependence = BatchDependence.JOINT

    def __init__(
        self, model: CLIP, prompts: ClassPrompts, config: DriftConfig, *, seed: int = 0
    ) -> None:
        super().__init__(model, prompts, config, seed=seed)
        self.classifier = model.classifier(prompts)
        self.memory.declare("mean", torch.zeros(len(prompts)))
        self.memory.declare_generator("noise", seed)

    @property
    def views(self) -> ViewSpec | None:
        count = self.config.views
        return ViewSpec("resized-crop", count) if count else None

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        features = self.model.encode_image(batch.images, normalize=True)
        logits = self.model.scale * features @ self.classifier.T
        with self.memory.generator("noise") as generator:
            logits = logits + 0.1 * torch.randn(logits.shape, generator=generator)
        mean = self.memory["mean"]
        self.memory["mean"] = mean + self.config.rate * (logits.mean(0) - mean)
        return Prediction(logits - self.memory["mean"], {"path": "drift", "mean": mean})
