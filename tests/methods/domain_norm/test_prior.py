"""Which classes occur and how often: by hand, by a literal loop and on drawn streams."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

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
from tests.reference.domain_norm_literal import Domain, Image, LiteralDomainNorm, Prior

N = 10


def draw(
    labels: Tensor, bias: Tensor | float = 0.0, *, gap: float, seed: int = 0
) -> Tensor:
    """Zero-shot predictions of such images: noise, a gap for the true class, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(labels), N, generator=generator)
    truth = one_hot(labels, N)
    logits = noise + bias + gap * truth
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
    n = torch.tensor(float(images))
    generator = torch.Generator().manual_seed(classes)
    draws = max(3, 4000 // classes)
    actual = []
    for _ in range(draws):
        labels = torch.randint(0, classes, (images,), generator=generator)
        mass = labels.bincount(minlength=classes).float()
        actual.append(float(evenness(frequencies(mass, n))))

    mean = sum(actual) / draws
    weight = torch.tensor(1 - 1 / classes)
    expected = float(expected_evenness(n, weight, classes))
    standard_error = float(torch.tensor(actual).std()) / math.sqrt(draws)
    # A Poisson number of draws has 1/N more spread than so many draws of N classes.
    tolerance = 4 * standard_error + 0.1 / classes

    assert mean == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("gap", [3.0, 6.0])
@pytest.mark.parametrize(("images", "slack"), [(10, 0.2), (50, 0.06), (500, 0.01)])
def test_expected_evenness_of_unsure_predictions_is_never_above_that_of_draws(
    gap: float, images: int, slack: float
) -> None:
    """Soft predictions: equal for many images per class, lower where they are few."""
    classes = 50
    draws = 20
    generator = torch.Generator().manual_seed(0)
    n = torch.tensor(float(images))
    actual = 0.0
    expected = 0.0
    for _ in range(draws):
        labels = torch.randint(0, classes, (images,), generator=generator)
        logits = 1.5 * torch.randn(images, classes, generator=generator)
        logits[torch.arange(images), labels] += gap
        q = logits.softmax(dim=1)
        actual += float(evenness(frequencies(q.sum(dim=0), n))) / draws
        weight = q.square().sum() / n - 1 / classes
        expected += float(expected_evenness(n, weight, classes)) / draws

    assert actual >= expected - 0.01
    assert actual <= expected + slack


@pytest.mark.parametrize("classes", [5, 20, 100, 1000, 20000])
@pytest.mark.parametrize("sure", [1.0, 0.6])
def test_streams_of_equally_frequent_classes_are_never_believed(
    classes: int, sure: float
) -> None:
    """From the first images on, up to ten per class; for the longest list up to 20,000."""
    images = min(10 * classes, 20000)
    batch = max(1, images // 40)
    seeds = 3 if classes > 1000 else 10
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, classes, (images,), generator=generator)
        priors = prior_of(labels, classes, batch=batch, sure=sure)
        beliefs = [float(prior.belief) for prior in priors]
        assert max(beliefs) == 0


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


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [(0.1, 0.4), (0.5, 0.4), (0.6, 0.5), (0.7, 0.6), (0.9, 0.8), (1.0, 0.8)],
)
def test_the_limit_of_evenness_rises_with_confidence(
    confidence: float, expected: float
) -> None:
    config = DomainNormConfig(evenness_limits=(0.4, 0.8))
    limit = evenness_limit(torch.tensor(confidence), config)
    assert float(limit) == pytest.approx(expected)


# --- bias and frequency -------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_bias_differs_from_frequency(batch: int) -> None:
    """Streams whose plain predictions are alike: one is biased, the other holds three classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, N, (512,), generator=generator)
    towards_three = torch.tensor([3.0] * 3 + [0.0] * 7)
    biased = draw(labels, towards_three, gap=4.0)
    few = draw(labels % 3, gap=3.0)

    # the share of the first three classes in plain predictions
    share_of_biased = float(biased.mean(dim=0)[:3].sum())
    share_of_few = float(few.mean(dim=0)[:3].sum())

    assert abs(share_of_biased - share_of_few) < 0.01

    frequencies_of_biased = estimate(biased, batch)
    frequencies_of_few = estimate(few, batch)

    assert float(evenness(frequencies_of_biased)) > 0.9
    assert float(frequencies_of_few[:3].sum()) > 0.8


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
    predictions = draw(torch.full((256,), 4), gap=7.0)
    assert float(estimate(predictions)[4]) > 0.9


def test_few_classes_of_a_long_stream_are_believed_where_predictions_are_sure() -> None:
    """With every image the background of a class that is always there looks more like bias."""
    config = DomainNormConfig()
    only_class_4 = torch.full((512,), 4)
    counts = counted(draw(only_class_4, gap=4.0), config)[-1]

    assert float(counts.confidence / counts.images) > 0.75

    sure_prior = class_prior(counts, config).prior
    assert float(sure_prior[4]) > 0.9

    unsure = counts._replace(confidence=0.5 * counts.images)
    unsure_prior = class_prior(unsure, config).prior

    assert float(unsure_prior[4]) < 0.3


def test_streams_of_every_kind_have_the_prior_of_the_page() -> None:
    """Few classes and many, sure and unsure, biased or not: also where belief is partial."""
    literal = LiteralDomainNorm.__new__(LiteralDomainNorm)
    literal.N = N
    config = DomainNormConfig()
    generator = torch.Generator().manual_seed(0)
    nothing = np.zeros(0)
    partial_beliefs = 0
    partial_bursts = 0
    for seed in range(40):
        # seeds go through classes that occur, gaps of the true class, and biases
        present = seed % N + 1
        gap = 1.0 + seed % 7
        bias = (0.0, 1.5, 3.0)[seed % 3]
        labels = torch.randint(0, present, (64,), generator=generator)
        pull = bias * torch.randn(N, generator=generator)
        predictions = draw(labels, pull, gap=gap, seed=seed).double()

        counts = no_counts()
        domain = Domain(np.zeros(1), N, 1)
        for part in predictions.split(8):
            counts = count(counts, part, config)
            actual = class_prior(counts, config)
            images = [Image(0, part, nothing, nothing, z) for z in part.numpy()]
            expected = literal.count(domain, images)
            assert_same_prior(actual, expected)
            partial_beliefs += 0.05 < expected.beta < 0.95
            partial_bursts += 0.05 < expected.r < 0.95

    assert partial_beliefs > 5
    assert partial_bursts > 5


def assert_same_prior(actual: ClassPrior, expected: Prior) -> None:
    """The prior of a domain is that of the page, number by number."""
    near: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(actual.marginal, expected.m, **near)
    np.testing.assert_allclose(actual.prior, expected.pi, **near)

    belief = float(actual.belief)
    assert belief == pytest.approx(expected.beta, abs=1e-9)
    burst = float(actual.burst)
    assert burst == pytest.approx(expected.r, abs=1e-9)

    # weights of classes matter up to a factor
    weights = actual.log_weights.softmax(dim=0).numpy()
    literal = expected.weights / expected.weights.sum()
    np.testing.assert_allclose(weights, literal, rtol=1e-8, atol=1e-12)


def test_all_classes_are_equally_frequent_if_that_is_said() -> None:
    labels = torch.tensor([3] * 40 + [5] * 24)
    predictions = draw(labels, gap=4.0)
    config = DomainNormConfig(prior="uniform")
    (counts,) = counted(predictions, config)
    actual = class_prior(counts, config)

    uniform = torch.full((N,), 1 / N).double()
    torch.testing.assert_close(actual.prior, uniform)
    no_weights = torch.zeros(N).double()
    torch.testing.assert_close(actual.log_weights, no_weights)


@pytest.mark.parametrize("classes", [8, 100, 1000])
@pytest.mark.parametrize("batch", [16, 64])
def test_few_images_of_many_classes_are_no_burst_but_many_of_two_are(
    classes: int, batch: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    even = torch.randint(0, classes, (1024,), generator=generator)
    of_two_classes = even[:64] % 2
    labels = torch.cat([even, of_two_classes])
    priors = prior_of(labels, classes, batch=batch, sure=0.9)
    bursts = [float(prior.burst) for prior in priors]

    # after four batches, and before the images of two classes
    without = bursts[4 : 1024 // batch]

    assert sum(without) / len(without) < 0.15
    assert bursts[-1] > 0.95


def share_right(labels: Tensor, recent_images: float, batch: int) -> float:
    """Share of images classified rightly with the prior of a stream."""
    config = DomainNormConfig(recent_images=recent_images)
    predictions = draw(labels, gap=2.0)
    after_each = counted(predictions, config, batch)

    # each batch is weighed with the prior that includes it
    weighed = []
    for part, counts in zip(predictions.split(batch), after_each, strict=True):
        prior = class_prior(counts, config)
        weighed.append(part.log() + prior.log_weights)

    predicted = torch.cat(weighed).argmax(dim=1)
    return float((predicted == labels).float().mean())


# --- bursts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_recent_frequencies_help_in_bursts_and_change_nothing_without(
    batch: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randint(0, N, (1024,), generator=generator)
    bursts = shuffled.sort().values.roll(300)
    with_recent = share_right(bursts, 16.0, batch)

    assert with_recent > share_right(bursts, 0.0, batch) + 0.1

    with_recent = share_right(shuffled, 16.0, batch)

    assert abs(with_recent - share_right(shuffled, 0.0, batch)) < 0.02
