"""The oracle against hand-computed cases, numpy, finite differences and identities."""

from __future__ import annotations

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
from tests._helpers.tolerance import ADAPTED, FEATURE, STEP, SUM
from tests.reference import scap_equations as eq
from tests.reference.scap_reference import ReferenceResult, ReferenceSCAP, ReferenceSettings

ONE_TEMPLATE = ClassPrompts(TINY_NAMES)
SETTINGS = ReferenceSettings(threshold=0.9)


@pytest.fixture(scope="module")
def model() -> CLIP:
    return build_tiny_clip().double()


@pytest.fixture(scope="module")
def prefix() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(1, 2, 32, generator=generator, dtype=torch.float64) * 2 - 1


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


def test_top_classes_break_ties_by_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert eq.top_classes(logits, 3) == [[1, 2, 3], [0, 1, 2]]


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


def test_mine_threshold_is_strict() -> None:
    features = torch.tensor([[1.0, 0.0], [0.5, 0.75]])
    assert eq.mine(features, [[0], [0]], 0.5) == []
    assert members(eq.mine(features, [[0], [0]], 0.49), 0) == [[0, 1]]


def test_mine_full_set_comes_first_and_once() -> None:
    top = [[0], [0], [0, 1]]
    cliques = eq.mine(directions(0, 25, 50), top, 0.86, whole_sets=True, repeats=True)
    assert members(cliques, 0) == [[0, 1, 2], [0, 1], [1, 2]]
    assert members(cliques, 1) == [[2]]


# --- learn --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_concentration_of_unit_features(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    features = eq.l2_normalize(torch.randn(n, 6, generator=generator, dtype=torch.float64))
    text = eq.l2_normalize(torch.randn(3, 6, generator=generator, dtype=torch.float64))
    losses = eq.clique_loss(features, text, 100.0, SETTINGS)
    a = features.mean(dim=0)
    torch.testing.assert_close(losses.concentration, n * (1 - a @ a))


def test_losses_by_hand() -> None:
    # Two members at +-60 degrees, texts at 0 and 60 degrees, scale 2.
    features, text = directions(60, -60), directions(0, 60)

    def H(*z: float) -> float:
        p = np.exp(z) / np.exp(z).sum()
        return float(-(p * np.log(p)).sum())

    expected = {
        False: H(2.0, 1.0),  # their mean points to 0 degrees
        True: (H(1.0, 2.0) + H(1.0, -1.0)) / 2,
    }
    for member_entropy, value in expected.items():
        settings = ReferenceSettings(member_entropy=member_entropy, concentration=0.7)
        losses = eq.clique_loss(features, text, 2.0, settings)
        assert float(losses.entropy) == pytest.approx(value)
        assert float(losses.concentration) == pytest.approx(2 * 0.75)
        assert float(losses.total) == pytest.approx(value + 0.7 * 1.5)
    settings = ReferenceSettings(mean_concentration=True)
    assert float(eq.clique_loss(features, text, 2.0, settings).concentration) == pytest.approx(0.75)


def loss_at(reference: ReferenceSCAP, images: Tensor, visual: Tensor, text: Tensor) -> float:
    s = reference.settings
    features = eq.image_features(reference.model, images, visual, s.prompt_block)
    return float(eq.clique_loss(features, reference.text_of(text), reference.model.scale, s).total)


def slopes(loss: object, start: Tensor, coordinates: list[int]) -> list[float]:
    """Central differences of ``loss`` at ``start`` in some coordinates."""
    assert callable(loss)
    found = []
    for c in coordinates:
        step = torch.zeros_like(start)
        step.view(-1)[c] = 1e-5
        found.append((loss(start + step) - loss(start - step)) / 2e-5)
    return found


def test_one_step_is_signed_by_the_slope(
    model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor
) -> None:
    reference = scap(model, prefix, context, lr=0.01)
    images = tiny_images[:3]
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
    torch.testing.assert_close(mixed, expected, rtol=0, atol=SUM)
    alone = eq.text_features(model, ONE_TEMPLATE, context.double(), None, 0.9)
    torch.testing.assert_close(alone, a, rtol=0, atol=SUM)


# --- retain -------------------------------------------------------------------------------------


def zhou_by_iteration(A: np.ndarray, sigma: float, K: int, alpha: float) -> np.ndarray:
    """The fixed point of F <- alpha S F + (1 - alpha) A, found by iterating."""
    distance = ((A[:, None] - A[None]) ** 2).sum(-1)
    W = np.exp(-distance / (2 * sigma**2))
    np.fill_diagonal(W, 0)
    kept = np.zeros_like(W)
    for row, columns in enumerate(np.argsort(-W, axis=1, kind="stable")[:, :K]):
        kept[row, columns] = W[row, columns]
    kept = np.maximum(kept, kept.T)
    degree = kept.sum(1)
    S = np.divide(kept, np.sqrt(np.outer(degree, degree)), out=np.zeros_like(W), where=kept > 0)
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


def test_graph_neighbours_are_joined_from_either_side() -> None:
    keys = torch.tensor([[0.0], [0.1], [0.3]], dtype=torch.float64)
    W = eq.retention_graph(keys, ReferenceSettings(neighbours=1))
    near, far = math.exp(-0.01 / 0.18), math.exp(-0.04 / 0.18)
    # 0 and 1 choose each other; 2 chooses 1, which joins them although 1 did not choose 2.
    expected = torch.tensor([[0, near, 0], [near, 0, far], [0, far, 0]], dtype=torch.float64)
    torch.testing.assert_close(W, expected)


def test_isolated_key_stays() -> None:
    # The third key is so far away that its weights underflow to zero.
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [1e3, 1e3]], dtype=torch.float64)
    moved = eq.propagate(keys, ReferenceSettings(neighbours=2))
    torch.testing.assert_close(moved[2], 0.7 * keys[2])
    assert moved.isfinite().all() and (moved[0] - moved[1]).norm() < (keys[0] - keys[1]).norm()


def test_closest_pair_breaks_ties_by_lowest_pair() -> None:
    assert eq.closest_pair(torch.tensor([[0.0], [5.0], [6.0], [1.0], [20.0]])) == (0, 3)
    assert eq.closest_pair(torch.tensor([[3.0], [3.0], [3.0]])) == (0, 1)


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


def test_best_match() -> None:
    keys = [torch.tensor([3.0, 3.0]), torch.tensor([0.5, 0.0]), torch.tensor([1.0, 0.0])]
    query = torch.tensor([1.0, 0.0])
    assert eq.best_match(query, keys) == 0  # the norm counts
    assert eq.best_match(query, [keys[2], keys[2]]) == 0


def prompt(key: float, value: float) -> Tensor:
    return torch.tensor([[[float(key)], [float(value)]]])


def test_compose_keeps_keys_and_values_apart() -> None:
    composed = eq.compose([prompt(1, -1), prompt(2, -2)], [prompt(4, -4)], SETTINGS)
    assert composed is not None
    assert composed[:, 0, 0].tolist() == [1, 2, 4]
    assert composed[:, 1, 0].tolist() == [-1, -2, -4]
    assert eq.compose([], [], SETTINGS) is None


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


def test_prompt_order_is_immaterial_but_keys_are_not_values(
    model: CLIP, tiny_images: Tensor
) -> None:
    generator = torch.Generator().manual_seed(5)
    one, two = torch.randn(2, 1, 2, 32, generator=generator, dtype=torch.float64)
    forth = eq.image_features(model, tiny_images, torch.cat([one, two]), 1)
    back = eq.image_features(model, tiny_images, torch.cat([two, one]), 1)
    torch.testing.assert_close(forth, back)
    crossed = torch.stack([one[0], two[0]]).transpose(0, 1)  # keys k1, v1; values k2, v2
    mixed = eq.image_features(model, tiny_images, crossed, 1)
    assert not torch.allclose(forth, mixed, atol=1e-4)


# --- the stream ---------------------------------------------------------------------------------


def first_shared(result: ReferenceResult) -> tuple[int, int]:
    """An (image, class) with cliques and a retained prompt."""
    return next(where for where, (own, kept) in result.used.items() if own and kept is not None)


def test_without_cliques_predictions_are_plain(
    model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor
) -> None:
    result = scap(model, prefix, context, threshold=1.5).predict(tiny_images)
    features = model.encode_image(tiny_images, normalize=True)
    plain = model.scale * features @ model.classifier(ONE_TEMPLATE).T
    assert result.cliques == [] and result.retained == {} and result.tau == 0
    torch.testing.assert_close(
        result.probabilities, plain.softmax(dim=-1).double(), rtol=0, atol=FEATURE
    )


def test_prediction_recomputed_by_hand(
    model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor
) -> None:
    reference = scap(model, prefix, context)
    result = reference.predict(tiny_images)
    assert len(result.cliques) > 3 and result.tau == len(result.cliques)
    texts = [t for t in result.text if t is not None]
    torch.testing.assert_close(result.text_mean, torch.stack(texts).mean(dim=0))
    j, _ = first_shared(result)
    start = eq.image_features(model, tiny_images, reference.P0_I, 1)[j]
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
        image = tiny_images[j : j + 1]
        feature = eq.image_features(model, image, torch.cat(parts) if parts else None, 1)
        text = eq.template_features(model, ONE_TEMPLATE, "a photo of a {}.", result.text_mean)
        probabilities.append((model.scale * feature @ text.T).softmax(dim=-1)[0])
    expected = torch.stack(probabilities).mean(dim=0)
    torch.testing.assert_close(result.probabilities[j], expected)
    torch.testing.assert_close(result.logits[j].exp(), expected)


def test_stream_keeps_the_mean_and_the_limit(
    model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor
) -> None:
    reference = scap(model, prefix, context, capacity=2)
    seen: list[Any] = []
    for images in (tiny_images, tiny_images.flip(-1), tiny_images.flip(-2)):
        result: Any = reference.predict(images)
        seen += result.text
        torch.testing.assert_close(result.text_mean, torch.stack(seen).mean(dim=0))
        assert result.tau == len(seen)
        assert max(len(entries) for entries in result.retained.values()) <= 2
    assert any(len(entries) == 2 for entries in result.retained.values())
    reference.reset()
    assert reference.tau == 0 and reference.retained == {}


def test_text_only_never_prompts_images(
    model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor
) -> None:
    result = scap(model, prefix, context, modalities="text").predict(tiny_images)
    assert result.cliques and result.retained == {}
    assert all(visual is None for visual in result.visual)
    features = eq.image_features(model, tiny_images, None, 1)
    text = eq.template_features(model, ONE_TEMPLATE, "a photo of a {}.", result.text_mean)
    expected = (model.scale * features @ text.T).softmax(dim=-1)
    torch.testing.assert_close(result.probabilities, expected)


def test_image_only_leaves_text(
    model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor
) -> None:
    reference = scap(model, prefix, context, modalities="image")
    result = reference.predict(tiny_images)
    assert result.tau == 0 and result.text_mean is None and result.retained
    assert all(text is None for text in result.text)
    without = ReferenceSCAP(model, ONE_TEMPLATE, reference.settings, prefix, None)
    torch.testing.assert_close(without.predict(tiny_images).logits, result.logits)
    fixed = ClassPrompts(TINY_NAMES, features=reference.W0)
    given = ReferenceSCAP(model, fixed, reference.settings, prefix, None)
    torch.testing.assert_close(given.predict(tiny_images).logits, result.logits)


def test_mining_features(model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor) -> None:
    plain = eq.image_features(model, tiny_images, None, 1)
    start = eq.image_features(model, tiny_images, prefix, 1)
    # Images 0 and 1 are neighbours by one kind of features only.
    threshold = float(plain[0] @ plain[1] + start[0] @ start[1]) / 2
    found = []
    for prompted, features in ((False, plain), (True, start)):
        reference = scap(model, prefix, context, prompted_mining=prompted, threshold=threshold)
        result = reference.predict(tiny_images)
        assert result.top == eq.top_classes(features @ reference.W0.T, 3)
        assert result.cliques == eq.mine(features, result.top, threshold)
        found.append(any({0, 1} <= C for _, C in result.cliques))
    assert sorted(found) == [False, True]


def test_queries_are_features_under_the_start_prompt(
    model: CLIP, prefix: Tensor, context: Tensor, tiny_images: Tensor
) -> None:
    # A cache that holds the image's own features of both kinds tells which one is asked with.
    reference = scap(model, prefix, context, threshold=1.5)
    image = tiny_images[:1]
    keys = [eq.image_features(model, image, prompt, 1)[0] for prompt in (None, prefix)]
    reference.retained = {i: [(key, prefix) for key in keys] for i in range(len(TINY_NAMES))}
    assert list(reference.predict(image).used.values()) == [((), 1)] * 3


def test_refusals(model: CLIP, prefix: Tensor, context: Tensor) -> None:
    with pytest.raises(ValueError, match="nothing to learn"):
        ReferenceSCAP(model, ONE_TEMPLATE, ReferenceSettings(modalities="text"), prefix, None)
    with pytest.raises(ValueError, match="start prefix"):
        ReferenceSCAP(model, ONE_TEMPLATE, SETTINGS, None, context)
    with pytest.raises(ValueError, match=r"\(P, 2, D\)"):
        scap(model, prefix[0], context)
