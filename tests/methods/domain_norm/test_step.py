"""``step`` against a re-implementation from the method's page, batch by batch over streams."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.domain_norm.step import match_confidence
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests.reference.domain_norm_literal import LiteralDomainNorm

MODEL = build_model(0)


def images(seed: int, count: int, light: float = 0.0) -> Tensor:
    return make_batches(seed, 1, count)[0] + light


def streams() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """Batches and settings under names that tell what they put to the test."""
    bright = images(2, 160)
    dark = images(3, 160, -3.0)
    third = images(4, 40, 3.0)
    small = [
        *bright[:40].split(1),
        *bright[40:80].split(7),
        *dark[:70].split(9),
        *bright[80:].split(9),
    ]
    settled = [
        *bright.split(20),
        *bright.split(20),
        *dark[:60].split(20),
        *bright[:80].split(8),
        *dark.split(20),
    ]
    back = [
        bright[:40],
        dark[:40],
        bright[40:80],
        third,
        dark[40:80],
        bright[80:120],
    ]
    return {
        "windows": (list(bright.split(20)) * 2, {"W": 20}),
        "more than a window": ([bright[:50], bright[50:], dark], {"W": 16}),
        "small batches": (small, {"W": 16}),
        "domains go and come back": (back, {"W": 20, "domains": 2}),
        "settled": (settled, {"W": 20, "settled_steps": 3, "settled_every": 80}),
        "large steps": (list(bright.split(32)) * 3, {"W": 32, "lr": 0.3}),
    }


@pytest.mark.parametrize("name", streams())
def test_step_equals_the_page(name: str) -> None:
    batches, options = streams()[name]
    ours = dict(options)
    ours["window"] = ours.pop("W")
    config = DomainNormConfig(**ours)
    adapter = DomainNorm(MODEL, ClassPrompts(NAMES), config)
    literal = LiteralDomainNorm(MODEL, adapter.network.text, **options)

    for batch in batches:
        actual = adapter.predict(batch).logits
        expected = literal.step(batch)
        # Logarithms down to about -60 are rounded to float32 at the end, all else is
        # float64.
        np.testing.assert_allclose(actual.numpy(), expected, atol=64 * 2**-23, rtol=0)

    state = adapter.state
    assert int(state.current) == literal.current

    for own, other in zip(state.domains, literal.domains, strict=True):
        assert int(own.norms.steps) == other.steps
        assert int(own.images) == other.images
        assert float(own.temperature) == pytest.approx(other.T, rel=1e-9)
        norms = own.norms.values.numpy()
        np.testing.assert_allclose(norms, other.theta, atol=1e-9)
        debiased = own.counts.debiased.numpy()
        np.testing.assert_allclose(debiased, other.debiased, rtol=1e-8)

    if name == "settled":
        # Most images of a settled domain are predicted without their zero-shot
        # prediction.
        assert max(domain.images - domain.n for domain in literal.domains) > 100


@pytest.fixture
def logits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 4.0 * torch.randn(64, 5, generator=generator).double()


def mean_confidence(logits: Tensor) -> Tensor:
    return logits.softmax(dim=1).amax(dim=1).mean()


@pytest.mark.parametrize("confidence", [0.4, 0.5, 0.8])
def test_the_temperature_makes_predictions_as_sure_as_asked(
    logits: Tensor, confidence: float
) -> None:
    asked = torch.tensor(confidence).double()
    temperature = match_confidence(logits, asked)
    sure = float(mean_confidence(logits / temperature))

    assert sure == pytest.approx(confidence, abs=1e-3)


def test_predictions_that_are_as_sure_as_asked_are_left_alone(logits: Tensor) -> None:
    temperature = match_confidence(logits, mean_confidence(logits))
    assert float(temperature) == pytest.approx(1.0, abs=1e-3)
