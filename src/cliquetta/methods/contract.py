"""The contract of every method: a batch of pixels in, logits out, memory in between.

Labels are not part of it. A method sees what a deployed classifier sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from cliquetta.methods.memory import Memory
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts


@dataclass(frozen=True)
class Batch:
    """Preprocessed images and their names; ``views`` only when the method asked for them.

    ``images`` is (B, 3, H, W). ``views`` is (B, V, 3, H, W) with view 0 equal to ``images``;
    it is made per image from ``(seed, key)``, so that all methods of a comparison see the same.
    """

    images: Tensor
    keys: tuple[str, ...] = ()
    views: Tensor | None = None

    def __len__(self) -> int:
        """Number of images."""
        return self.images.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        views = None if self.views is None else self.views.to(device, non_blocking=True)
        return Batch(self.images.to(device, non_blocking=True), self.keys, views)

    def __getitem__(self, rows: slice) -> Batch:
        """A part of the batch, in order."""
        views = None if self.views is None else self.views[rows]
        return Batch(self.images[rows], self.keys[rows], views)


@dataclass(frozen=True)
class Prediction:
    """What a method answers: ``logits`` (B, N) on CLIP's scale, float32, always those scored.

    ``evidence`` explains the answer to a report (cliques, prompts used, losses); nothing may be
    computed from it that is scored.
    """

    logits: Tensor
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def probabilities(self) -> Tensor:
        """Softmax of the logits, (B, N)."""
        return self.logits.softmax(dim=-1)


class Treatment(str, Enum):
    """How a method treats the images of one batch; the contract tests hold it to its word."""

    JOINT = "joint"
    """Images of a batch inform each other; their order inside the batch does not matter."""
    SEQUENTIAL = "sequential"
    """One image after the other: splitting a batch changes nothing, order does."""
    INDEPENDENT = "independent"
    """Every image alone: neither splitting nor order changes a prediction."""


@dataclass(frozen=True)
class ViewSpec:
    """Which augmented views a method wants: ``count`` views of ``kind``, the first plain.

    ``kind`` is a key of :data:`cliquetta.data.views.VIEW_KINDS` (``resized-crop``,
    ``zoom-crop``, ``augmix``); ``zoom`` is the shorter side, as a multiple of the model's input
    size, to which ``zoom-crop`` enlarges before it crops.
    """

    kind: str
    count: int = 64
    zoom: float = 1.15


class Adapter(ABC):
    """A classifier that may learn from the unlabelled batches it predicts.

    A subclass sets ``treatment``, keeps everything that it remembers between batches in
    ``self.memory`` and implements :meth:`_predict`. Reset, save and restore follow from that.
    """

    treatment: ClassVar[Treatment]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Capabilities of the model (``CLIP.capabilities``) without which the method cannot run."""

    def __init__(self, model: CLIP, prompts: ClassPrompts, config: Any, *, seed: int = 0) -> None:
        model.require(self.needs, by=type(self).__name__)
        self.model = model
        self.prompts = prompts
        self.config = config
        self.seed = seed
        self.explain = False
        """Gather evidence that costs extra time, too; never changes the logits."""
        self.memory = Memory()

    @property
    def views(self) -> ViewSpec | None:
        """The views that batches must carry, or ``None``."""
        return None

    def predict(self, batch: Batch) -> Prediction:
        """Logits of every image of ``batch``; the method may learn from it."""
        size = self.model.image_size
        if batch.images.ndim != 4 or tuple(batch.images.shape[1:]) != (3, size, size):
            raise ValueError(
                f"images must be (B, 3, {size}, {size}) for {self.model.id}, got "
                f"{tuple(batch.images.shape)}; preprocess them with model.preprocess"
            )
        if len(batch) == 0:
            empty = torch.zeros(0, len(self.prompts), device=self.model.device)
            return Prediction(empty)
        if self.views is not None and batch.views is None:
            raise ValueError(
                f"{type(self).__name__} needs {self.views.count} views per image; attach them "
                "with cliquetta.data.views.attach_views(batch, adapter.views, seed=...)"
            )
        return self._predict(batch.to(self.model.device))

    @abstractmethod
    def _predict(self, batch: Batch) -> Prediction:
        """Predict a checked, non-empty batch that lies on the model's device."""

    def reset(self) -> None:
        """Forget the stream: the next batch is treated like the first."""
        self.memory.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything remembered, as named tensors (copies)."""
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict` of an equally built adapter."""
        self.memory.load_state_dict(state)
