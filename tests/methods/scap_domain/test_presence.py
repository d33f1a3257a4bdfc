"""Which classes occur: evenness, belief, presence and targets, by hand and on drawn streams."""

from __future__ import annotations

import pytest
import torch

from cliquetta.methods.scap_domain.config import DomainSCAPConfig
from cliquetta.methods.scap_domain.presence import (
    belief,
    class_prior,
    evenness,
    presence,
    target_marginal,
)


def test_evenness_counts_the_equally_frequent() -> None:
    assert float(evenness(torch.full((8,), 1000.0))) == pytest.approx(1.0)
    two = torch.tensor([1000.0, 1000.0] + [0.0] * 6)
    assert float(evenness(two)) == pytest.approx(2 / 8, rel=1e-3)


def test_evenness_of_few_answers_is_not_far_too_low() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [
        torch.randint(0, 80, (64,), generator=generator).bincount(minlength=80) for _ in range(50)
    ]
    shares = [counts[counts > 0] / 64 for counts in draws]
    plain = sum(float((-(q * q.log()).sum()).exp()) / 80 for q in shares) / 50
    found = sum(float(evenness(counts.float())) for counts in draws) / 50
    assert plain < 0.55 < 0.65 < found <= 1.0


def test_uneven_answers_are_believed_if_they_are_confident_enough() -> None:
    config = DomainSCAPConfig(
        evenness_floor=0.4,
        evenness_knee=0.5,
        evenness_cap=0.8,
        evenness_slope=2.0,
        evenness_band=0.1,
    )
    two, ten = torch.tensor([1e6, 1e6] + [0.0] * 8), torch.full((10,), 1e6)
    seven = torch.tensor([1e6] * 7 + [0.0] * 3)
    for confidence in (torch.tensor(0.3), torch.tensor(0.9)):
        assert float(belief(two, confidence, config)) == 1.0
        assert float(belief(ten, confidence, config)) == 0.0
    # Seven of ten against a limit of 0.4, of 0.4 + 2 * 0.16 = 0.72, and of 0.8 at most.
    for sureness, expected in ((0.3, 0.0), (0.66, 0.7), (0.95, 1.0)):
        found = float(belief(seven, torch.tensor(sureness), config))
        assert found == pytest.approx(expected, abs=1e-3)


def test_the_prior_can_be_fixed() -> None:
    answers, confidence = torch.tensor([5.0, 0.0, 0.0, 0.0]), torch.tensor(0.9)
    assert float(belief(answers, confidence, DomainSCAPConfig(prior="uniform"))) == 0.0
    even = torch.full((4,), 5.0)
    assert float(belief(even, confidence, DomainSCAPConfig(prior="zero-shot"))) == 1.0


def test_presence_is_the_root_of_mean_times_maximum() -> None:
    found = presence(torch.tensor([0.64, 0.36, 0.0]), torch.tensor([1.0, 0.25, 0.0]))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.3 / 0.8, 1e-4 / 0.8]))


def test_a_believed_prior_is_the_marginal_and_a_short_list_is_otherwise_uniform() -> None:
    marginal, present = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 0.5, 0.1])
    torch.testing.assert_close(class_prior(marginal, present, torch.tensor(1.0)), marginal)
    torch.testing.assert_close(
        class_prior(marginal, present, torch.tensor(0.0)), torch.full((3,), 1 / 3)
    )


def test_of_a_long_list_the_present_classes_are_expected() -> None:
    marginal = torch.full((80,), 1 / 80)
    present = torch.cat([torch.ones(8), torch.full((72,), 0.05)])
    found = class_prior(marginal, present, torch.tensor(0.0))
    torch.testing.assert_close(found, present / present.sum())
    # Half-way in the logarithm between 16 and 80 names, presence counts by its square root.
    names = round((16 * 80) ** 0.5)
    present = torch.linspace(0.1, 1, names)
    found = class_prior(torch.full((names,), 1 / names), present, torch.tensor(0.0))
    torch.testing.assert_close(found, present.sqrt() / present.sqrt().sum(), atol=1e-4, rtol=0)


def test_target_divides_out_the_streams_bias_only() -> None:
    stream, uniform = torch.tensor([0.8, 0.2]), torch.tensor([0.5, 0.5])
    torch.testing.assert_close(target_marginal(stream, stream, uniform), uniform)
    kept = target_marginal(torch.tensor([0.3, 0.7]), stream, stream)
    torch.testing.assert_close(kept, torch.tensor([0.3, 0.7]))
    # A window that holds one class alone keeps it, however biased the stream is.
    alone = target_marginal(torch.tensor([0.0, 1.0]), stream, uniform)
    torch.testing.assert_close(alone, torch.tensor([0.0, 1.0]))
