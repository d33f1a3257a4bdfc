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
    z, y = logits.double().numpy(), labels.numpy()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ranked = np.argsort(-z, axis=1)
    right = ranked[:, 0] == y
    confidence = p.max(1)
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [
        (bin_of == b).mean()
        * abs(right[bin_of == b].mean() - confidence[bin_of == b].mean())
        for b in range(bins)
        if (bin_of == b).any()
    ]
    best, classes = ranked[:, 0], np.unique(y)
    hits = [2 * (right & (y == c)).sum() for c in classes]
    f1 = [
        hit / ((y == c).sum() + (best == c).sum())
        for hit, c in zip(hits, classes, strict=True)
    ]
    return {
        "macro_f1": 100 * np.mean(f1),
        "top1": 100 * right.mean(),
        "top5": 100 * (ranked[:, :5] == y[:, None]).any(1).mean(),
        "mean_class": 100 * np.mean([right[y == c].mean() for c in np.unique(y)]),
        "ece": 100 * sum(gaps),
        "nll": -np.log(p[np.arange(len(y)), y]).mean(),
    }


@pytest.mark.parametrize("bins", [15, 20])
def test_scores_equal_their_definitions(bins: int) -> None:
    logits, labels = made_up()
    metrics = Metrics(7, bins=bins)
    for rows in torch.arange(200).split(32):
        metrics.update(logits[rows], labels[rows])
    result = metrics.compute()
    for name, value in by_hand(logits, labels, bins).items():
        assert result[name] == pytest.approx(value, abs=100 * SUM), name
    assert (result["labelled"], result["ece_bins"]) == (200, bins)
    right = logits.argmax(1) == labels
    recall = [100 * right[labels == c].float().mean().item() for c in range(6)]
    assert result["per_class"] == [
        *(pytest.approx(value) for value in recall),
        None,
    ]  # absent
    assert metrics.accuracy == pytest.approx(result["top1"])


def test_auroc_and_fpr95_by_hand() -> None:
    known, outside = torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([0.7, 0.5, 0.1])
    # pairs that the known image wins: 3 + 3 + 2 + 1, and one tie
    assert auroc(known, outside) == pytest.approx((9 + 0.5) / 12)
    assert fpr95(known, outside) == pytest.approx(2 / 3)  # 4 of 4 pass at 0.5
    many = torch.arange(100) / 100
    assert fpr95(many, torch.tensor([0.04, 0.05, 0.06])) == pytest.approx(
        2 / 3
    )  # 95 pass at 0.05
    assert auroc(known, known) == 0.5


def test_images_outside_the_list_enter_the_open_set_scores_only() -> None:
    logits, labels = made_up()
    mixed = labels.clone()
    mixed[::4] = -2
    metrics, plain = Metrics(7), Metrics(7)
    for rows in torch.arange(200).split(32):
        metrics.update(logits[rows], mixed[rows])
    resumed = Metrics(7)
    resumed.update(logits, labels)  # must be forgotten
    resumed.load_state_dict(metrics.state_dict())
    result = resumed.compute()
    plain.update(logits[mixed >= 0], labels[mixed >= 0], [150])
    scores = logits.softmax(1).amax(1)
    inside, outside = scores[mixed >= 0].numpy(), scores[mixed == -2].numpy()
    wins = np.greater.outer(inside, outside).mean()
    assert result.pop("auroc") == pytest.approx(100 * wins)
    threshold = max(t for t in inside if (inside >= t).mean() >= 0.95)
    assert result.pop("fpr95") == pytest.approx(100 * (outside >= threshold).mean())
    assert result.pop("outside") == 50
    expected = plain.compute()
    assert result.pop("per_class") == expected.pop("per_class")
    assert result == pytest.approx(expected, abs=100 * SUM)


def test_unknown_labels_do_not_count_and_without_others_there_are_no_scores() -> None:
    logits, labels = made_up()
    masked = labels.clone()
    masked[::3] = -1
    partial, plain = Metrics(7), Metrics(7)
    partial.update(logits, torch.full((200,), -1))
    partial.update(torch.randn(0, 7), torch.zeros(0, dtype=torch.long))
    assert partial.compute() == {"labelled": 0} and partial.accuracy is None
    partial.update(logits, masked)
    plain.update(logits[masked >= 0], labels[masked >= 0])
    assert partial.compute() == plain.compute()


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_few_classes_are_scored_too(classes: int) -> None:
    metrics = Metrics(classes)
    metrics.update(5 * torch.eye(classes), torch.arange(classes))
    result = metrics.compute()
    assert result["top1"] == result["top5"] == 100
    assert result["per_class"] == [100] * classes
    with pytest.raises(ValueError, match="fit"):
        metrics.update(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))


def test_batches_counted_together_score_the_same_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 9 * torch.randn(97, 6, generator=generator)
    labels = torch.randint(-1, 6, (97,), generator=generator)
    labels[20:30] = -1  # a batch without labels
    one, all_ = Metrics(6), Metrics(6)
    for part in zip(logits.split(10), labels.split(10), strict=True):
        one.update(*part)
    all_.update(logits, labels, [10] * 9 + [7])
    assert one.compute() == all_.compute()


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
        assert "near chance" in message and "data doctor" in message
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
