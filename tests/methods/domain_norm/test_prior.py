"""Which classes occur and how often: by hand, by a literal loop and on drawn streams."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.prior import (
    belief,
    class_prior,
    count,
    evenness,
    frequencies,
    weigh_recent,
)
from cliquetta.methods.domain_norm.state import Counts
from tests.reference.domain_norm_literal import Domain, Image, LiteralDomainNorm

N = 10


def draw(labels: Tensor, bias: Tensor | float = 0.0, *, gap: float, seed: int = 0) -> Tensor:
    """Zero-shot predictions of such images: noise, a gap for the true class, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(labels), N, generator=generator) + bias
    logits[torch.arange(len(labels)), labels] += gap
    return logits.softmax(dim=1)


def no_counts() -> Counts:
    shapes: dict[str, tuple[int, ...]] = {"moments": (4, N), "predicted": (2, N)}
    shapes |= dict.fromkeys(("images", "confidence", "entropy", "agreement", "asked"), ())
    return Counts(*(torch.zeros(shapes.get(name, (N,))) for name in Counts._fields))


def counted(predictions: Tensor, config: DomainNormConfig, batch: int = 64) -> list[Counts]:
    """The counts of a domain after each batch of predictions."""
    counts = [no_counts()]
    for part in predictions.split(batch):
        counts.append(count(counts[-1], part, config))
    return counts[1:]


def estimate(predictions: Tensor, batch: int = 64) -> Tensor:
    """Frequencies of a stream in batches."""
    counts = counted(predictions, DomainNormConfig(), batch)[-1]
    return frequencies(counts.debiased, counts.images)


def test_a_hub_is_not_mistaken_for_a_class_that_occurs() -> None:
    labels = torch.randint(0, N, (512,), generator=torch.Generator().manual_seed(1))
    hub = draw(labels, 5.5 * torch.eye(N)[3], gap=4.0)
    few = draw(torch.full((512,), 3), gap=5.5)
    for predictions, occurs in ((hub, False), (few, True), (few[:64], True)):
        counts = counted(predictions, DomainNormConfig())[-1]
        assert (class_prior(counts, DomainNormConfig()).prior[3] > 0.5) == occurs


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_bias_differs_from_frequency(batch: int) -> None:
    """Streams whose plain predictions are alike: one is biased, the other holds three classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, N, (512,), generator=generator)
    biased = draw(labels, torch.tensor([3.0] * 3 + [0.0] * 7), gap=4.0)
    few = draw(labels % 3, gap=3.0)
    plain = [float(p.mean(dim=0)[:3].sum()) for p in (biased, few)]
    assert abs(plain[0] - plain[1]) < 0.01
    assert float(evenness(estimate(biased, batch))) > 0.9
    assert float(estimate(few, batch)[:3].sum()) > 0.8


def test_a_stream_of_one_class_is_not_mistaken_for_biased() -> None:
    assert float(estimate(draw(torch.full((256,), 4), gap=7.0))[4]) > 0.9
    unsure = counted(draw(torch.full((64,), 4), gap=5.0), DomainNormConfig())[0]
    assert float(class_prior(unsure, DomainNormConfig()).prior[4]) > 0.9


def test_uneven_frequencies_are_believed_if_predictions_are_confident_enough() -> None:
    config = DomainNormConfig(evenness_floor=0.4, evenness_cap=0.8, evenness_slope=2.0)
    # Seven of ten against a limit of 0.4, of 0.4 + 2 * 0.16 = 0.72, and of 0.8 at most.
    cases = [(2, 0.3, 1), (2, 0.9, 1), (10, 0.3, 0), (10, 0.9, 0)]
    for classes, sure, expected in (*cases, (7, 0.3, 0), (7, 0.66, 0.7), (7, 0.95, 1)):
        assert believed(classes, N, sure, config) == pytest.approx(expected, abs=1e-3)


def believed(classes: int, plain: int, confidence: float, config: DomainNormConfig) -> float:
    """Belief where so many classes are equally frequent by unbiased and by plain predictions."""
    images = torch.tensor(1e6)
    debiased, predicted = ((torch.arange(N) < few) * images / few for few in (classes, plain))
    counts = no_counts()._replace(images=images, confidence=confidence * images)
    counts = counts._replace(debiased=debiased, classes=predicted, recent=debiased)
    return float(class_prior(counts, config).belief)


def test_streams_of_every_kind_have_the_prior_of_the_page() -> None:
    """Few classes and many, sure and unsure, biased or not: also where belief is partial."""
    literal = LiteralDomainNorm.__new__(LiteralDomainNorm)
    literal.N, config, partial = N, DomainNormConfig(), {"belief": 0, "few": 0}
    generator = torch.Generator().manual_seed(0)
    for seed in range(40):
        present, gap, bias = seed % N + 1, 1.0 + seed % 7, (0.0, 1.5, 3.0)[seed % 3]
        labels = torch.randint(0, present, (64,), generator=generator)
        pull = bias * torch.randn(N, generator=generator)
        counts, domain = no_counts(), Domain(np.zeros(1), N, 1, 1)
        for part in draw(labels, pull, gap=gap, seed=seed).double().split(8):
            counts = count(counts, part, config)
            actual, nothing = class_prior(counts, config), np.zeros(0)
            images = [Image(0, part, nothing, nothing, z) for z in part.numpy()]
            pi, m, beta, w, *_ = literal.count(domain, images)
            for ours, theirs in zip(actual[:4], (m, pi, w, beta), strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-9, atol=1e-12)
            nu = frequencies(counts.debiased, counts.images)
            plain = belief(nu, counts.confidence / counts.images, config)
            partial["belief"] += 0.05 < float(plain) < 0.95
            partial["few"] += 0.05 < (beta - float(plain)) / (1 - float(plain) + 1e-9) < 0.95
    assert min(partial.values()) > 5, partial


def test_the_prior_can_be_fixed() -> None:
    predictions = draw(torch.tensor([3] * 40 + [5] * 24), gap=4.0)
    uniform, believed = (
        class_prior(counted(predictions, config)[0], config)
        for config in (DomainNormConfig(prior="uniform"), DomainNormConfig(prior="zero-shot"))
    )
    torch.testing.assert_close(uniform.prior, torch.full((N,), 1 / N))
    torch.testing.assert_close(uniform.weights, torch.ones(N))
    m = predictions.mean(dim=0)
    torch.testing.assert_close(believed.prior, m)
    torch.testing.assert_close(believed.weights, (m / m.max()) ** (1 / 3))


def burst(mass: Tensor, nu: Tensor) -> float:
    """r of Eq. 13, by the weight of the class that recent images show least."""
    config = DomainNormConfig(frequency_power=0.0)
    weights = weigh_recent(torch.ones_like(nu), mass, nu, torch.tensor(0.5), config)
    recent = frequencies(mass, mass.sum())
    return float(weights.min().log() / (recent.min() / recent.max()).log())


@pytest.mark.parametrize("classes", [8, 100, 1000])
@pytest.mark.parametrize("images", [16, 64])
def test_few_images_of_many_classes_are_no_burst(classes: int, images: int) -> None:
    generator, domain = torch.Generator().manual_seed(0), torch.full((classes,), 1 / classes)
    for present, low, high in ((classes, 0.0, 0.4), (2, 0.99, 1.0)):
        actual = []
        for _ in range(50):
            labels = torch.randint(0, present, (images,), generator=generator)
            actual.append(burst(labels.bincount(minlength=classes).float(), domain))
        assert low <= sum(actual) / 50 <= high


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_recent_frequencies_help_in_bursts_and_change_nothing_without(batch: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randint(0, N, (1024,), generator=generator)
    right = {}
    for name, labels in (("shuffled", shuffled), ("bursts", shuffled.sort().values.roll(300))):
        predictions = draw(labels, gap=2.0)
        for recent in (0.0, 16.0):
            config = DomainNormConfig(recent_images=recent)
            weights = (class_prior(c, config).weights for c in counted(predictions, config, batch))
            parts = zip(predictions.split(batch), weights, strict=True)
            actual = torch.cat([part * weight for part, weight in parts]).argmax(dim=1) == labels
            right[name, recent] = float(actual.float().mean())
    assert right["bursts", 16.0] > right["bursts", 0.0] + 0.1
    assert abs(right["shuffled", 16.0] - right["shuffled", 0.0]) < 0.02
