"""Half-widths of 95 % confidence intervals of a mean."""

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

NORMAL = NormalDist().inv_cdf(0.975)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with some degrees of freedom, five or more.

    The Cornish-Fisher series in one over ``freedom``, right to 0.003 there (Abramowitz and Stegun,
    26.7.5).
    """
    z = NORMAL
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))


def mean_half_width(values: Sequence[float]) -> float:
    """Return the half-width for the mean of a few independent values, six or more."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return student_quantile(len(values) - 1) * error


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
    return 100 * NORMAL * math.sqrt(variance / images)
