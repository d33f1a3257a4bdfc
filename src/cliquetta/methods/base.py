"""The contract of every method: a batch of pixels in, logits out, memory in between.

Labels are not part of it. A method sees what a deployed classifier sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from cliquetta.data.batch import Images, as_batch
from cliquetta.errors import UserError
from cliquetta.methods._shared.memory import Memory
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts, as_prompts
from cliquetta.types import Batch, Prediction, ViewSpec

A = TypeVar("A", bound="Adapter")


class BatchDependence(str, Enum):
    """How a method treats the images of one batch; the contract tests hold it to its word."""

    JOINT = "joint"
    """Images of a batch inform each other; their order inside the batch does not matter."""
    SEQUENTIAL = "sequential"
    """One image after the other: splitting a batch changes nothing, order does."""
    INDEPENDENT = "independent"
    """Every image alone: neither splitting nor order changes a prediction."""


class Adapter(ABC):
    """A classifier that may learn from the unlabelled batches it predicts.

    A subclass sets ``batch_dependence``, keeps everything that it remembers between batches in
    ``self.memory`` and implements :meth:`_predict`. Reset, save and restore follow from that.
    """

    batch_dependence: ClassVar[BatchDependence]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Capabilities of the model (``CLIP.capabilities``) without which the method cannot run."""

    class_free: ClassVar[frozenset[str]] = frozenset()
    """Names in ``memory`` that stay valid when the class list changes."""

    def __init__(self, model: CLIP, prompts: ClassPrompts, config: Any, *, seed: int = 0) -> None:
        model.require(self.needs, by=type(self).__name__)
        self.model = model
        self.prompts = prompts
        self.config = config
        self.seed = seed
        self.explain = False
        """Gather evidence that costs extra time, too; never changes the logits."""
        self.memory = Memory()
        self._bias = model.bias

    @property
    def views(self) -> ViewSpec | None:
        """The views that batches must carry, or ``None``."""
        return None

    def predict(self, images: Images) -> Prediction:
        """Predict a batch; the method may learn from it.

        Args:
            images: A :class:`Batch`, paths, PIL images, uint8 arrays (H, W, 3), or preprocessed
                pixels (B, 3, S, S); views are added where the method wants them.

        Returns:
            Logits of every image, in order.

        Raises:
            UserError: Something is not an image, or cannot be read.

        """
        batch = as_batch(images, self.model.preprocess, views=self.views, seed=self.seed)
        if len(batch) == 0:
            return Prediction(torch.zeros(0, len(self.prompts), device=self.model.device))
        return self._on_model_scale(self._predict(batch.to(self.model.device)))

    def _on_model_scale(self, prediction: Prediction) -> Prediction:
        """The same with the bias of a sigmoid model (SigLIP): its logits, where CLIP's have none.

        A constant changes no softmax, so that what methods compute inside goes without it.
        """
        if not self._bias:
            return prediction
        return replace(prediction, logits=prediction.logits + self._bias)

    @abstractmethod
    def _predict(self, batch: Batch) -> Prediction:
        """Predict a checked, non-empty batch that lies on the model's device."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(model={self.model.id!r}, classes={len(self.prompts)}, "
            f"config={self.config}, seed={self.seed})"
        )

    def with_classes(self: A, prompts: ClassPrompts | Sequence[str]) -> A:
        """An adapter for another class list that keeps what was learned apart from the classes.

        Raises:
            UserError: The method learns nothing that outlives its class list.

        """
        if not self.class_free:
            raise UserError(
                f"{type(self).__name__} learns about its classes only: build a new one for "
                "another class list"
            )
        other = type(self)(self.model, as_prompts(prompts), self.config, seed=self.seed)
        kept = {name: self.memory[name] for name in self.class_free}
        other.load_state_dict({**other.state_dict(), **kept})
        return other

    def reset(self) -> None:
        """Forget the stream: the next batch is treated like the first."""
        self.memory.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything remembered, as named tensors (copies)."""
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict` of an equally built adapter."""
        self.memory.load_state_dict(state)
