"""Rejection and calibration: comparing predictions with those of plain CLIP.

Both learn from the stream, so that what they need is a part of a method's state while
they are on.

Rejection asks both the method and zero-shot CLIP how unsure they are: adaptation draws
images of no class to the classes, zero-shot CLIP does not follow the domain. Its limit
needs no labels: an image whose class is left out of the list has a score that an image
of no class has.

Calibration divides by a temperature at which predictions are, on average, as sure as
zero-shot CLIP finds the same classes probable: learning from its own predictions makes
a method surer of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.memory import Memory
from cliquetta.model.clip import CLIP
from cliquetta.model.cuda import Replayed
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Prediction, Rejection

SOFTENING = 10.0
"""Divides logits: then second and third classes count, too, not only how far the first is ahead."""
SHARE = 0.9  # Share of the left-out scores that exceed the limit.
WINDOW = 1024  # Images that the limit comes from, the latest ones.
LEFT_OUT = "left_out_scores"  # The window in a method's memory.


def rejection_score(logits: Tensor) -> Tensor:
    """Return the softened entropy (B,) of logits (B, N), 1 for a mere guess."""
    return entropy(logits.float() / SOFTENING) / math.log(logits.shape[1])


def left_out_score(logits: Tensor) -> Tensor:
    """Score images (B,) with the prediction of each left out of the class list."""
    return rejection_score(logits.sort(dim=1, descending=True).values[:, 1:])


def empty_window() -> Tensor:
    """Return left-out scores (WINDOW,) before the first image: all infinite."""
    return torch.full((WINDOW,), torch.inf)


def reject(
    logits: Tensor,
    zero_shot: Tensor,
    window: Tensor,
    share: float,
    *,
    learn: bool = True,
) -> tuple[Rejection, Tensor]:
    """Reject images of none of the classes, by logits and plain CLIP's (B, N).

    Returns:
        The rejection, and the window, which holds the images if they ``learn``.

    """
    # the method and plain CLIP have the same say
    score = (rejection_score(logits) + rejection_score(zero_shot)) / 2

    # the newest left-out scores, of these images if they teach
    if learn:
        left_out = (left_out_score(logits) + left_out_score(zero_shot)) / 2
        window = torch.cat([window, left_out])[-WINDOW:]

    # surer images are of one of the classes
    rejected = score > rejection_limit(window, share)
    return Rejection(score, rejected), window


def rejection_limit(window: Tensor, share: float) -> Tensor:
    """Return the score () that ``share`` of a window's scores exceed."""
    return window[window.isfinite()].quantile(1 - share)


def merge_windows(windows: Sequence[Tensor]) -> Tensor:
    """Merge several windows: all scores, or evenly spaced ones of them in order."""
    # infinite where a window is empty
    scores = [window[window.isfinite()] for window in windows]
    ascending = torch.cat(scores).sort().values

    # as many as fit, evenly spaced
    count = min(WINDOW, len(ascending))
    ranks = torch.linspace(0, len(ascending) - 1, count).long()

    # at the end of a window, as if they had come one by one
    return torch.cat([empty_window().to(ascending), ascending[ranks]])[-WINDOW:]


TEMPERATURES = tuple(
    float(t) for t in torch.logspace(math.log10(0.2), math.log10(5), 33)
)
"""At which confidences are counted; the temperature is between the first and the last."""
# Images after which one counts half: predictions change as fast as methods learn.
HALF_LIFE = 16
CONFIDENCES = "confidences"  # The sums in a method's memory.


def no_confidences() -> Tensor:
    """Return the sums of :func:`count_confidences` before the first image."""
    return torch.zeros(1 + len(TEMPERATURES))


def count_confidences(sums: Tensor, logits: Tensor, zero_shot: Tensor) -> Tensor:
    """Add the probabilities of a batch's classes to fading sums.

    Args:
        sums: (1 + len(TEMPERATURES),), of plain CLIP's, then of the method's at each
            temperature.
        logits: Of the method (B, N).
        zero_shot: Probabilities of plain CLIP (B, N).

    """
    # how probable plain CLIP finds the classes that the method predicts
    logits = logits.float()
    labels = logits.argmax(dim=1, keepdim=True)
    backing = zero_shot.gather(1, labels).sum()

    # how sure the method is at every temperature
    sure = [(logits / t).softmax(dim=1).amax(dim=1).sum() for t in TEMPERATURES]

    # older images fade
    fading = math.pow(0.5, len(logits) / HALF_LIFE)
    return sums * fading + torch.stack([backing, *sure]).to(sums)


def find_temperature(sums: Tensor) -> Tensor:
    """Find the temperature () at which predictions are as sure as CLIP backs them.

    It is 1 as long as nothing was counted.
    """
    backing = sums[0]
    confidences = sums[1:]  # falling with the temperature

    # the first of them at or below the backing, and the one before it; by ``take``, as
    # an index would wait for the device
    high = (confidences > backing).sum().clamp(1, len(confidences) - 1)
    low = high - 1
    before = confidences.take(low)
    after = confidences.take(high)

    # between the two, linear in the logarithm of the temperature
    fall = (before - after).clamp_min(torch.finfo(sums.dtype).tiny)
    weight = ((before - backing) / fall).clamp(0, 1)
    scale = _log_temperatures(sums.device).to(sums)
    temperature = scale.take(low).lerp(scale.take(high), weight).exp()

    # a condition would wait for the device
    return torch.where(sums.sum() > 0, temperature, torch.ones_like(temperature))


@cache
def _log_temperatures(device: torch.device) -> Tensor:
    """Return the logarithms of :data:`TEMPERATURES`, copied to the device once."""
    return torch.tensor(TEMPERATURES).log().to(device)


def calibrate(logits: Tensor, sums: Tensor) -> Tensor:
    """Divide logits (B, N) by the temperature."""
    return logits / find_temperature(sums).to(logits)


OPTIONAL = {LEFT_OUT: empty_window, CONFIDENCES: no_confidences}
"""Tensors that the memory holds on request, by name, and how they start."""


def without_optional(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop from a state what rejection and calibration need."""
    return {name: value for name, value in state.items() if name not in OPTIONAL}


class ZeroShotReference:
    """The part of an adapter that compares its predictions with plain CLIP's."""

    model: CLIP
    prompts: ClassPrompts
    memory: Memory
    frozen: bool = False  # Whether nothing is learned from the stream any more.
    reject_share: float | None = None  # See :meth:`enable_rejection`.
    calibrated: bool = False  # See :meth:`enable_calibration`.

    @cached_property
    def _replayed(self) -> Replayed:
        """Call the many small operations of calibration as one."""
        return Replayed()

    @cached_property
    def zero_shot_classifier(self) -> Tensor:
        """Return the unit class features (N, E) of plain CLIP."""
        return self.model.classifier(self.prompts)

    def enable(self, *, reject: float | None, calibrate: bool) -> None:
        """Turn on rejection and calibration as far as they are asked for."""
        if reject is not None:
            self.enable_rejection(reject)
        if calibrate:
            self.enable_calibration()

    def enable_rejection(self, share: float = SHARE) -> None:
        """Mark from now on which images are of none of the classes.

        The limit comes from the stream and is part of the state; every image costs a
        plain pass.

        Args:
            share: Share of the images of no class to reject, above 0 and below 1; the
                higher it is, the more images of the classes are rejected as well.

        Raises:
            UserError: Another share, or fewer than three classes.

        """
        if not 0 < share < 1:
            raise UserError(
                "the share of images of no class to reject is above 0 and below 1, got "
                f"{share}: {SHARE} is a good start"
            )
        if len(self.prompts) < 3:
            raise UserError(
                "rejection compares classes with one of them left out: give at least "
                f"three, got {len(self.prompts)}"
            )
        self._remember_optional(LEFT_OUT)
        self.reject_share = share

    def enable_calibration(self) -> None:
        """Divide logits from now on by a temperature, for more truthful probabilities.

        Predictions become on average as sure as zero-shot CLIP finds them probable; the
        best class stays the best. Every image costs a plain pass.
        """
        self._remember_optional(CONFIDENCES)
        self.calibrated = True

    def _remember_optional(self, name: str) -> None:
        if name not in self.memory:
            self.memory.declare(name, OPTIONAL[name]().to(self.model.device))

    @torch.no_grad()
    def _compare(
        self, prediction: Prediction, encode: Callable[[], Tensor]
    ) -> Prediction:
        """Compare a prediction with plain CLIP's, as far as that was asked for.

        Args:
            prediction: Of the method.
            encode: Gives the unit features (B, E) of plain CLIP.

        Returns:
            The prediction with rejections and another temperature.

        """
        if self.reject_share is None and not self.calibrated:
            return prediction
        logits = prediction.logits
        memory = self.memory
        learns = not self.frozen
        zero_shot = self.model.scale * encode() @ self.zero_shot_classifier.T

        if self.reject_share is not None:
            window = memory[LEFT_OUT]
            rejection, memory[LEFT_OUT] = reject(
                logits, zero_shot, window, self.reject_share, learn=learns
            )
            prediction = replace(prediction, rejection=rejection)

        if self.calibrated:
            sums = memory[CONFIDENCES]
            if learns:
                plain = zero_shot.softmax(dim=1)
                sums = self._replayed(count_confidences, sums, logits, plain)
                memory[CONFIDENCES] = sums
            logits = self._replayed(calibrate, logits, sums)
            prediction = replace(prediction, logits=logits)
        return prediction

    def _fit_optional(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state with the optional tensors of this adapter, and no others.

        Those that the state lacks start again.
        """
        fitting = {
            name: start() for name, start in OPTIONAL.items() if name in self.memory
        }
        for name, value in state.items():
            if name in fitting or name not in OPTIONAL:
                fitting[name] = value
        return fitting

    def _merge_optional(
        self, states: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Merge what rejection and calibration learned on several parts of a stream."""
        merged = {}

        # scores of all parts, and sums over all of them
        if LEFT_OUT in self.memory:
            merged[LEFT_OUT] = merge_windows([state[LEFT_OUT] for state in states])
        if CONFIDENCES in self.memory:
            sums = [state[CONFIDENCES] for state in states]
            merged[CONFIDENCES] = torch.stack(sums).sum(dim=0)
        return merged
