"""The oracle against hand-computed cases, numpy, finite differences and identities."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip
from tests._helpers.tiny_world import TINY_IMAGES, draw
from tests._helpers.tolerance import ADAPTED, STEP
from tests.reference import scap_equations as eq
from tests.reference.scap_equations import ReferenceSettings

ONE_TEMPLATE = ClassPrompts(TINY_NAMES)
SETTINGS = ReferenceSettings(threshold=0.9)


def directions(*degrees: float) -> Tensor:
    """Unit vectors of the plane."""
    angles = torch.tensor(degrees).double().deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


# --- mine ---------------------------------------------------------------------------------------


def test_mine_collects_rows_not_graph_cliques() -> None:
    # Within 30 degrees of row 0: {0, 1}; of row 1: all; of row 2: {1, 2}. 0 and 2 are
    # 50 apart.
    features = directions(0, 25, 50)
    cliques = eq.mine(features, [[4], [4], [4]], math.cos(math.radians(30)))
    assert cliques == [
        (4, frozenset({0, 1})),
        (4, frozenset({0, 1, 2})),
        (4, frozenset({1, 2})),
    ]


def test_mine_sorts_classes_and_drops_singletons_and_duplicates_unless_asked() -> None:
    features = directions(0, 5, 90, 95, 0)
    top = [[7, 2], [7], [7, 2], [7, 3], [2]]
    cliques = eq.mine(features, top, 0.9)
    # Class 2 holds images 0, 2 and 4; class 3 one image; class 7 two groups of two.
    a = (2, frozenset({0, 4}))
    b = (7, frozenset({0, 1}))
    c = (7, frozenset({2, 3}))
    assert cliques == [a, b, c]
    assert eq.mine(features, top, 0.9, repeats=True) == [a, a, b, b, c, c]
    full = eq.mine(features, top, 0.9, full_sets=True)
    sets = (2, frozenset({0, 2, 4})), (3, frozenset({3})), (7, frozenset({0, 1, 2, 3}))
    assert full == [sets[0], a, sets[1], sets[2], b, c]


# --- learn --------------------------------------------------------------------------------------


def test_one_step_is_signed_by_the_slope() -> None:
    model = build_tiny_clip().double()
    images = TINY_IMAGES[:3]
    settings = replace(SETTINGS, lr=0.01)
    prompts = ClassPrompts(TINY_NAMES)
    start = (draw(1, 1, 2, 32), model.context("a photo of a"))

    def text_of(context: Any) -> Tensor:
        return eq.text_features(model, prompts, context, None, 0.0)

    def loss_at(visual: Tensor, text: Tensor) -> float:
        features = eq.image_features(model, images, visual)
        return float(
            eq.clique_loss(features, text_of(text), model.scale, settings).total
        )

    learned = eq.learn(model, images, *start, text_of, settings)
    picked = [0, 7, 31, 32, 50, 63]
    for index, moved in enumerate((learned.visual, learned.text)):
        slopes = []
        for c in picked:  # central differences
            step = [torch.zeros_like(part) for part in start]
            step[index].view(-1)[c] = 1e-5
            ahead = [part + own for part, own in zip(start, step, strict=True)]
            back = [part - own for part, own in zip(start, step, strict=True)]
            slopes.append((loss_at(*ahead) - loss_at(*back)) / 2e-5)
        g = torch.tensor(slopes).double()
        change = (moved - start[index]).view(-1)[picked]
        assert g.abs().min() > 1e-6  # else this would compare noise
        torch.testing.assert_close(
            change, -0.01 * g / (g.abs() + 1e-8), rtol=ADAPTED, atol=STEP
        )
    losses = float(learned.before.total), float(learned.after.total)
    ends = [part for part in (learned.visual, learned.text) if part is not None]
    assert losses == pytest.approx((loss_at(*start), loss_at(*ends)))
    assert losses[1] < losses[0]


# --- retain -------------------------------------------------------------------------------------


def zhou_by_iteration(A: np.ndarray, sigma: float, K: int, alpha: float) -> np.ndarray:
    """The fixed point of F <- alpha S F + (1 - alpha) A, by iterating."""
    distance = ((A[:, None] - A[None]) ** 2).sum(-1)
    W = np.exp(-distance / (2 * sigma**2))
    np.fill_diagonal(W, 0)
    edges = np.zeros_like(W)
    for row, columns in enumerate(np.argsort(-W, axis=1, kind="stable")[:, :K]):
        edges[row, columns] = W[row, columns]
    edges = np.maximum(edges, edges.T)
    degree = edges.sum(1)
    S = np.divide(
        edges, np.sqrt(np.outer(degree, degree)), out=np.zeros_like(W), where=edges > 0
    )
    out = A.copy()
    for _ in range(400):
        out = alpha * S @ out + (1 - alpha) * A
    return out


@pytest.mark.parametrize(
    ("n", "K", "alpha"), [(7, 3, 0.3), (7, 1, 0.9), (4, 9, 0.5), (2, 2, 0.3)]
)
def test_propagation_is_zhou_fixed_point(n: int, K: int, alpha: float) -> None:
    keys = 0.9 * eq.l2_normalize(draw(n, 5, seed=n + K) + 2)
    settings = ReferenceSettings(neighbours=K, propagation=alpha)
    moved = eq.propagate(keys, settings)
    expected = torch.from_numpy(zhou_by_iteration(keys.numpy(), 0.3, K, alpha))
    torch.testing.assert_close(moved, expected)
    assert not torch.allclose(eq.l2_normalize(moved), eq.l2_normalize(keys), atol=1e-3)


@pytest.mark.parametrize("raw_keys", [True, False])
def test_retain_fuses_the_closest_pair_at_the_lower_index(raw_keys: bool) -> None:
    settings = replace(SETTINGS, capacity=3, raw_keys=raw_keys)
    keys = directions(0, 60, 120, 62)
    entries: list[eq.Entry] = []
    for n, key in enumerate(keys):
        entries = eq.retain(entries, key, torch.full((1, 2, 4), float(n)), settings)
        assert len(entries) == min(n + 1, 3)
    # 60 and 62 degrees are fused where 60 stood; values are averaged and never
    # propagated.
    assert [float(value[0, 0, 0]) for _, value in entries] == [0.0, 2.0, 2.0]
    moved = eq.propagate(keys, settings)
    source = keys if raw_keys else moved
    expected = torch.stack([source[0], (source[1] + source[3]) / 2, source[2]])
    torch.testing.assert_close(torch.stack([key for key, _ in entries]), expected)


# --- infer --------------------------------------------------------------------------------------


def prompt(key: float, value: float) -> Tensor:
    return torch.tensor([[[float(key)], [float(value)]]])


@pytest.mark.parametrize(
    ("cliques", "retained", "expected", "alone"),
    [
        ("mean", "mean", [2.75], [4]),
        ("mean", "concat", [1.5, 4], [4]),
        ("concat", "mean", [2.5, 3], [4]),
        ("concat", "concat", [1, 2, 4], [4]),
    ],
)
def test_compose_means(
    cliques: Any, retained: Any, expected: list[float], alone: list[float]
) -> None:
    settings = replace(
        SETTINGS, clique_combination=cliques, retained_combination=retained
    )
    composed = eq.compose([prompt(1, 0), prompt(2, 0)], [prompt(4, 0)], settings)
    assert composed is not None
    assert composed[:, 0, 0].tolist() == expected
    only = eq.compose([], [prompt(4, 0)], settings)
    assert only is not None
    assert only[:, 0, 0].tolist() == alone
