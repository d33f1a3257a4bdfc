"""``step`` against a re-implementation from the method's page, batch by batch over streams."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tiny_world import draw
from tests.reference.domain_norm_literal import LiteralDomainNorm

MODEL = build_model(0)


def images(seed: int, count: int, light: float = 0.0) -> Tensor:
    return make_batches(seed, 1, count)[0] + light


def streams() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    bright, dark = images(2, 160), images(3, 160, -3.0)
    same = 0.5 + 1e-3 * draw(96, 3, 16, 16)
    small = [*bright[:40].split(1), *bright[40:80].split(7)]
    small += [*dark[:70].split(9), *bright[80:].split(9)]
    settled = [*bright.split(20) * 2, *dark[:60].split(20), *bright[:80].split(8), *dark.split(20)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    mixed = [bright[:40], dark[:40], torch.cat([bright[40:60], dark[40:60]])[order], bright[60:]]
    third = images(4, 40, 3.0)
    back = [bright[:40], dark[:40], bright[40:80], third, dark[40:80], bright[80:120]]
    return {
        "windows": (list(bright.split(20)) * 2, {"W": 20, "warmup": 60}),
        "more than a window": ([bright[:50], bright[50:], dark], {"W": 16, "warmup": 0}),
        "small batches": (small, {"W": 16, "warmup": 32, "voters": 24}),
        "mixed": (mixed, {"W": 24, "warmup": 24, "domains": 2}),
        "domains go and come back": (back, {"W": 20, "warmup": 20, "domains": 2}),
        "settled": (
            settled,
            {"W": 20, "warmup": 40, "settled_steps": 3, "settled_every": 80},
        ),
        "nothing to see": ([*same.split(32), bright[:64]], {"W": 32, "warmup": 0}),
        "collapse": (list(bright.split(32)) * 3, {"W": 32, "warmup": 0, "lr": 3.0}),
    }


@pytest.mark.parametrize("name", streams())
def test_step_equals_the_page(name: str) -> None:
    batches, options = streams()[name]
    named = {"W": "step_every", "warmup": "warmup_images", "voters": "vote_memory"}
    config = DomainNormConfig(**{named.get(key, key): value for key, value in options.items()})
    adapter = DomainNorm(MODEL, ClassPrompts(NAMES), config)
    literal = LiteralDomainNorm(MODEL, adapter.network.text, **options)
    for batch in batches:
        actual, expected = adapter.predict(batch).logits, literal.step(batch)
        # Logarithms down to -28 are rounded to float32 at the end, all else is float64.
        np.testing.assert_allclose(actual.numpy(), expected, atol=28 * 2**-23, rtol=0)
    state = adapter.state
    assert int(state.current) == literal.current
    for own, other in zip(state.domains, literal.domains, strict=True):
        assert int(own.norms.steps) == other.steps and int(own.images) == other.images
        assert int(own.restarts) == other.restarts
        np.testing.assert_allclose(own.norms.values.numpy(), other.theta, atol=1e-9)
        np.testing.assert_allclose(own.counts.debiased.numpy(), other.debiased, rtol=1e-8)
    if name == "settled":
        assert max(domain.images - domain.n for domain in literal.domains) > 100
    if name == "collapse":
        assert sum(domain.restarts for domain in literal.domains) > 0
