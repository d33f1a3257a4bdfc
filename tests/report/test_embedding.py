"""Maps of features: PCA, t-SNE and cohesion."""

import sys
import types
from typing import Any

import numpy as np
import pytest

from cliquetta.report.embedding import cohesion, embed, pca, tsne
from tests._helpers.tolerance import DOUBLE, STEP


def test_pca_is_the_eigenvectors_of_the_covariance() -> None:
    features = np.random.default_rng(0).normal(size=(60, 7)) * np.array(
        [5, 1, 3, 1, 1, 1, 0.5]
    )
    points, share = pca(features)
    values, vectors = np.linalg.eigh(np.cov(features.T))
    assert share == pytest.approx(values[-2:].sum() / values.sum())
    wanted = (features - features.mean(axis=0)) @ vectors[:, [-1, -2]]
    for column in range(2):
        sign = np.sign(points[0, column] * wanted[0, column])
        np.testing.assert_allclose(
            points[:, column], sign * wanted[:, column], atol=STEP
        )
    again, _ = pca(features[:, ::-1])
    np.testing.assert_allclose(np.abs(again), np.abs(points), atol=STEP)


def test_cohesion_by_hand() -> None:
    """Two classes on the axes, one image between them."""
    features = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    centres = np.array([[1.0, 0.0], np.array([0.6, 1.8]) / np.hypot(0.6, 1.8)])
    cosines = features @ centres.T
    wanted = (cosines[:, 0] - cosines[:, 1]) * [1, 1, -1, -1]
    assert cohesion(features, np.array([0, 0, 1, 1])) == pytest.approx(wanted.mean())
    assert np.isnan(cohesion(features, np.zeros(4, int)))


def test_tsne_starts_from_principal_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """openTSNE is not part of the development environment: its settings are checked."""
    settings: dict[str, Any] = {}

    def fake(**given: Any) -> Any:
        settings.update(given)
        return types.SimpleNamespace(fit=lambda features: given["initialization"] + 1)

    monkeypatch.setitem(sys.modules, "openTSNE", types.SimpleNamespace(TSNE=fake))
    features = np.random.default_rng(1).normal(size=(30, 5))
    points = tsne(features)
    assert settings["random_state"] == 0 and settings["metric"] == "cosine"
    assert 2 <= settings["perplexity"] <= 29 / 3
    assert settings["initialization"][:, 0].std() == pytest.approx(1e-4)
    np.testing.assert_allclose(points - 1, settings["initialization"], atol=DOUBLE)


def test_missing_evidence_gives_no_map() -> None:
    assert embed(types.SimpleNamespace(batches=())) is None  # type: ignore[arg-type]
