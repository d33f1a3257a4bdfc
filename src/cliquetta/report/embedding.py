"""Maps of image features, plain and with attribute prompts."""

import importlib.util
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.evidence_log import Evidence
from cliquetta.report.style import FAINT, PAPER, Figure, line_look, new_figure

Array = npt.NDArray[np.float64]
How = Literal["auto", "pca", "tsne"]
MAPS: tuple[How, ...] = ("auto", "pca", "tsne")
CLASSES = 10  # classes with a marker of their own; the rest is grey


@dataclass(frozen=True, eq=False)
class Embedding:
    """Images in the plane, plain and prompted in the same axes."""

    plain: Array  # (n, 2)
    prompted: Array
    labels: npt.NDArray[np.int64]
    how: str  # what made the map, in words
    cohesion: tuple[float, float]  # plain and prompted; of the features, not of the map


def pca(features: Array) -> tuple[Array, float]:
    """Project on the two directions of largest variance (n, 2); also return their share of it.

    Signs are fixed: the largest entry of a direction is positive.
    """
    centred = features - features.mean(axis=0)
    _, scale, directions = np.linalg.svd(centred, full_matrices=False)
    directions = directions[:2]

    # A singular vector has no sign of its own.
    largest = np.abs(directions).argmax(axis=1)
    entries = directions[np.arange(len(directions)), largest]
    directions *= np.sign(entries)[:, None]

    variance = scale**2
    share = variance[:2].sum() / max(variance.sum(), 1e-12)
    return centred @ directions.T, float(share)


def tsne(features: Array) -> Array:
    """Run openTSNE's t-SNE in the plane (n, 2), from the first two principal components."""
    from openTSNE import TSNE

    points, _ = pca(features)
    spread = max(float(points[:, 0].std()), 1e-12)
    start = points / spread * 1e-4
    # openTSNE wants fewer neighbours than a third of the points.
    perplexity = max(2.0, min(30.0, (len(features) - 1) / 3))
    fitted = TSNE(
        perplexity=perplexity,
        metric="cosine",
        initialization=start,
        random_state=0,
        n_jobs=1,
    ).fit(features)
    return np.asarray(fitted, dtype=np.float64)


def cohesion(features: Array, labels: npt.NDArray[np.int64]) -> float:
    """Average over images the cosine to the own class's centre minus that to the nearest other."""
    present, owner = np.unique(labels, return_inverse=True)
    if len(present) < 2:
        return float("nan")
    # A centre is the direction of the sum of its features.
    sums = np.zeros((len(present), features.shape[1]))
    np.add.at(sums, owner, features)
    centres = sums / np.linalg.norm(sums, axis=1, keepdims=True)

    cosines = features @ centres.T  # (images, classes)
    images = np.arange(len(owner))
    to_owner = cosines[images, owner]
    cosines[images, owner] = -np.inf
    to_nearest_other = cosines.max(axis=1)
    return float((to_owner - to_nearest_other).mean())


def embed(evidence: Evidence, how: How = "auto") -> Embedding | None:
    """Map all images shown in full; ``None`` where no prompted features were stored.

    ``auto`` takes t-SNE if openTSNE is installed, else PCA.
    """
    if how not in MAPS:
        raise UnknownNameError("map", how, MAPS)
    available = importlib.util.find_spec("openTSNE") is not None
    batches = []
    prompted_parts = []
    for batch in evidence.batches:
        if batch.prompted is not None:
            batches.append(batch)
            prompted_parts.append(batch.prompted)
    if not batches:
        return None
    if how == "tsne" and not available:
        raise UserError(
            "a t-SNE map needs openTSNE: pip install 'cliquetta[tsne]', or take pca"
        )

    plain_parts = [batch.features for batch in batches]
    both = np.concatenate([*plain_parts, *prompted_parts]).astype(np.float64)
    plain, prompted = np.split(both, 2)
    images = len(plain)
    if images < 3:
        return None

    # Where no image has a label, what the method predicted takes its place.
    labels = np.concatenate([batch.labels for batch in batches])
    if (labels < 0).all():
        labels = np.concatenate([batch.after for batch in batches])

    if how == "pca" or not available:
        points, share = pca(both)
        words = f"PCA, {100 * share:.0f} % of the variance"
    else:
        points = tsne(both)
        words = "t-SNE (openTSNE)"

    labelled = labels >= 0
    before = cohesion(plain[labelled], labels[labelled])
    after = cohesion(prompted[labelled], labels[labelled])
    return Embedding(
        plain=points[:images],
        prompted=points[images:],
        labels=labels,
        how=words,
        cohesion=(before, after),
    )


def embedding_figure(embedding: Embedding, names: tuple[str, ...]) -> Figure:
    """Draw two panels in the same axes, a marker and a colour per class."""
    # The most frequent classes have colours; -1 is no class.
    frequent = Counter(embedding.labels.tolist()).most_common(CLASSES)
    shown = sorted(label for label, _ in frequent if label >= 0)
    with new_figure(7.2, 3.9) as figure:
        axes = figure.subplots(1, 2, sharex=True, sharey=True)
        panels = (
            ("plain CLIP", embedding.plain),
            ("with attribute prompts", embedding.prompted),
        )
        for panel, (title, points) in enumerate(panels):
            area = axes[panel]
            others = ~np.isin(embedding.labels, shown)
            if others.any():
                x, y = points[others].T
                area.scatter(x, y, s=8, color=FAINT, alpha=0.5, linewidths=0)
            for turn, label in enumerate(shown):
                x, y = points[embedding.labels == label].T
                look = line_look(turn)
                area.scatter(
                    x,
                    y,
                    s=26,
                    label=names[label] if panel == 0 else None,
                    color=look["color"],
                    marker=look["marker"],
                    edgecolors=PAPER,
                    linewidths=0.4,
                )
            area.set(title=title, xticks=[], yticks=[])
            area.set_xlabel(f"cohesion {embedding.cohesion[panel]:.4f}")
            area.grid(False)
        figure.legend(loc="outside lower center", ncols=min(5, max(1, len(shown))))
    return figure
