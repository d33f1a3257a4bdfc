"""The oracle against hand-computed cases, numpy, finite differences and identities."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip
from tests._helpers.tiny_world import TINY_IMAGES
from tests._helpers.tolerance import ADAPTED, STEP, SUM, assert_near
from tests.reference import scap_equations as eq
from tests.reference.scap_equations import ReferenceSettings
from tests.reference.scap_reference import ReferenceResult, ReferenceSCAP

ONE_TEMPLATE = ClassPrompts(TINY_NAMES)
SETTINGS = ReferenceSettings(threshold=0.9)


@pytest.fixture(scope="module")
def model() -> CLIP:
    return build_tiny_clip().double()


@pytest.fixture(scope="module")
def prefix() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(1, 1, 2, 32, generator=generator, dtype=torch.float64) * 2 - 1


@pytest.fixture(scope="module")
def context(model: CLIP) -> Tensor:
    return model.context("a photo of a")


def scap(model: CLIP, prefix: Tensor, context: Tensor, **changes: Any) -> ReferenceSCAP:
    """A reference on one template with some settings changed."""
    return ReferenceSCAP(model, ONE_TEMPLATE, replace(SETTINGS, **changes), prefix, context)


def directions(*degrees: float) -> Tensor:
    """Unit vectors of the plane."""
    return torch.tensor(
        [[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees],
        dtype=torch.float64,
    )


def members(cliques: list[eq.Clique], i: int) -> list[list[int]]:
    return [sorted(C) for c, C in cliques if c == i]


# --- mine ---------------------------------------------------------------------------------------


def test_mine_collects_rows_not_graph_cliques() -> None:
    # Within 30 degrees of row 0: {0, 1}; of row 1: all; of row 2: {1, 2}. 0 and 2 are 50 apart.
    features = directions(0, 25, 50)
    cliques = eq.mine(features, [[4], [4], [4]], math.cos(math.radians(30)))
    assert cliques == [(4, frozenset({0, 1})), (4, frozenset({0, 1, 2})), (4, frozenset({1, 2}))]


def test_mine_sorts_classes_drops_duplicates_and_singletons() -> None:
    features = directions(0, 5, 90, 95, 0)
    top = [[7, 2], [7], [7, 2], [7, 3], [2]]
    cliques = eq.mine(features, top, 0.9)
    # Class 2 holds images 0, 2 and 4; class 3 one image; class 7 two groups of two.
    assert cliques == [(2, frozenset({0, 4})), (7, frozenset({0, 1})), (7, frozenset({2, 3}))]
    doubled = eq.mine(features, top, 0.9, repeats=True)
    assert members(doubled, 7) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_mine_full_set_comes_first_and_once() -> None:
    top = [[0], [0], [0, 1]]
    cliques = eq.mine(directions(0, 25, 50), top, 0.86, full_sets=True, repeats=True)
    assert members(cliques, 0) == [[0, 1, 2], [0, 1], [1, 2]]
    assert members(cliques, 1) == [[2]]


# --- learn --------------------------------------------------------------------------------------


def loss_at(reference: ReferenceSCAP, images: Tensor, visual: Tensor, text: Tensor) -> float:
    s = reference.settings
    features = eq.image_features(reference.model, images, visual, s.blocks)
    return float(eq.clique_loss(features, reference.text_of(text), reference.model.scale, s).total)


def slopes(loss: object, start: Tensor, coordinates: list[int]) -> list[float]:
    """Central differences of ``loss`` at ``start`` in some coordinates."""
    assert callable(loss)
    actual = []
    for c in coordinates:
        step = torch.zeros_like(start)
        step.view(-1)[c] = 1e-5
        actual.append((loss(start + step) - loss(start - step)) / 2e-5)
    return actual


def test_one_step_is_signed_by_the_slope(model: CLIP, prefix: Tensor, context: Tensor) -> None:
    reference = scap(model, prefix, context, lr=0.01)
    images = TINY_IMAGES[:3]
    P0_I, P0_T = reference.P0_I, reference.P0_T
    assert P0_I is not None and P0_T is not None
    learned = eq.learn(model, images, P0_I, P0_T, reference.text_of, reference.settings)
    assert learned.visual is not None and learned.text is not None
    picked = [0, 7, 31, 32, 50, 63]
    visual_slopes = slopes(lambda p: loss_at(reference, images, p, P0_T), P0_I, picked)
    text_slopes = slopes(lambda p: loss_at(reference, images, P0_I, p), P0_T, picked)
    for moved, start, g in (
        (learned.visual, P0_I, torch.tensor(visual_slopes, dtype=torch.float64)),
        (learned.text, P0_T, torch.tensor(text_slopes, dtype=torch.float64)),
    ):
        change = (moved - start).view(-1)[picked]
        assert g.abs().min() > 1e-6  # else this would compare noise
        torch.testing.assert_close(change, -0.01 * g / (g.abs() + 1e-8), rtol=ADAPTED, atol=STEP)
    assert float(learned.before.total) == pytest.approx(loss_at(reference, images, P0_I, P0_T))
    assert float(learned.after.total) == pytest.approx(
        loss_at(reference, images, learned.visual, learned.text)
    )
    assert learned.after.total < learned.before.total


# --- text ---------------------------------------------------------------------------------------


def test_text_mixes_learnable_and_fixed_templates(model: CLIP, context: Tensor) -> None:
    templates = ("a photo of a {}.", "a sketch of a {}.", "{} drawn.")
    prompts = ClassPrompts(TINY_NAMES, templates)
    a, b, c = (
        model.encode_text([t.replace("{}", n) for n in TINY_NAMES]).double() for t in templates
    )
    a, b, c = eq.l2_normalize(a), eq.l2_normalize(b), eq.l2_normalize(c)
    u_fix = eq.fixed_features(model, prompts)
    mixed = eq.text_features(model, prompts, context.double(), u_fix, 0.3)
    expected = eq.l2_normalize(0.7 * a + 0.3 * eq.l2_normalize((b + c) / 2))
    assert_near(mixed, expected, SUM)
    alone = eq.text_features(model, ONE_TEMPLATE, context.double(), None, 0.9)
    assert_near(alone, a, SUM)


# --- retain -------------------------------------------------------------------------------------


def zhou_by_iteration(A: np.ndarray, sigma: float, K: int, alpha: float) -> np.ndarray:
    """The fixed point of F <- alpha S F + (1 - alpha) A, found by iterating."""
    distance = ((A[:, None] - A[None]) ** 2).sum(-1)
    W = np.exp(-distance / (2 * sigma**2))
    np.fill_diagonal(W, 0)
    edges = np.zeros_like(W)
    for row, columns in enumerate(np.argsort(-W, axis=1, kind="stable")[:, :K]):
        edges[row, columns] = W[row, columns]
    edges = np.maximum(edges, edges.T)
    degree = edges.sum(1)
    S = np.divide(edges, np.sqrt(np.outer(degree, degree)), out=np.zeros_like(W), where=edges > 0)
    out = A.copy()
    for _ in range(400):
        out = alpha * S @ out + (1 - alpha) * A
    return out


@pytest.mark.parametrize(("n", "K", "alpha"), [(7, 3, 0.3), (7, 1, 0.9), (4, 9, 0.5), (2, 2, 0.3)])
def test_propagation_is_zhou_fixed_point(n: int, K: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(n + K)
    keys = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    keys = 0.9 * eq.l2_normalize(keys + 2)
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
    # 60 and 62 degrees are fused where 60 stood; values are averaged and never propagated.
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
    settings = replace(SETTINGS, clique_combination=cliques, retained_combination=retained)
    composed = eq.compose([prompt(1, 0), prompt(2, 0)], [prompt(4, 0)], settings)
    assert composed is not None and composed[:, 0, 0].tolist() == expected
    only = eq.compose([], [prompt(4, 0)], settings)
    assert only is not None and only[:, 0, 0].tolist() == alone


# --- the stream ---------------------------------------------------------------------------------


def first_shared(result: ReferenceResult) -> tuple[int, int]:
    """An (image, class) with cliques and a retained prompt."""
    return next(
        where for where, (own, retained) in result.used.items() if own and retained is not None
    )


def test_prediction_recomputed_by_hand(model: CLIP, prefix: Tensor, context: Tensor) -> None:
    reference = scap(model, prefix, context)
    result = reference.predict(TINY_IMAGES)
    assert len(result.cliques) > 3 and result.tau == len(result.cliques)
    texts = [t for t in result.text if t is not None]
    torch.testing.assert_close(result.text_mean, torch.stack(texts).mean(dim=0))
    j, _ = first_shared(result)
    start = eq.image_features(model, TINY_IMAGES, reference.P0_I)[j]
    probabilities = []
    for i in result.top[j]:
        parts = [
            visual
            for (c, C), visual in zip(result.cliques, result.visual, strict=True)
            if c == i and j in C and visual is not None
        ]
        entries = result.retained.get(i, [])
        if entries:
            products = [start @ key for key, _ in entries]
            parts.append(entries[int(torch.stack(products).argmax())][1])
        image = TINY_IMAGES[j : j + 1]
        feature = eq.image_features(model, image, torch.cat(parts, dim=1) if parts else None)
        text = eq.template_features(model, ONE_TEMPLATE, "a photo of a {}.", result.text_mean)
        probabilities.append((model.scale * feature @ text.T).softmax(dim=-1)[0])
    expected = torch.stack(probabilities).mean(dim=0)
    torch.testing.assert_close(result.probabilities[j], expected)
    torch.testing.assert_close(result.logits[j].exp(), expected)


def test_text_only_never_prompts_images(model: CLIP, prefix: Tensor, context: Tensor) -> None:
    result = scap(model, prefix, context, modalities="text").predict(TINY_IMAGES)
    assert result.cliques and result.retained == {}
    assert all(visual is None for visual in result.visual)
    features = eq.image_features(model, TINY_IMAGES, None)
    text = eq.template_features(model, ONE_TEMPLATE, "a photo of a {}.", result.text_mean)
    expected = (model.scale * features @ text.T).softmax(dim=-1)
    torch.testing.assert_close(result.probabilities, expected)


def test_queries_are_features_under_the_start_prompt(
    model: CLIP, prefix: Tensor, context: Tensor
) -> None:
    # A cache that holds the image's own features of both kinds tells which one is asked with.
    reference = scap(model, prefix, context, threshold=1.5)
    image = TINY_IMAGES[:1]
    keys = [eq.image_features(model, image, prompt)[0] for prompt in (None, prefix)]
    reference.retained = {i: [(key, prefix) for key in keys] for i in range(len(TINY_NAMES))}
    assert list(reference.predict(image).used.values()) == [((), 1)] * 3
