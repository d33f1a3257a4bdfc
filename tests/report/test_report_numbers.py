"""What figures are drawn from: changes, confusion, calibration, streams, curves, features."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassCalibrationError

from cliquetta.report.changes import count_changes, moves, net_gain
from cliquetta.report.confusion import changed_confusion
from cliquetta.report.curves import find_curves
from cliquetta.report.embedding import cohesion, embed, pca, tsne
from cliquetta.report.reliability import reliability
from cliquetta.report.runs import group_runs, load_runs, shown_groups
from cliquetta.report.stream import accuracy_so_far, domain_starts
from tests._helpers.made_runs import NAMES, make_run, predictions
from tests._helpers.tolerance import DOUBLE, FEATURE, STEP

LABELS = [0, 0, 1, 1, 2, 2, 3, 3]
PLAIN = [0, 1, 1, 0, 2, 3, 3, 3]
ADAPTED = [0, 0, 1, 2, 3, 3, 3, 2]  # 1 repaired, 3 sideways, 4 broken, 7 broken


def test_changes_are_counted_by_what_became_of_them() -> None:
    pair = predictions(LABELS, PLAIN), predictions(LABELS, ADAPTED)
    changes = count_changes([pair])
    assert (changes.images, changes.changed) == (8, 4)
    assert (changes.test.repaired, changes.test.broken) == (1, 2)
    assert changes.gain == pytest.approx(-12.5)
    unknown = predictions([-1] * 8, PLAIN), predictions([-1] * 8, ADAPTED)
    both = count_changes([pair, unknown])
    assert (both.images, both.labelled, both.changed) == (16, 8, 8)
    assert both.gain == pytest.approx(-12.5)
    twice = count_changes([pair, pair])
    assert (twice.test.repaired, twice.test.broken, twice.gain) == (2, 4, pytest.approx(-12.5))  # type: ignore[comparison-overlap]
    assert twice.test.p == changes.test.p  # the same pictures again are no new evidence
    nothing = count_changes([unknown])
    assert (nothing.changed, nothing.test, nothing.gain) == (4, None, None)


def test_moves_name_both_classes() -> None:
    found = {
        (move.before, move.after): move
        for move in moves(predictions(LABELS, PLAIN), predictions(LABELS, ADAPTED))
    }
    assert set(found) == {(1, 0), (0, 2), (2, 3), (3, 2)}
    assert (found[1, 0].repaired, found[1, 0].broken) == (1, 0)
    assert (found[0, 2].repaired, found[0, 2].broken) == (0, 0)
    assert (found[2, 3].repaired, found[2, 3].broken) == (0, 1)


def test_gain_runs_along_the_stream() -> None:
    gain = net_gain(predictions(LABELS, PLAIN), predictions(LABELS, ADAPTED))
    assert gain.tolist() == [0, 1, 1, 1, 0, 0, 0, -1]


def test_other_images_are_refused() -> None:
    with pytest.raises(ValueError, match="same images"):
        count_changes([(predictions(LABELS, PLAIN), predictions(LABELS[:4], PLAIN[:4]))])


def test_confusion_is_that_of_all_answers_folded_to_the_changed_classes() -> None:
    plain, adapted = predictions(LABELS, PLAIN), predictions(LABELS, [0, 0, 1, 0, 2, 3, 3, 3])
    found = changed_confusion(plain, adapted)
    assert found.classes == (0, 1)
    # label 0: one of two answers moves from 1 to 0; labels 2 and 3 are the row "other"
    assert found.before.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 4]]
    assert found.difference.tolist() == [[1, -1, 0], [0, 0, 0], [0, 0, 0]]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40), st.integers(1, 4))
def test_confusion_keeps_every_answer(rows: Any, limit: Any) -> None:
    labels, before, after = (list(column) for column in zip(*rows, strict=True))
    found = changed_confusion(predictions(labels, before), predictions(labels, after), limit)
    assert found.before.sum() == found.after.sum() == len(rows)
    assert found.difference.sum(axis=1).tolist() == [0] * (len(found.classes) + 1)
    assert len(found.classes) <= limit


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.26, 0.999)), min_size=1, max_size=60))
def test_calibration_error_is_that_of_torchmetrics(rows: Any) -> None:
    labels = [label for label, _ in rows]
    logits = torch.zeros(len(rows), 4)
    logits[:, 1] = torch.tensor([3 * p / (1 - p) for _, p in rows]).log()
    made = predictions(labels, [1] * len(rows))
    probabilities = logits.softmax(dim=-1)
    found = reliability(
        type(made)(made.keys, made.labels, made.classes, probabilities[:, [1]].numpy())
    )
    metric = MulticlassCalibrationError(4, n_bins=15, norm="l1")
    wanted = float(metric(probabilities, torch.tensor(labels)))
    assert found.error == pytest.approx(wanted, abs=FEATURE)
    assert found.count.sum() == len(rows)


def test_accuracy_so_far_passes_over_unknown_labels() -> None:
    found = accuracy_so_far(predictions([-1, 0, 0, -1, 1], [0, 0, 1, 1, 1]))
    assert np.isnan(found[0])
    assert found[1:].tolist() == [100, 50, 50, pytest.approx(200 / 3)]


def test_domains_begin_where_keys_change() -> None:
    keys = ("a/1", "a/2", "a@fog:3/1", "a/3")
    assert domain_starts(keys, ["a", "a@fog:3", "a"]) == [(0, "a"), (2, "a@fog:3"), (3, "a")]
    assert domain_starts(keys, ["a"]) == []


@pytest.fixture
def ablation(tmp_path: Path) -> Any:
    """One-at-a-time runs around threshold 0.8, lambda 1, batch size 4; two seeds at the centre."""
    base = {"threshold": 0.8, "concentration": 1.0, "modalities": "both", "retention": True}
    right = [LABELS[:keep] + [(label + 1) % 4 for label in LABELS[keep:]] for keep in range(9)]
    make_run(tmp_path, "zero_shot", LABELS, right[3])
    make_run(tmp_path, "scap", LABELS, right[6], config=base)
    make_run(tmp_path, "scap", LABELS, right[4], config=base, seed=1)
    make_run(tmp_path, "scap", LABELS, right[2], config=base | {"threshold": 0.6})
    make_run(tmp_path, "scap", LABELS, right[5], config=base | {"threshold": 0.9})
    make_run(tmp_path, "scap", LABELS, right[7], config=base, batch_size=8)
    make_run(tmp_path, "scap", LABELS, right[1], config=base | {"modalities": "text"})
    make_run(tmp_path, "scap", LABELS, right[2], config=base | {"retention": False})
    # differs in two fields, so that it belongs on no curve
    both = base | {"threshold": 0.7, "concentration": 3.0}
    make_run(tmp_path, "scap", LABELS, right[8], config=both)
    return load_runs([tmp_path])[0]


def test_curves_vary_one_setting_and_nothing_else(ablation: Any) -> None:
    curves = {curve.field: curve for curve in find_curves(ablation)}
    assert set(curves) == {"threshold", "batch_size", "components"}
    threshold = curves["threshold"]
    assert [point.value for point in threshold.points] == [0.6, 0.8, 0.9]
    assert [sorted(point.top1) for point in threshold.points] == [[25], [50, 75], [62.5]]
    assert threshold.default == 0.8 and threshold.baseline == pytest.approx(37.5)
    assert threshold.points[1].mean == 62.5
    assert threshold.points[1].sd == pytest.approx(np.std([50, 75], ddof=1))
    batch = curves["batch_size"]
    assert [(point.value, max(point.top1)) for point in batch.points] == [(4, 75), (8, 87.5)]
    components = curves["components"]
    assert [point.value for point in components.points] == [
        "image + text",
        "text + retention",
        "image + text + retention",
    ]


def test_groups_hold_runs_over_the_same_images(ablation: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "more", "scap", LABELS, PLAIN, dataset="toy@snow:1")
    make_run(tmp_path / "more", "tent", LABELS[:4], PLAIN[:4])
    runs = [*ablation, *load_runs([tmp_path / "more"])[0]]
    groups = group_runs(runs)
    assert sorted(len(group.runs) for group in groups) == [1, 1, 9]
    large = max(groups, key=lambda group: len(group.runs))
    assert large.baseline.plain and large.runs[0].plain
    labels = large.labels
    assert len(set(labels.values())) == 9  # told apart by what differs
    assert "scap" in labels[large.adapted[0].id] and "threshold" in labels[large.adapted[0].id]


def test_figures_show_one_run_per_method_with_its_usual_settings(
    ablation: Any, tmp_path: Path
) -> None:
    make_run(tmp_path / "more", "scap", LABELS, PLAIN, dataset="toy@snow:1", seed=2)
    make_run(tmp_path / "more", "tent", LABELS[::-1], PLAIN[::-1], seed=5)
    make_run(tmp_path / "more", "tent", LABELS, PLAIN, seed=4)
    runs = [*ablation, *load_runs([tmp_path / "more"])[0]]
    fog, snow = sorted(shown_groups(runs), key=lambda group: group.dataset)
    assert [run.record.method for run in fog.runs] == ["zero_shot", "scap", "tent"]
    assert fog.runs[1].record.settings["config"]["threshold"] == 0.8
    assert fog.runs[1].metric("top1") == 75  # the first seed
    assert [run.record.seed for run in snow.runs] == [2]


def test_class_names_are_numbers_where_nobody_knows_them(tmp_path: Path) -> None:
    first = make_run(tmp_path, "dmn", LABELS, PLAIN)
    (run,), _ = load_runs([first])
    assert run.names == tuple(f"class {label}" for label in range(4))
    second = make_run(tmp_path, "scap", LABELS, PLAIN)
    (second / "evidence").mkdir()
    about = {"format": "cliquetta-evidence-1", "names": list(NAMES)}
    (second / "evidence" / "about.json").write_text(json.dumps(about))
    runs, _ = load_runs([first, second])
    assert [run.names for run in runs] == [NAMES, NAMES]  # one that knows is enough


def test_pca_is_the_eigenvectors_of_the_covariance() -> None:
    features = np.random.default_rng(0).normal(size=(60, 7)) * np.array([5, 1, 3, 1, 1, 1, 0.5])
    points, share = pca(features)
    values, vectors = np.linalg.eigh(np.cov(features.T))
    assert share == pytest.approx(values[-2:].sum() / values.sum())
    wanted = (features - features.mean(axis=0)) @ vectors[:, [-1, -2]]
    for column in range(2):
        sign = np.sign(points[0, column] * wanted[0, column])
        np.testing.assert_allclose(points[:, column], sign * wanted[:, column], atol=STEP)
    again, _ = pca(features[:, ::-1])
    np.testing.assert_allclose(np.abs(again), np.abs(points), atol=STEP)


def test_cohesion_by_hand() -> None:
    """Two classes on the axes, one image between them."""
    features = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    centres = np.array([[1.0, 0.0], np.array([0.6, 1.8]) / np.hypot(0.6, 1.8)])
    cosines = features @ centres.T
    wanted = [cosines[0, 0] - cosines[0, 1]] * 2 + [
        cosines[2, 1] - cosines[2, 0],
        cosines[3, 1] - cosines[3, 0],
    ]
    assert cohesion(features, np.array([0, 0, 1, 1])) == pytest.approx(np.mean(wanted))
    assert np.isnan(cohesion(features, np.zeros(4, int)))


def test_tsne_starts_from_principal_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """openTSNE is not part of the development environment: what it is asked for is checked."""
    asked = {}

    class TSNE:
        def __init__(self, **settings: Any) -> None:
            asked.update(settings)

        def fit(self, features: Any) -> Any:
            return asked["initialization"] + 1

    monkeypatch.setitem(sys.modules, "openTSNE", types.SimpleNamespace(TSNE=TSNE))
    features = np.random.default_rng(1).normal(size=(30, 5))
    points = tsne(features)
    assert asked["random_state"] == 0 and asked["metric"] == "cosine"
    assert 2 <= asked["perplexity"] <= 29 / 3
    assert asked["initialization"][:, 0].std() == pytest.approx(1e-4)
    np.testing.assert_allclose(points - 1, asked["initialization"], atol=DOUBLE)


def test_an_unknown_map_is_refused_and_missing_evidence_gives_none() -> None:
    empty = types.SimpleNamespace(batches=())
    assert embed(empty) is None  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="tsne"):
        embed(empty, "tnse")  # type: ignore[arg-type]
