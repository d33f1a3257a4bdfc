"""An exact paired test and 95 % intervals: whether one method is better on the same images."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

# up to this sum of weights p is exact; above, normal: right to a few percent
EXACT = 20_000
# differences that are no whole numbers are rounded to this share of their sum
STEPS = 8_000


@dataclass(frozen=True)
class PairedTest:
    """Differences between the predictions of two runs on the images that both saw."""

    images: int
    repaired: int  # wrong in the baseline, right in the other; counted once per seed
    broken: int  # right in the baseline, wrong in the other
    p: float  # chance of a difference at least as large if both were equally good
    half_width: float = 0.0  # of the 95 % interval of the gain, in points

    @property
    def gain(self) -> float:
        """Difference of the two accuracies of runs with one seed, in points."""
        return 100 * (self.repaired - self.broken) / max(1, self.images)

    @classmethod
    def of_counts(cls, *, images: int, repaired: int, broken: int) -> "PairedTest":
        """Return McNemar's exact test of one run against another on the same images.

        >>> test = PairedTest.of_counts(images=100, repaired=8, broken=1)
        >>> round(test.p, 4)
        0.0391
        """
        differences = np.repeat([1, -1], [repaired, broken])
        return cls(
            images=images,
            repaired=repaired,
            broken=broken,
            p=sign_flip_p(differences),
            half_width=share_half_width(repaired, broken, images) if images else 0.0,
        )


def sign_flip_p(differences: npt.ArrayLike) -> float:
    """Share of sign patterns of ``differences`` (n,) whose sum is at least as far from zero."""
    values = np.asarray(differences)
    if values.dtype.kind == "f":
        values = np.rint(values * (STEPS / max(float(np.abs(values).sum()), 1e-9)))
    values = values.astype(np.int64)
    weights = np.abs(values[values != 0])
    seen = abs(int(values.sum()))
    reach = int(weights.sum())
    if seen == 0:
        return 1.0
    if reach > EXACT:
        variance = float((weights.astype(float) ** 2).sum())
        return math.erfc(
            (seen - 1) / math.sqrt(2 * variance)
        )  # sums go in steps of 2: half of one
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


# --- half-widths of 95 % intervals of a mean ------------------------------------------------------

NORMAL = NormalDist().inv_cdf(0.975)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with some degrees of freedom, five or more.

    The Cornish-Fisher series in one over ``freedom``, right to 0.003 there (Abramowitz
    and Stegun, 26.7.5).
    """
    z = NORMAL
    inverse = 1 / freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384

    # Horner's scheme in one over the degrees of freedom
    quantile = third * inverse + second
    quantile = quantile * inverse + first
    return quantile * inverse + z


def mean_half_width(values: Sequence[float]) -> float:
    """Return the half-width for the mean of a few independent values, six or more."""
    count = len(values)
    deviation = statistics.stdev(values)
    standard_error = deviation / math.sqrt(count)
    return student_quantile(count - 1) * standard_error


def share_half_width(repaired: int, broken: int, images: int) -> float:
    """Return the half-width, in points, of a paired difference of two accuracies.

    Args:
        repaired: Images that only the second method has right.
        broken: Images that only the first has right.
        images: All images.

    """
    mean = (repaired - broken) / images
    mean_square = (repaired + broken) / images
    return difference_half_width(mean, mean_square, images)


def difference_half_width(mean: float, mean_square: float, images: int) -> float:
    """Return the half-width, in points, of a mean of differences per image."""
    variance = max(0.0, mean_square - mean**2)
    standard_error = math.sqrt(variance / images)
    return 100 * NORMAL * standard_error
