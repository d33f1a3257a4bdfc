"""The contract of every method: a batch of pixels in, logits out, memory in between.

Labels are not part of it. A method sees what a deployed classifier sees.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from cliquetta.atomic import write_atomically
from cliquetta.data.images import ImageError
from cliquetta.data.inputs import ChannelOrder, Images, as_batch
from cliquetta.errors import UserError, look_up
from cliquetta.methods.building.config import MethodConfig
from cliquetta.methods.building.explanation import (
    CacheCount,
    Explanation,
    PromptedPasses,
)
from cliquetta.methods.building.memory import Memory, all_finite
from cliquetta.methods.building.merging import MergeRule, merge_memories
from cliquetta.methods.building.zero_shot_reference import (
    OPTIONAL,
    ZeroShotReference,
    without_optional,
)
from cliquetta.model.clip import CLIP, FrozenModel
from cliquetta.prompts.classes import ClassPrompts, as_prompts
from cliquetta.types import Batch, Prediction, Rejection, ViewSpec

A = TypeVar("A", bound="Adapter")


class BatchDependence(str, Enum):
    """Dependence of a prediction on the other images of its batch."""

    JOINT = "joint"
    """Images of a batch inform each other; their order does not matter."""
    SEQUENTIAL = "sequential"
    """One image after the other: splitting a batch changes nothing, order does."""
    INDEPENDENT = "independent"
    """Every image alone: neither splitting nor order changes a prediction."""


class NonFiniteError(UserError):
    """NaN or infinity in pixels, predictions or what was learned from them."""


CHECKED_LATE = frozenset({"cuda"})
"""Kinds of devices that work while the host goes on: pixels there are checked with the
predictions, which saves a wait per batch. Elsewhere bad pixels are refused before
anything is computed."""


def refuse_non_finite(images: Tensor, keys: Sequence[str] = ()) -> None:
    """Refuse pixels or features (B, ...) that are not finite, and name the image."""
    if all_finite([images]):
        return
    # Only now image by image, which takes longer.
    is_finite = images.isfinite().flatten(1).all(dim=1)
    bad = (~is_finite).nonzero()[:, 0].tolist()
    if bad:
        name = f" ({keys[bad[0]]})" if keys else ""
        raise NonFiniteError(
            f"{len(bad)} of {len(images)} images have pixels or features that are NaN or infinite, "
            f"the first is number {bad[0]}{name}: leave them out; nothing of this batch was "
            "predicted"
        )


def with_rows_of_errors(
    prediction: Prediction, unreadable: Mapping[int, str]
) -> Prediction:
    """Return a prediction with a row of NaN for every image that could not be read.

    Args:
        prediction: That of the other images, in order.
        unreadable: Reasons by the image's place among all.

    """
    if not unreadable:
        return prediction
    logits = prediction.logits
    images = len(logits) + len(unreadable)

    # Every prediction goes to its image's place among all.
    read = [row for row in range(images) if row not in unreadable]
    full = logits.new_full((images, logits.shape[1]), torch.nan)
    full[read] = logits
    rejection = prediction.rejection
    if rejection is not None:
        score = rejection.score.new_full((images,), torch.nan)
        score[read] = rejection.score
        rejected = rejection.rejected.new_zeros((images,))
        rejected[read] = rejection.rejected
        rejection = Rejection(score, rejected)
    return replace(
        prediction, logits=full, rejection=rejection, errors=dict(unreadable)
    )


class Adapter(ZeroShotReference, ABC):
    """A classifier that may learn from the unlabelled batches it predicts.

    A subclass sets ``batch_dependence``, prepares itself in :meth:`_setup`, keeps
    everything that it remembers between batches in ``self.memory`` and implements
    :meth:`_predict`. Reset, save and restore follow from that.
    """

    name: str
    """Name under which the method is registered, else that of the class."""

    batch_dependence: ClassVar[BatchDependence]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Capabilities of the model (``CLIP.capabilities``) that the method needs."""

    scaled_cosines: bool = False
    """Whether logits are the model's: scaled cosines of image and text, with bias."""

    fitted: Mapping[str, Tensor] | None = None
    """Tensors of a few-shot method; adapters with others share no state."""

    class_free: frozenset[str] = frozenset()
    """Names in ``memory``, of any config, that stay valid with other classes."""

    merge_rules: ClassVar[Sequence[tuple[str, MergeRule]]] = ()
    """How to merge what copies remember under a name (or a name, a dot, more)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__name__

    def __init__(
        self, model: CLIP, prompts: ClassPrompts, config: Any, *, seed: int = 0
    ) -> None:
        if len(prompts) < 2:
            raise UserError(
                f"one class, {prompts.names[0]!r}: at least two classes are needed, give "
                "another, such as 'something else', beside it"
            )
        model.require(self.needs, by=self.name)
        self.model = model
        self.prompts = prompts
        self.config = config
        self.seed = seed
        # Evidence that takes extra time, too; it never changes the logits.
        self.collect_evidence = False
        self.memory = Memory()
        self._bias = model.bias
        self._setup()

    def _setup(self) -> None:
        """Prepare what a subclass predicts with, from what it was built with."""

    @property
    def views(self) -> ViewSpec | None:
        """Views that batches must carry, or ``None`` for the image alone."""
        if not isinstance(self.config, MethodConfig):
            return None
        spec = self.config.spec
        return None if spec is None or spec.count == 1 else spec

    def predict(
        self,
        images: Images,
        *,
        errors: Literal["raise", "row"] = "raise",
        channel_order: ChannelOrder = "rgb",
    ) -> Prediction:
        """Predict a batch; the method may learn from it.

        Args:
            images: A :class:`Batch`, paths, PIL images, bytes of files, uint8 arrays
                (H, W, 3), or preprocessed pixels (B, 3, S, S); views are added where
                the method wants them.
            errors: ``raise`` an error about an image that cannot be read, or give it a
                ``row``: the others are predicted without it, its logits are NaN, and
                :attr:`Prediction.errors` says why.
            channel_order: Of arrays and uint8 tensors: ``bgr`` for images that OpenCV
                has read.

        Returns:
            Logits of every image, in order.

        Raises:
            NonFiniteError: Pixels, predictions or what was learned are not finite.
            UserError: Something is not an image, or cannot be read.

        """
        look_up("way to treat errors", errors, {"raise": None, "row": None})
        unreadable: dict[int, str] = {}

        def note(number: int, error: ImageError) -> None:
            unreadable[number] = error.reason

        batch = as_batch(
            images,
            self.model.preprocess,
            views=self.views,
            seed=self.seed,
            channel_order=channel_order,
            on_error=note if errors == "row" else None,
        )
        if len(batch) == 0:
            nothing = torch.zeros(0, len(self.prompts), device=self.model.device)
            prediction = Prediction(nothing, names=self.prompts.names)
        else:
            batch = batch.to(self.model.device)
            prediction = self._predict_safely(
                inputs=batch.images if batch.views is None else batch.views,
                keys=batch.keys,
                predict=lambda: self._predict(batch),
                encode=lambda: self.model.encode_image(batch.images, normalize=True),
            )
        return with_rows_of_errors(prediction, unreadable)

    def _predict_safely(
        self,
        inputs: Tensor,
        keys: Sequence[str],
        predict: Callable[[], Prediction],
        encode: Callable[[], Tensor],
    ) -> Prediction:
        """Predict on the model's scale; whatever is raised, the memory is as it was.

        Inputs that are not finite are named rather than what came of them. ``encode``
        gives the unit features (B, E) of plain CLIP where they are needed.
        """
        # On a GPU the inputs are checked with the predictions: one wait for both.
        late = [inputs] if inputs.device.type in CHECKED_LATE else []
        if not late:
            refuse_non_finite(inputs, keys)
        before = self.memory.snapshot()
        try:
            prediction = self._compare(predict(), encode)
            prediction = self._on_model_scale(prediction)
            learned = self.memory.changed(before)
            if not all_finite([*late, prediction.logits, *learned]):
                raise NonFiniteError(
                    f"{self.name} gave or learned numbers that are not finite: lower its "
                    "learning rate, or start without the state; nothing was learned from this batch"
                )
        except BaseException as error:
            self.memory.restore(before)
            if late and isinstance(error, Exception):
                refuse_non_finite(inputs, keys)
            raise
        return replace(prediction, names=self.prompts.names)

    def _on_model_scale(self, prediction: Prediction) -> Prediction:
        """Add the bias of a sigmoid model (SigLIP), which no softmax needs."""
        if not self._bias:
            return prediction
        return replace(prediction, logits=prediction.logits + self._bias)

    @abstractmethod
    def _predict(self, batch: Batch) -> Prediction:
        """Predict a checked, non-empty batch on the model's device."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(model={self.model.id!r}, classes={len(self.prompts)}, "
            f"config={self.config}, seed={self.seed})"
        )

    def with_classes(self: A, classes: ClassPrompts | Sequence[str]) -> A:
        """Build an adapter for other classes; what is free of classes stays learned.

        What is remembered per class starts again, also for classes that are in both
        lists.

        Raises:
            UserError: The method remembers nothing that outlives its class list, or the
                list cannot be used.

        """
        if not self.outlives_classes:
            raise UserError(
                f"{self.name} learns about its classes only, nothing of which another "
                "class list could keep: build a new one for it"
            )
        other = self._rebuild(as_prompts(classes))

        # As this one rejects and calibrates, and with what it learned about images.
        other.enable(reject=self.reject_share, calibrate=self.calibrated)
        shared = {
            name: self.memory[name] for name in self.class_free & set(self.memory)
        }
        other.load_state_dict({**other.state_dict(), **shared})
        return other

    def _rebuild(self: A, prompts: ClassPrompts) -> A:
        """Build an adapter that has seen nothing, as this one was, for a class list."""
        return type(self)(self.model, prompts, self.config, seed=self.seed)

    @property
    def outlives_classes(self) -> bool:
        """True if some of the memory is valid for other classes, or there is none."""
        learned = set(self.memory) - OPTIONAL.keys()
        return not learned or bool(self.class_free & learned)

    def reset(self) -> None:
        """Forget the stream: the next batch is treated like the first."""
        self.memory.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of everything remembered, by name."""
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict` of an equally built adapter.

        What only one of the two needs, to reject images or calibrate, starts again or
        is left out.
        """
        self.memory.load_state_dict(self._fit_optional(state))

    def save(
        self,
        path: Path | str,
        *,
        extra: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what was learned to a file, for :func:`cliquetta.load_method`.

        Args:
            path: The file, conventionally ``.safetensors``; replaced completely or not
                at all.
            extra: Tensors of your own to keep beside it.
            notes: JSON types of your own to keep in its header.

        """
        from cliquetta.methods.building.state import pack_state  # which builds adapters

        data = pack_state(self, extra=extra, notes=notes, fitted=True)
        write_atomically(Path(path), data)

    def merge(
        self,
        states: Sequence[Mapping[str, Tensor]],
        start: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Merge the states that equally built adapters reached on parts of a stream.

        Args:
            states: The state of each.
            start: The state that all of them began with, if that had learned something:
                what it holds is counted once.

        Returns:
            The state of one adapter.

        Raises:
            UserError: What the method learns on several streams cannot be joined.

        """
        learned = [without_optional(state) for state in states]
        shared = None if start is None else without_optional(start)
        merged = self._merge(learned, shared)
        return merged | self._merge_optional(states)

    def _merge(
        self, states: Sequence[Mapping[str, Tensor]], start: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """Merge several states, without what rejection and calibration need."""
        del start  # averages and caches come out right without
        return merge_memories(states, self.merge_rules, self.name)

    def frozen_model(self) -> FrozenModel:
        """Freeze what is learned so far: a function from pixels (B, 3, S, S) to logits.

        Raises:
            UserError: Predictions of the method depend on the other images of a batch
                or stream.

        """
        raise UserError(
            f"{self.name} has nothing to freeze or export: its predictions are no function "
            "of a single image; those of domain_norm are"
        )

    # --- what reports, the app and a cluster ask of a method --------------------------

    @torch.no_grad()
    def explain(
        self, batch: Batch, prediction: Prediction, *, maps: int = 0
    ) -> Explanation:
        """Explain a prediction: at least the features and classes of plain CLIP.

        Args:
            batch: The batch that was predicted, or its first images.
            prediction: What :meth:`predict` returned, with :attr:`collect_evidence` on.
            maps: Number of images whose attention is read, for methods with visual
                prompts.

        Returns:
            The explanation of every image of ``batch``.

        """
        del maps  # of no use without visual prompts
        features = prediction.evidence.get("plain")
        if features is None:
            images = batch.images.to(self.model.device)
            features = self.model.encode_image(images, normalize=True)
        features = features[: len(batch)]
        cosines = features @ self.zero_shot_classifier.T
        return Explanation(features, before=cosines.argmax(dim=-1))

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """Summarise a batch: its size, and the numbers among its evidence."""
        line: dict[str, int | float | str] = {"images": len(prediction.logits)}
        for name, value in prediction.evidence.items():
            is_number = isinstance(value, float)
            if isinstance(value, Tensor):
                is_number = value.ndim == 0
            if isinstance(value, int):
                line[name] = value
            elif is_number:
                line[name] = round(float(value), 4)
        return line

    def prompted_passes(
        self, prediction: Prediction, index: int
    ) -> PromptedPasses | None:
        """Return the passes with visual prompts over an image, if there are any."""
        del prediction, index
        return None

    def cache_counts(self) -> dict[str, CacheCount]:
        """Count the entries of the caches that :attr:`merge_rules` declare."""
        counts = {}
        for owner, rule in self.merge_rules:
            if rule != "cache":
                continue
            name = f"{owner}.entropy" if owner else "entropy"
            entropy = self.memory[name]  # (N, K), infinite where a slot is empty.
            capacity = entropy.shape[1]
            filled = entropy.isfinite().sum(dim=1)
            title = f"{owner} entries".strip()
            counts[title] = CacheCount(tuple(filled.tolist()), capacity)
        return counts
