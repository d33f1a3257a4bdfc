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
    threshold = math.cos(math.radians(30))
    cliques = eq.mine(features, [[4], [4], [4]], threshold)

    assert cliques == [
        (4, frozenset({0, 1})),
        (4, frozenset({0, 1, 2})),
        (4, frozenset({1, 2})),
    ]


# Class 2 holds images 0, 2 and 4; class 3 one image; class 7 two groups of two.
GROUPS = directions(0, 5, 90, 95, 0)


CLASSES = [[7, 2], [7], [7, 2], [7, 3], [2]]


FIRST = (2, frozenset({0, 4}))


SECOND = (7, frozenset({0, 1}))


THIRD = (7, frozenset({2, 3}))


def test_mine_sorts_classes_and_drops_singletons_and_duplicates() -> None:
    cliques = eq.mine(GROUPS, CLASSES, 0.9)
    assert cliques == [FIRST, SECOND, THIRD]


def test_mine_keeps_duplicates_if_asked() -> None:
    cliques = eq.mine(GROUPS, CLASSES, 0.9, repeats=True)
    assert cliques == [FIRST, FIRST, SECOND, SECOND, THIRD, THIRD]


def test_mine_begins_with_all_images_of_a_class_if_asked() -> None:
    cliques = eq.mine(GROUPS, CLASSES, 0.9, full_sets=True)
    assert cliques == [
        (2, frozenset({0, 2, 4})),
        FIRST,
        (3, frozenset({3})),
        (7, frozenset({0, 1, 2, 3})),
        SECOND,
        THIRD,
    ]


# --- learn --------------------------------------------------------------------------------------


def test_one_step_is_signed_by_the_slope() -> None:
    model = build_tiny_clip().double()
    images = TINY_IMAGES[:3]
    settings = replace(SETTINGS, lr=0.01)
    visual = draw(1, 1, 2, 32)
    text = model.context("a photo of a")

    def text_of(context: Any) -> Tensor:
        return eq.text_features(model, ONE_TEMPLATE, context, None, 0.0)

    def loss_at(visual: Tensor, text: Tensor) -> float:
        features = eq.image_features(model, images, visual)
        losses = eq.clique_loss(features, text_of(text), model.scale, settings)
        return float(losses.total)

    def step_along(slopes: list[float]) -> Tensor:
        """Adam's first step."""
        gradient = torch.tensor(slopes).double()
        assert gradient.abs().min() > 1e-6  # else this would compare noise
        return -0.01 * gradient / (gradient.abs() + 1e-8)

    learned = eq.learn(model, images, visual, text, text_of, settings)
    assert learned.visual is not None
    assert learned.text is not None

    picked = [0, 7, 31, 32, 50, 63]
    slopes_of_visual = []
    slopes_of_text = []
    for index in picked:
        # central differences
        nudge = torch.zeros_like(visual)
        nudge.view(-1)[index] = 1e-5
        rise = loss_at(visual + nudge, text) - loss_at(visual - nudge, text)
        slopes_of_visual.append(rise / 2e-5)

        nudge = torch.zeros_like(text)
        nudge.view(-1)[index] = 1e-5
        rise = loss_at(visual, text + nudge) - loss_at(visual, text - nudge)
        slopes_of_text.append(rise / 2e-5)

    near: dict[str, Any] = {"rtol": ADAPTED, "atol": STEP}
    moved = (learned.visual - visual).view(-1)[picked]

    torch.testing.assert_close(moved, step_along(slopes_of_visual), **near)
    moved = (learned.text - text).view(-1)[picked]
    torch.testing.assert_close(moved, step_along(slopes_of_text), **near)
    before = float(learned.before.total)
    after = float(learned.after.total)

    assert before == pytest.approx(loss_at(visual, text))
    assert after == pytest.approx(loss_at(learned.visual, learned.text))
    assert after < before


# --- retain -------------------------------------------------------------------------------------


def zhou_by_iteration(A: np.ndarray, sigma: float, K: int, alpha: float) -> np.ndarray:
    """The fixed point of F <- alpha S F + (1 - alpha) A, by iterating."""
    differences = A[:, None] - A[None]
    squared = (differences**2).sum(-1)
    W = np.exp(-squared / (2 * sigma**2))
    np.fill_diagonal(W, 0)

    # the K largest of each row, made symmetric
    edges = np.zeros_like(W)
    order = np.argsort(-W, axis=1, kind="stable")
    for row, columns in enumerate(order):
        nearest = columns[:K]
        edges[row, nearest] = W[row, nearest]
    edges = np.maximum(edges, edges.T)

    # normalised; images without an edge divide nothing by nothing
    degree = edges.sum(1)
    norm = np.sqrt(np.outer(degree, degree))
    S = np.zeros_like(W)
    np.divide(edges, norm, out=S, where=edges > 0)

    out = A.copy()
    for _ in range(400):
        spread = S @ out
        out = alpha * spread + (1 - alpha) * A
    return out


@pytest.mark.parametrize(
    ("n", "K", "alpha"), [(7, 3, 0.3), (7, 1, 0.9), (4, 9, 0.5), (2, 2, 0.3)]
)
def test_propagation_is_zhou_fixed_point(n: int, K: int, alpha: float) -> None:
    keys = 0.9 * eq.l2_normalize(draw(n, 5, seed=n + K) + 2)
    settings = ReferenceSettings(neighbours=K, propagation=alpha)
    moved = eq.propagate(keys, settings)
    expected = zhou_by_iteration(keys.numpy(), sigma=0.3, K=K, alpha=alpha)

    torch.testing.assert_close(moved, torch.from_numpy(expected))
    # not only their lengths
    before = eq.l2_normalize(keys)
    after = eq.l2_normalize(moved)

    assert not torch.allclose(after, before, atol=1e-3)


@pytest.mark.parametrize("raw_keys", [True, False])
def test_retain_fuses_the_closest_pair_at_the_lower_index(raw_keys: bool) -> None:
    settings = replace(SETTINGS, capacity=3, raw_keys=raw_keys)
    keys = directions(0, 60, 120, 62)
    entries: list[eq.Entry] = []
    for number, key in enumerate(keys):
        value = torch.full((1, 2, 4), float(number))
        entries = eq.retain(entries, key, value, settings)
        assert len(entries) == min(number + 1, 3)

    # 60 and 62 degrees are fused where 60 stood; values are averaged and never
    # propagated.
    values = [float(value[0, 0, 0]) for _, value in entries]

    assert values == [0.0, (1.0 + 3.0) / 2, 2.0]

    source = keys if raw_keys else eq.propagate(keys, settings)
    fused = (source[1] + source[3]) / 2
    expected = torch.stack([source[0], fused, source[2]])
    actual = torch.stack([key for key, _ in entries])

    torch.testing.assert_close(actual, expected)


def composed(cliques: list[float], retained: list[float], **options: Any) -> Any:
    """Keys of the prompt of one pass, where keys of prompts are these numbers."""
    settings = replace(SETTINGS, **options)
    of_cliques = [prompt(key, 0) for key in cliques]
    of_retained = [prompt(key, 0) for key in retained]
    tokens = eq.compose(of_cliques, of_retained, settings)

    assert tokens is not None

    keys = tokens[:, 0, 0]
    return keys.tolist()


# --- infer --------------------------------------------------------------------------------------


def prompt(key: float, value: float) -> Tensor:
    return torch.tensor([[[float(key)], [float(value)]]])


@pytest.mark.parametrize(
    ("cliques", "retained", "expected"),
    [
        ("mean", "mean", [2.75]),
        ("mean", "concat", [1.5, 4]),
        ("concat", "mean", [2.5, 3]),
        ("concat", "concat", [1, 2, 4]),
    ],
)
def test_compose_means(cliques: str, retained: str, expected: list[float]) -> None:
    options = {"clique_combination": cliques, "retained_combination": retained}
    assert composed([1, 2], [4], **options) == expected
    assert composed([], [4], **options) == [4]
