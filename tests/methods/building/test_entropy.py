"""Entropies against scipy."""

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.special import softmax
from torch import Tensor

from cliquetta.methods.building.entropy import entropy, marginal_entropy
from tests._helpers.tolerance import FEATURE, SUM


@pytest.fixture
def logits() -> Tensor:
    return 5 * torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))


def test_entropy_is_scipys(logits: Tensor) -> None:
    expected = scipy.stats.entropy(softmax(logits.double().numpy(), axis=-1), axis=-1)
    np.testing.assert_allclose(entropy(logits).numpy(), expected, rtol=FEATURE, atol=SUM)


def test_marginal_entropy_is_that_of_the_mean_probabilities(logits: Tensor) -> None:
    mean = softmax(logits.double().numpy(), axis=-1).mean(axis=1)
    expected = scipy.stats.entropy(mean, axis=-1)
    np.testing.assert_allclose(marginal_entropy(logits).numpy(), expected, rtol=FEATURE)
