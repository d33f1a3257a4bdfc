"""Is one method better than another on the same data, or is it luck? An exact paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cliquetta.errors import UserError
from cliquetta.evaluation.predictions import Predictions

EXACT = 20_000
"""Up to this sum of weights p is exact; above, normal, which is then right to a few percent."""
STEPS = 8_000
"""Differences that are no whole numbers are rounded to this share of their sum."""


@dataclass(frozen=True)
class PairedTest:
    """Differences between the predictions of two runs on the images that both saw."""

    images: int
    repaired: int
    """Wrong in the baseline, right in the other; counted once per seed."""
    broken: int
    """Right in the baseline, wrong in the other."""
    p: float
    """Chance of a difference at least as large if both were equally good."""


def paired_test(pairs: Sequence[tuple[Predictions, Predictions]]) -> PairedTest:
    """Compare ``(baseline, other)`` runs, one pair per seed, image by image.

    An image is the unit: its differences are summed over seeds, since runs of several seeds on one
    image are not independent. If both methods were equally good, each image's sum would as well
    have had the other sign; ``p`` is the share of all sign patterns whose total is as far from
    zero as the one seen. With one seed that is McNemar's exact test.
    """
    totals: dict[str, int] = {}
    repaired = broken = 0
    for baseline, other in pairs:
        before, now = _right_by_key(baseline), _right_by_key(other)
        if before.keys() != now.keys():
            raise UserError("a paired test needs runs over the same images, these differ")
        for key, right in now.items():
            change = right - before[key]
            totals[key] = totals.get(key, 0) + change
            repaired += max(0, change)
            broken += max(0, -change)
    values = np.array(list(totals.values()), dtype=np.int64)
    return PairedTest(len(totals), repaired, broken, sign_flip_p(values))


def _right_by_key(predictions: Predictions) -> dict[str, int]:
    """Count how often each labelled image was right: a stream may show one again."""
    found: dict[str, int] = {}
    rows = zip(predictions.keys, predictions.correct, predictions.labels >= 0, strict=True)
    for key, right, labelled in rows:
        if labelled:
            found[key] = found.get(key, 0) + int(right)
    return found


def sign_flip_p(differences: npt.ArrayLike) -> float:
    """Share of sign patterns of ``differences`` (n,) whose sum is at least as far from zero."""
    values = np.asarray(differences)
    if values.dtype.kind == "f":
        values = np.rint(values * (STEPS / max(float(np.abs(values).sum()), 1e-9)))
    whole = values.astype(np.int64)
    weights = np.abs(whole[whole != 0])
    seen, reach = abs(int(whole.sum())), int(weights.sum())
    if seen == 0:
        return 1.0
    if reach > EXACT:
        variance = float((weights.astype(float) ** 2).sum())
        return math.erfc((seen - 1) / math.sqrt(2 * variance))  # sums go in steps of 2: half of one
    distribution = np.ones(1)
    for weight, count in zip(*np.unique(weights, return_counts=True), strict=True):
        spread = np.zeros(2 * weight * count + 1)  # sums -weight*count ... weight*count
        spread[:: 2 * weight] = _fair_binomial(int(count))
        distribution = np.convolve(distribution, spread)
    sums = np.abs(np.arange(-reach, reach + 1))
    return min(1.0, float(distribution[sums >= seen].sum()))


def _fair_binomial(n: int) -> npt.NDArray[np.float64]:
    """Chances (n + 1,) of 0 ... n heads in n throws."""
    k = np.arange(n + 1)
    log_factorial = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    chances: npt.NDArray[np.float64] = np.exp(
        log_factorial[n] - log_factorial[k] - log_factorial[n - k] - n * math.log(2)
    )
    return chances
