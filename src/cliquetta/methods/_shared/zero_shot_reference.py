"""Rejection and calibration: comparing predictions with those of plain CLIP.

Which images are of none of the classes (:mod:`~cliquetta.methods._shared.rejection`), and how sure
an answer is (:mod:`~cliquetta.methods._shared.calibration`). Both learn from the stream, so that
what they need is a part of the method's state while they are on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods._shared.calibration import (
    CONFIDENCES,
    count_confidences,
    find_temperature,
    no_confidences,
)
from cliquetta.methods._shared.rejection import LEFT_OUT, SHARE, empty_window, merge_windows, reject
from cliquetta.methods.building.memory import Memory
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Prediction

OPTIONAL = {LEFT_OUT: empty_window, CONFIDENCES: no_confidences}
"""What the memory holds where it was asked for, and how that starts."""


class ZeroShotReference:
    """The part of an adapter that compares its predictions with plain CLIP's."""

    model: CLIP
    prompts: ClassPrompts
    memory: Memory
    frozen: bool = False
    """Whether nothing is learned from the stream any more."""
    reject_share: float | None = None
    """See :meth:`enable_rejection`."""
    calibrated: bool = False
    """See :meth:`enable_calibration`."""
    lends_zero_shot: ClassVar[bool] = False
    """Whether evidence holds plain CLIP's probabilities, ``zero_shot`` (B, N), wherever the method
    computes them: it is calibrated at no cost, and so by default."""

    @cached_property
    def zero_shot_classifier(self) -> Tensor:
        """Unit class features (N, E) of plain CLIP."""
        return self.model.classifier(self.prompts)

    def enable(self, *, reject: float | None, calibrate: bool | None) -> None:
        """Turn on rejection, and calibration; by default where a method lends zero-shot."""
        if reject is not None:
            self.enable_rejection(reject)
        if self.lends_zero_shot if calibrate is None else calibrate:
            self.enable_calibration()

    def enable_rejection(self, share: float = SHARE) -> None:
        """Mark with every prediction from now on which images are of none of the classes.

        The limit comes from the images of the stream and is a part of the state. A plain forward
        pass per image is added.

        Args:
            share: Share of the images of no class to reject, above 0 and below 1; the higher it is,
                the more images of the classes are rejected as well.

        Raises:
            UserError: Another share, or fewer than three classes.

        """
        if not 0 < share < 1:
            raise UserError(
                f"the share of images of no class to reject is above 0 and below 1, got {share}: "
                f"{SHARE} is a good start"
            )
        if len(self.prompts) < 3:
            raise UserError(
                "rejection compares classes with one of them left out: give at least three, got "
                f"{len(self.prompts)}"
            )
        self._remember_optional(LEFT_OUT)
        self.reject_share = share

    def enable_calibration(self) -> None:
        """Divide logits by a temperature from now on, so that probabilities can be trusted more.

        Predictions become on average as sure as zero-shot CLIP finds them probable; the best class
        of an image stays the best. A plain forward pass per image is added, except to methods that
        lend zero-shot.
        """
        self._remember_optional(CONFIDENCES)
        self.calibrated = True

    def _remember_optional(self, name: str) -> None:
        if name not in self.memory:
            self.memory.declare(name, OPTIONAL[name]().to(self.model.device))

    @torch.no_grad()
    def _compare(self, prediction: Prediction, encode: Callable[[], Tensor]) -> Prediction:
        """The prediction with rejections and another temperature, by what plain CLIP encodes."""
        if self.reject_share is None and not self.calibrated:
            return prediction
        logits, plain = prediction.logits, prediction.evidence.get("zero_shot")
        memory, learns = self.memory, not self.frozen
        if self.reject_share is not None or not self.lends_zero_shot:
            zero_shot = self.model.scale * encode() @ self.zero_shot_classifier.T
            plain = zero_shot.softmax(dim=1)
            if self.reject_share is not None:
                window, share = memory[LEFT_OUT], self.reject_share
                rejection, window = reject(logits, zero_shot, window, share, learn=learns)
                memory[LEFT_OUT] = window
                prediction = replace(prediction, rejection=rejection)
        if self.calibrated:
            if plain is not None and learns:
                sums = count_confidences(memory[CONFIDENCES], logits, plain)
                memory[CONFIDENCES] = sums
            logits = logits / find_temperature(memory[CONFIDENCES]).to(logits)
            prediction = replace(prediction, logits=logits)
        return prediction

    def _without_optional(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state without what rejection and calibration need."""
        return {name: value for name, value in state.items() if name not in OPTIONAL}

    def _fit_optional(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with what this adapter needs beside its own: from its start where missing."""
        mine = {name: start() for name, start in OPTIONAL.items() if name in self.memory}
        given = {name: value for name, value in state.items() if name in mine}
        return self._without_optional(state) | mine | given

    def _merge_optional(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Merge what rejection and calibration learned on several parts of a stream."""
        merged = {}
        if LEFT_OUT in self.memory:
            merged[LEFT_OUT] = merge_windows([state[LEFT_OUT] for state in states])
        if CONFIDENCES in self.memory:
            merged[CONFIDENCES] = torch.stack([state[CONFIDENCES] for state in states]).sum(dim=0)
        return merged
