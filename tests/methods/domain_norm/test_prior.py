"""Which classes occur and how often: by hand, by a literal loop and on drawn streams."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.prior import (
    ClassPrior,
    class_prior,
    count,
    evenness,
    evenness_limit,
    expected_evenness,
    frequencies,
)
from cliquetta.methods.domain_norm.state import Counts
from tests.reference.domain_norm_literal import Domain, Image, LiteralDomainNorm

N = 10


def draw(
    labels: Tensor, bias: Tensor | float = 0.0, *, gap: float, seed: int = 0
) -> Tensor:
    """Zero-shot predictions of such images: noise, a gap for the true class, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(labels), N, generator=generator) + bias
    logits[torch.arange(len(labels)), labels] += gap
    return logits.softmax(dim=1)


def no_counts(classes: int = N) -> Counts:
    zero = torch.zeros((), dtype=torch.float64)
    per_class = torch.zeros(classes, dtype=torch.float64)
    return Counts(
        images=zero,
        confidence=zero,
        marginal=per_class,
        classes=per_class,
        moments=torch.zeros(4, classes, dtype=torch.float64),
        absence=per_class,
        absent_logits=per_class,
        debiased=per_class,
        concentration=zero,
        recent=per_class,
        recent_concentration=zero,
    )


def counted(
    predictions: Tensor, config: DomainNormConfig, batch: int = 64
) -> list[Counts]:
    """The counts of a domain after each batch of predictions."""
    counts = no_counts(predictions.shape[1])
    after = []
    for part in predictions.split(batch):
        counts = count(counts, part, config)
        after.append(counts)
    return after


def estimate(predictions: Tensor, batch: int = 64) -> Tensor:
    """Frequencies of a stream in batches."""
    counts = counted(predictions, DomainNormConfig(), batch)[-1]
    return frequencies(counts.debiased, counts.images)


def prior_of(
    labels: Tensor, classes: int, *, batch: int, sure: float = 1.0
) -> list[ClassPrior]:
    """The class prior after each batch of a stream whose predictions are right.

    ``sure`` is the probability of the predicted class; the others share the rest.
    """
    config = DomainNormConfig()
    rest = (1 - sure) / (classes - 1)
    counts = no_counts(classes)
    priors = []
    for part in labels.split(batch):
        q = torch.full((len(part), classes), rest, dtype=torch.float64)
        q[torch.arange(len(part)), part] = sure
        kept = 0.5 ** (len(part) / config.recent_images)
        counts = counts._replace(
            images=counts.images + len(part),
            confidence=counts.confidence + sure * len(part),
            marginal=counts.marginal + q.sum(dim=0),
            classes=counts.classes + part.bincount(minlength=classes),
            debiased=counts.debiased + q.sum(dim=0),
            concentration=counts.concentration + q.square().sum(),
            recent=kept * counts.recent + q.sum(dim=0),
            recent_concentration=kept * counts.recent_concentration + q.square().sum(),
        )
        priors.append(class_prior(counts, config))
    return priors


# --- how even few images of many classes are ----------------------------------------------------


@pytest.mark.parametrize("classes", [5, 10, 80, 1000, 20000])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 3.0, 10.0])
def test_expected_evenness_is_that_of_draws(classes: int, ratio: float) -> None:
    """Certain predictions of images whose classes are drawn evenly, by simulation."""
    images = max(5, int(ratio * classes))
    generator = torch.Generator().manual_seed(classes)
    draws = max(3, 4000 // classes)
    actual = []
    for _ in range(draws):
        labels = torch.randint(0, classes, (images,), generator=generator)
        mass = labels.bincount(minlength=classes).float()
        actual.append(float(evenness(frequencies(mass, torch.tensor(float(images))))))
    weight = torch.tensor(1 - 1 / classes)
    expected = float(expected_evenness(torch.tensor(float(images)), weight, classes))
    standard_error = float(torch.tensor(actual).std()) / math.sqrt(draws)
    # A Poisson number of draws has 1/N more spread than so many draws of N classes.
    assert sum(actual) / draws == pytest.approx(
        expected, abs=4 * standard_error + 0.1 / classes
    )


@pytest.mark.parametrize("gap", [3.0, 6.0])
def test_expected_evenness_of_unsure_predictions_is_never_above_that_of_draws(
    gap: float,
) -> None:
    """Soft predictions: equal for many images per class, lower where they are few."""
    classes = 50
    generator = torch.Generator().manual_seed(0)
    for images, slack in ((10, 0.2), (50, 0.06), (500, 0.01)):
        actual = []
        expected = []
        for _ in range(20):
            labels = torch.randint(0, classes, (images,), generator=generator)
            logits = 1.5 * torch.randn(images, classes, generator=generator)
            logits[torch.arange(images), labels] += gap
            q = logits.softmax(dim=1)
            n = torch.tensor(float(images))
            actual.append(float(evenness(frequencies(q.sum(dim=0), n))))
            weight = q.square().sum() / n - 1 / classes
            expected.append(float(expected_evenness(n, weight, classes)))
        mean = sum(expected) / 20
        assert mean - 0.01 <= sum(actual) / 20 <= mean + slack


@pytest.mark.parametrize("classes", [5, 20, 100, 1000, 20000])
@pytest.mark.parametrize("sure", [1.0, 0.6])
def test_streams_of_equally_frequent_classes_are_never_believed(
    classes: int, sure: float
) -> None:
    """From the first images on, up to ten per class; for the longest list up to 20,000."""
    images = min(10 * classes, 20000)
    batch = max(1, images // 40)
    for seed in range(3 if classes > 1000 else 10):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, classes, (images,), generator=generator)
        priors = prior_of(labels, classes, batch=batch, sure=sure)
        assert max(float(prior.belief) for prior in priors) == 0


@pytest.mark.parametrize(
    ("classes", "present"), [(10, 3), (80, 3), (80, 16), (1000, 50)]
)
def test_few_classes_are_believed_from_the_first_batch_on(
    classes: int, present: int
) -> None:
    labels = torch.randint(
        0, present, (256,), generator=torch.Generator().manual_seed(0)
    )
    priors = prior_of(labels, classes, batch=64, sure=0.9)
    believed = [float(prior.belief) for prior in priors]
    # 64 images of 50 of 1,000 classes look like 64 images of 1,000; 256 images do not.
    first = 0 if present < 50 else 3
    assert min(believed[first:]) == 1
    assert float(priors[-1].prior[:present].sum()) > 0.5


def test_the_limit_of_evenness_rises_with_confidence() -> None:
    config = DomainNormConfig(evenness_limits=(0.4, 0.8))
    cases = [(0.1, 0.4), (0.5, 0.4), (0.6, 0.5), (0.7, 0.6), (0.9, 0.8), (1.0, 0.8)]
    for confidence, expected in cases:
        actual = evenness_limit(torch.tensor(confidence), config)
        assert float(actual) == pytest.approx(expected)


# --- bias and frequency -------------------------------------------------------------------------


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


def test_a_hub_is_not_mistaken_for_a_class_that_occurs() -> None:
    config = DomainNormConfig()

    def prior_of_class_3(predictions: Tensor) -> float:
        counts = counted(predictions, config)[-1]
        return float(class_prior(counts, config).prior[3])

    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, N, (512,), generator=generator)
    pull = torch.zeros(N)
    pull[3] = 5.5
    hub = draw(labels, pull, gap=4.0)
    few = draw(torch.full((512,), 3), gap=5.5)
    assert prior_of_class_3(hub) <= 0.5
    assert prior_of_class_3(few) > 0.5
    assert prior_of_class_3(few[:64]) > 0.5


def test_a_stream_of_one_class_is_not_mistaken_for_biased() -> None:
    assert float(estimate(draw(torch.full((256,), 4), gap=7.0))[4]) > 0.9


def test_few_classes_of_a_long_stream_are_believed_where_predictions_are_sure() -> None:
    """With every image the background of a class that is always there looks more like bias."""
    config = DomainNormConfig()
    counts = counted(draw(torch.full((512,), 4), gap=4.0), config)[-1]
    assert float(counts.confidence / counts.images) > 0.75
    assert float(class_prior(counts, config).prior[4]) > 0.9
    unsure = counts._replace(confidence=0.5 * counts.images)
    assert float(class_prior(unsure, config).prior[4]) < 0.3


def test_streams_of_every_kind_have_the_prior_of_the_page() -> None:
    """Few classes and many, sure and unsure, biased or not: also where belief is partial."""
    literal = LiteralDomainNorm.__new__(LiteralDomainNorm)
    literal.N = N
    config = DomainNormConfig()
    generator = torch.Generator().manual_seed(0)
    partial = {"belief": 0, "burst": 0}
    for seed in range(40):
        present = seed % N + 1
        gap = 1.0 + seed % 7
        bias = (0.0, 1.5, 3.0)[seed % 3]
        labels = torch.randint(0, present, (64,), generator=generator)
        pull = bias * torch.randn(N, generator=generator)
        counts = no_counts()
        domain = Domain(np.zeros(1), N, 1)
        nothing = np.zeros(0)
        for part in draw(labels, pull, gap=gap, seed=seed).double().split(8):
            counts = count(counts, part, config)
            actual = class_prior(counts, config)
            images = [Image(0, part, nothing, nothing, z) for z in part.numpy()]
            expected = literal.count(domain, images)
            np.testing.assert_allclose(
                actual.marginal, expected.m, rtol=1e-9, atol=1e-12
            )
            np.testing.assert_allclose(actual.prior, expected.pi, rtol=1e-9, atol=1e-12)
            assert float(actual.belief) == pytest.approx(expected.beta, abs=1e-9)
            assert float(actual.burst) == pytest.approx(expected.r, abs=1e-9)
            weights = actual.log_weights.softmax(dim=0).numpy()
            np.testing.assert_allclose(
                weights,
                expected.weights / expected.weights.sum(),
                rtol=1e-8,
                atol=1e-12,
            )
            partial["belief"] += 0.05 < expected.beta < 0.95
            partial["burst"] += 0.05 < expected.r < 0.95
    assert min(partial.values()) > 5, partial


def test_all_classes_are_equally_frequent_if_that_is_said() -> None:
    predictions = draw(torch.tensor([3] * 40 + [5] * 24), gap=4.0)
    config = DomainNormConfig(prior="uniform")
    actual = class_prior(counted(predictions, config)[0], config)
    torch.testing.assert_close(actual.prior, torch.full((N,), 1 / N).double())
    torch.testing.assert_close(actual.log_weights, torch.zeros(N).double())


# --- bursts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [8, 100, 1000])
@pytest.mark.parametrize("batch", [16, 64])
def test_few_images_of_many_classes_are_no_burst(classes: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    even = torch.randint(0, classes, (1024,), generator=generator)
    priors = prior_of(even, classes, batch=batch, sure=0.9)
    assert sum(float(prior.burst) for prior in priors[4:]) / len(priors[4:]) < 0.15
    burst = torch.cat([even, even[:64] % 2])
    assert float(prior_of(burst, classes, batch=batch, sure=0.9)[-1].burst) > 0.95


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_recent_frequencies_help_in_bursts_and_change_nothing_without(
    batch: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randint(0, N, (1024,), generator=generator)
    right = {}
    for name, labels in (
        ("shuffled", shuffled),
        ("bursts", shuffled.sort().values.roll(300)),
    ):
        predictions = draw(labels, gap=2.0)
        for recent in (0.0, 16.0):
            config = DomainNormConfig(recent_images=recent)
            priors = [
                class_prior(one, config) for one in counted(predictions, config, batch)
            ]
            parts = zip(predictions.split(batch), priors, strict=True)
            weighed = [part.log() + prior.log_weights for part, prior in parts]
            actual = torch.cat(weighed).argmax(dim=1) == labels
            right[name, recent] = float(actual.float().mean())
    assert right["bursts", 16.0] > right["bursts", 0.0] + 0.1
    assert abs(right["shuffled", 16.0] - right["shuffled", 0.0]) < 0.02
