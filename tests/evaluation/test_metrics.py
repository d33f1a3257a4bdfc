"""Scores against their definitions, written out in numpy."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from cliquetta.evaluation.metrics import (
    Metrics,
    auroc,
    chance_p_value,
    fpr95,
    near_chance,
)
from tests._helpers.tolerance import SUM


def made_up(
    images: int = 200, classes: int = 7, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(
        0, classes - 1, (images,), generator=generator
    )  # the last is absent
    logits = 2 * torch.randn(images, classes, generator=generator)
    logits[torch.arange(images), labels] += 2
    return logits, labels


def by_hand(logits: Tensor, labels: Tensor, bins: int) -> dict[str, float]:
    """Scores by their definitions, in NumPy and double precision."""
    z = logits.double().numpy()
    y = labels.numpy()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ranked = np.argsort(-z, axis=1)
    best = ranked[:, 0]
    right = best == y

    # calibration: how far accuracy and confidence are apart in each bin
    confidence = p.max(1)
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    ece = 0.0
    for number in np.unique(bin_of):
        inside = bin_of == number
        gap = abs(right[inside].mean() - confidence[inside].mean())
        ece += inside.mean() * gap

    # scores of each class that has images
    recalls = []
    f1 = []
    for number in np.unique(y):
        own = y == number
        recalls.append(right[own].mean())
        f1.append(2 * (right & own).sum() / (own.sum() + (best == number).sum()))
    return {
        "macro_f1": 100 * np.mean(f1),
        "top1": 100 * right.mean(),
        "top5": 100 * (ranked[:, :5] == y[:, None]).any(1).mean(),
        "mean_class": 100 * np.mean(recalls),
        "ece": 100 * ece,
        "nll": -np.log(p[np.arange(len(y)), y]).mean(),
    }


@pytest.mark.parametrize("bins", [15, 20])
def test_scores_equal_their_definitions(bins: int) -> None:
    logits, labels = made_up()
    # counted in batches of 32
    metrics = Metrics(7, bins=bins)
    for rows in torch.arange(200).split(32):
        metrics.update(logits[rows], labels[rows])
    result = metrics.compute()

    for name, value in by_hand(logits, labels, bins).items():
        assert result[name] == pytest.approx(value, abs=100 * SUM), name
    assert result["labelled"] == 200
    assert result["ece_bins"] == bins
    assert metrics.accuracy == pytest.approx(result["top1"])


def test_accuracies_of_classes_are_listed_and_absent_ones_have_none() -> None:
    logits, labels = made_up()
    metrics = Metrics(7)
    metrics.update(logits, labels)
    *of_classes, of_absent = metrics.compute()["per_class"]
    assert of_absent is None

    right = logits.argmax(1) == labels
    recalls = [100 * right[labels == number].float().mean() for number in range(6)]
    assert of_classes == pytest.approx([recall.item() for recall in recalls])


def test_auroc_by_hand() -> None:
    known = torch.tensor([0.9, 0.8, 0.6, 0.5])
    outside = torch.tensor([0.7, 0.5, 0.1])
    # pairs that the known image wins: 3 + 3 + 2 + 1, and one tie
    assert auroc(known, outside) == pytest.approx((9 + 0.5) / 12)
    assert auroc(known, known) == 0.5


def test_fpr95_by_hand() -> None:
    known = torch.tensor([0.9, 0.8, 0.6, 0.5])
    outside = torch.tensor([0.7, 0.5, 0.1])
    # 4 of 4 pass at 0.5, and so do two of the others
    assert fpr95(known, outside) == pytest.approx(2 / 3)

    # 95 of 100 pass at 0.05
    many = torch.arange(100) / 100
    around = torch.tensor([0.04, 0.05, 0.06])
    assert fpr95(many, around) == pytest.approx(2 / 3)


def test_images_outside_the_list_enter_the_open_set_scores_only() -> None:
    # every fourth of 200 images is of no class
    logits, labels = made_up()
    labels[::4] = -2
    known = labels >= 0
    metrics = Metrics(7)
    for rows in torch.arange(200).split(32):
        metrics.update(logits[rows], labels[rows])
    result = metrics.compute()

    scores = logits.softmax(1).amax(1)
    inside = scores[known].numpy()
    outside = scores[~known].numpy()
    wins = np.greater.outer(inside, outside).mean()
    threshold = max(t for t in inside if (inside >= t).mean() >= 0.95)
    assert result.pop("outside") == 50
    assert result.pop("auroc") == pytest.approx(100 * wins)
    assert result.pop("fpr95") == pytest.approx(100 * (outside >= threshold).mean())

    # all else is as if there were only the others
    plain = Metrics(7)
    plain.update(logits[known], labels[known], [150])
    expected = plain.compute()
    assert result.pop("per_class") == expected.pop("per_class")
    assert result == pytest.approx(expected, abs=100 * SUM)


def test_a_state_replaces_all_that_was_counted() -> None:
    logits, labels = made_up()
    metrics = Metrics(7)
    metrics.update(logits, torch.where(labels == 0, -2, labels))
    resumed = Metrics(7)
    resumed.update(logits, labels)  # must be forgotten
    resumed.load_state_dict(metrics.state_dict())
    assert resumed.compute() == metrics.compute()


def test_unknown_labels_do_not_count() -> None:
    logits, labels = made_up()
    labels[::3] = -1
    partial = Metrics(7)
    partial.update(logits, labels)
    known = labels >= 0
    plain = Metrics(7)
    plain.update(logits[known], labels[known])
    assert partial.compute() == plain.compute()


def test_without_labels_there_are_no_scores() -> None:
    logits, labels = made_up()
    metrics = Metrics(7)
    metrics.update(logits, torch.full((200,), -1))
    metrics.update(torch.randn(0, 7), torch.zeros(0, dtype=torch.long))
    assert metrics.compute() == {"labelled": 0}
    assert metrics.accuracy is None

    # labels that come later count
    metrics.update(logits, labels)
    later = Metrics(7)
    later.update(logits, labels)
    assert metrics.compute() == later.compute()


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_few_classes_are_scored_too(classes: int) -> None:
    metrics = Metrics(classes)
    metrics.update(5 * torch.eye(classes), torch.arange(classes))
    result = metrics.compute()
    assert result["top1"] == 100
    assert result["top5"] == 100
    assert result["per_class"] == [100] * classes


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_logits_of_another_number_of_classes_are_refused(classes: int) -> None:
    metrics = Metrics(classes)
    labels = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="fit"):
        metrics.update(torch.zeros(2, 4), labels)


def test_batches_counted_together_score_the_same_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 9 * torch.randn(97, 6, generator=generator)
    labels = torch.randint(-1, 6, (97,), generator=generator)
    labels[20:30] = -1  # a batch without labels
    apart = Metrics(6)
    for rows in torch.arange(97).split(10):
        apart.update(logits[rows], labels[rows])
    together = Metrics(6)
    together.update(logits, labels, [10] * 9 + [7])
    assert apart.compute() == together.compute()


def test_a_broken_torchvision_does_not_take_the_scores_down(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(
        "raise RuntimeError('no operator nms')"
    )
    about = tmp_path / "torchvision-0.99.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99\n"
    )
    program = "import cliquetta.evaluation.metrics as m; m.Metrics(3); import cliquetta.report.page"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_shuffled_labels_are_noticed_and_hard_data_are_not_mistaken_for_them() -> None:
    for accuracy, classes in (
        (0.005, 200),
        (0.001, 1000),
        (0.1, 10),
        (0.5, 2),
        (0.04, 101),
    ):
        message = near_chance(accuracy, classes=classes, images=30)
        assert "near chance" in message
        assert "data doctor" in message
    # published zero-shot accuracies of CLIP ViT-B/16 that are low, but real
    for accuracy, classes in (
        (0.4201, 10),
        (0.2367, 100),
        (0.4427, 47),
        (0.4787, 200),
        (0.75, 2),
    ):
        assert near_chance(accuracy, classes=classes, images=1000) is None
    assert near_chance(0.0, classes=1000, images=29) is None  # a handful says nothing
    assert near_chance(0.0, classes=1, images=1000) is None
    with pytest.raises(ValueError, match="between"):
        near_chance(61.5, classes=10, images=100)


@pytest.mark.parametrize(
    ("right", "images", "classes"), [(0, 9, 3), (61, 300, 10), (300, 300, 2)]
)
def test_chance_is_an_exact_binomial_test(
    right: int, images: int, classes: int
) -> None:
    expected = binomtest(right, images, 1 / classes, alternative="greater").pvalue
    assert chance_p_value(right, images, classes=classes) == pytest.approx(
        expected, rel=1e-9
    )


def test_one_class_is_no_evidence_of_anything() -> None:
    assert chance_p_value(right=10, images=10, classes=1) == 1.0
