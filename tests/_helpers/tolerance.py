"""How far two computations of the same number may lie apart: the tolerances of all tests.

Rounding. A sum of ``n`` rounded terms in a format with unit round-off ``u`` is off by
at most ``lambda * sqrt(n) * u`` times the sum of its terms' sizes, except with a chance
of ``2 n exp(-lambda**2 / 2)`` (Higham and Mary, SIAM J. Sci. Comput. 41, 2019);
``lambda = 6`` makes that one in a million for the sums here. Two computations that
order the sum differently, as kernels of two CPUs do, are off by that much each.
:func:`rounding` is this bound, and the names below are it for what the tests compare:
the number format, the terms, and by what the result is scaled. A float32 result that is
compared with one in float64 has the bound of its own format.

A name serves as absolute tolerance for values of size one and as relative tolerance
otherwise. Where a test gives none, ``torch.testing.assert_close`` uses torch's own for
the format, and ``pytest.approx`` 1e-6 of the value, both far above a single rounding.
Where two results must *differ*, the stated margin is the size of an effect, not a
tolerance.

Sampling. A share or a mean of ``n`` random draws is compared under :func:`sampling`,
five standard errors.
"""

import math

import torch
from torch import Tensor

_LAMBDA = 6.0
TINY_SCALE = 10.0
"""Logit scale of the tiny models: a logit is this times a cosine."""

_BLOCK = 2 * 32 + 3 * 32 + 17 + 16 + 32 + 64
"""Terms behind one value of a tiny block: two norms, three projections, attention, the MLP."""
TOWER_TERMS = 3 * 8 * 8 + 2 * _BLOCK + 2 * 32
"""Terms behind one feature of the tiny models: patches, two blocks, last norm and projection."""


def rounding(dtype: torch.dtype, terms: int, scale: float = 1.0) -> float:
    """Bound of the difference of two computations of a sum.

    Args:
        dtype: The coarser number format of the two.
        terms: Rounded terms that one value is made of.
        scale: Sum of the sizes of the terms.
    """
    unit = torch.finfo(dtype).eps / 2
    return 2 * _LAMBDA * math.sqrt(terms) * unit * scale


def sampling(deviation: float, draws: int) -> float:
    """Five standard errors of the mean of ``draws`` values of this standard deviation."""
    return 5 * deviation / math.sqrt(draws)


def assert_near(actual: Tensor | None, expected: Tensor | None, atol: float) -> None:
    """Two tensors differ by at most ``atol``."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


SUM = rounding(torch.float32, 64)
"""A softmax, an attention row, a norm, an average of float32 values."""
FEATURE = rounding(torch.float32, TOWER_TERMS)
"""A feature of a float32 tower, and a probability that comes from it at scale one."""
LOGIT = rounding(torch.float32, TOWER_TERMS, TINY_SCALE)
"""A logit of a float32 tiny model; relative: a probability, whose error is that of its logit."""
GRADIENT = rounding(torch.float32, 3 * TOWER_TERMS, TINY_SCALE)
"""A float32 gradient through a tower (once forward, twice backward), relative to its size."""
ADAPTED = rounding(torch.float32, 4 * TOWER_TERMS, TINY_SCALE)
"""A logit after a step along such a gradient: a second forward pass comes on top."""
DOUBLE = math.sqrt(torch.finfo(torch.float64).eps * torch.finfo(torch.float32).eps)
"""Anything in float64: half-way, on a logarithmic scale, between the round-off of
float64 and that of float32, so that a value that passed through float32 by mistake is
caught."""
STEP = rounding(torch.float64, 3 * TOWER_TERMS) * 1e-2 / 1e-8
"""Parameters after a step of Adam in float64: ``lr * g / (|g| + eps)`` amplifies an
error of a gradient near zero by ``lr / eps``, here 1e-2 and 1e-8; also iterations that
amplify as much."""
BLOCK_STORES = 8
"""Tensors that a block of a half-precision tower rounds: each sum inside is made in float32."""
