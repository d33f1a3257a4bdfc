"""Errors of the released code, one check each: the list that any SCAP should pass."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.data.dataset import ArrayDataset
from cliquetta.data.stream import Stream
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.progress import Step
from cliquetta.evaluation.runner import evaluate
from cliquetta.methods.scap import PRESETS, SCAP, SCAPConfig
from cliquetta.methods.scap.cliques import mine_cliques
from cliquetta.methods.scap.composition import compose_prompts, plan_passes
from cliquetta.methods.scap.learning import Task
from cliquetta.methods.scap.losses import attribute_features, concentration_loss
from cliquetta.methods.scap.released import Rules
from cliquetta.methods.scap.retention import propagate
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Prediction
from tests._helpers.literal_towers import image_features
from tests._helpers.oracle import scap_config
from tests._helpers.scenes import NAMES, between_similarities, build_model, make_batches
from tests._helpers.streaming import made_up_dataset
from tests._helpers.tiny_world import TINY, TINY_PROMPTS, draw
from tests._helpers.tolerance import (
    BLOCK_STORES,
    DOUBLE,
    STEP,
    TOWER_TERMS,
    assert_near,
    rounding,
)

MODEL = build_model(0)
PROMPTS = ClassPrompts(NAMES)
BATCHES = make_batches(5, 3, 8)
THRESHOLD = between_similarities(MODEL, BATCHES[0], 0.8)
"""So high that some images of every batch have no clique."""


def adapter_of(threshold: float = THRESHOLD, **options: Any) -> SCAP:
    return SCAP(MODEL, PROMPTS, scap_config(threshold=threshold, **options))


def owners(prediction: Prediction) -> Tensor:
    """Images (b,) whose candidate sets hold a clique with them."""
    passes = prediction.evidence["passes"]
    images = len(prediction.logits)
    by_image = passes.has_set.any(dim=1).view(images, -1)
    return by_image.any(dim=1)


def unlike(a: Prediction, b: Prediction) -> Tensor:
    """Images (b,) with other logits; rounding does not count."""
    return (a.logits - b.logits).abs().amax(dim=1) > 1e-4


def test_1_propagation_changes_keys_and_the_released_rule_only_scales_them() -> None:
    keys = F.normalize(draw(1, 5, 8), dim=-1)
    for neighbours in (1, 3):
        moved = propagate(keys, SCAPConfig(neighbours=neighbours, bandwidth=0.5))
        cosines = F.cosine_similarity(moved, keys, dim=-1)
        assert (cosines < 1 - 1e-4).all()

    # As released: a wide kernel, the one nearest of each row, which is the key itself.
    differences = keys[0, :, None] - keys[0, None]
    squared = differences.square().mean(dim=-1)
    weights = torch.exp(-squared / 0.1)
    best, nearest = weights.max(dim=1, keepdim=True)
    edges = torch.zeros_like(weights).scatter(1, nearest, best)
    root = edges.sum(dim=1).rsqrt()
    smooth = root[:, None] * edges * root
    identity = torch.eye(5).double()
    literal = torch.linalg.inv(identity - 0.3 * smooth) @ keys[0]
    released = propagate(keys, PRESETS["released"])[0]

    assert_near(released, literal, DOUBLE)
    assert_near(released, keys[0] / 0.7, DOUBLE)


def test_2_two_prompts_together_keep_keys_with_keys_and_values_with_values() -> None:
    adapter = adapter_of(modalities="image")
    image = BATCHES[0][:1]
    key_1, value_1, key_2, value_2 = draw(4, 32)

    # ours: two cliques of one class, both of them used; nothing is retained
    first = torch.cat([key_1, value_1])
    second = torch.cat([key_2, value_2])
    prompts_of_cliques = torch.stack([first, second])[None]
    used = torch.ones(1, 2, dtype=torch.bool)
    nothing = prompts_of_cliques[:, :0]
    none_used = torch.zeros(1, 0, dtype=torch.bool)
    prompts, mask = compose_prompts(
        prompts_of_cliques, used, nothing, none_used, adapter.config
    )
    hidden = adapter.visual.hidden(image)
    actual = adapter.visual.encode(hidden, prompts, mask)

    # by hand: two pairs of a key and a value in front of the second block
    pair_1 = torch.stack([key_1, value_1])
    pair_2 = torch.stack([key_2, value_2])
    prefix = {1: torch.stack([pair_1, pair_2])}
    expected = image_features(MODEL, image[0], prefix=prefix)

    assert_near(actual[0], F.normalize(expected, dim=0), DOUBLE)


@pytest.mark.parametrize("best_class_only", [False, True])
def test_3a_without_cliques_the_logits_of_images_that_own_one_change(
    best_class_only: bool,
) -> None:
    def predict(threshold: float) -> Prediction:
        adapter = adapter_of(
            threshold,
            modalities="image",
            retention=False,
            best_class_only=best_class_only,
        )
        return adapter.predict(BATCHES[0])

    with_cliques = predict(THRESHOLD)
    without = predict(2.0)  # above every cosine
    own = owners(with_cliques)

    assert 0 < int(own.sum()) < len(own)
    assert not owners(without).any()
    assert unlike(with_cliques, without).tolist() == own.tolist()


def candidates_of_taught_classes(
    classifier: Tensor, threshold: float, topk: int
) -> list[list[bool]]:
    """Say of each image whether one of its likeliest classes had a clique by then.

    By hand: a class has a clique once two images that both have it among their
    likeliest are more alike than the threshold. Prompts are retained per class, before
    a batch is predicted.
    """
    taught: set[int] = set()
    reached = []
    for images in BATCHES:
        features = MODEL.encode_image(images, normalize=True)
        cosines = (features @ features.T).tolist()
        top = (features @ classifier.T).topk(topk).indices
        likeliest = [set(row) for row in top.tolist()]

        for i, j in combinations(range(len(images)), 2):
            if cosines[i][j] > threshold:
                taught |= likeliest[i] & likeliest[j]
        reached.append([bool(taught & classes) for classes in likeliest])
    return reached


@pytest.mark.parametrize(
    ("topk", "quantile", "moved"), [(3, 0.87, [0, 7, 7]), (1, 0.8, [6, 6, 5])]
)
def test_3b_without_retention_the_logits_of_images_with_a_retained_prompt_change(
    topk: int, quantile: float, moved: list[int]
) -> None:
    """In both cases there are images of whose likeliest classes none had a clique by then."""
    threshold = between_similarities(MODEL, BATCHES[0], quantile)
    on = adapter_of(threshold, topk=topk, modalities="image", retention=True)
    off = adapter_of(threshold, topk=topk, modalities="image", retention=False)
    expected = candidates_of_taught_classes(on.classifier, threshold, topk)

    assert [sum(batch) for batch in expected] == moved

    for images, reached in zip(BATCHES, expected, strict=True):
        changed = unlike(on.predict(images), off.predict(images))
        assert changed.tolist() == reached


def test_3c_retention_reaches_a_batch_without_any_clique() -> None:
    """One image of a later batch: only what earlier batches left can move it."""
    image = BATCHES[0][:1]
    taught = adapter_of(modalities="image")
    taught.predict(BATCHES[0])
    moved = taught.predict(image)
    fresh = adapter_of(modalities="image").predict(image)

    assert len(moved.evidence["cliques"]) == 0
    assert len(fresh.evidence["cliques"]) == 0
    assert unlike(moved, fresh).all()


def test_3d_the_text_running_mean_reaches_every_image() -> None:
    learned = adapter_of(0.0, modalities="text").predict(BATCHES[0])
    without = adapter_of(2.0, modalities="text").predict(BATCHES[0])
    assert unlike(learned, without).all()


def test_3e_prompts_that_are_discarded_are_nowhere_in_the_logits() -> None:
    images = BATCHES[0]
    discarded = adapter_of(modalities="image", discarded_prompts=True)
    actual = discarded.predict(images)
    # there are prompts that could be in them
    assert len(actual.evidence["cliques"])

    features = MODEL.encode_image(images, normalize=True)
    logits = MODEL.scale * features @ discarded.classifier.T
    expected = logits.softmax(dim=-1).float()
    torch.testing.assert_close(actual.probabilities, expected)


def test_4_an_image_first_seen_in_a_later_clique_maps_to_that_clique() -> None:
    # images 0 and 1 are of class 0; 3 is like 2 and like 4, which are not alike
    similar = torch.eye(5, dtype=torch.bool)
    for a, b in ((0, 1), (2, 3), (3, 4)):
        similar[a, b] = True
        similar[b, a] = True
    top = torch.tensor([[0], [0], [1], [1], [1]])

    cliques = mine_cliques(similar, top)
    members = [row.nonzero()[:, 0].tolist() for row in cliques.members]
    assert members == [
        [0, 1],
        [2, 3],
        [2, 3, 4],
        [3, 4],
    ]

    # each image has the cliques that it is a member of, by their number
    nothing_retained = torch.zeros(2, dtype=torch.long)
    passes = plan_passes(cliques, top, nothing_retained, SCAPConfig())
    mapped = []
    for sets, own in zip(passes.sets, passes.has_set, strict=True):
        mapped.append(sets[own].tolist())
    assert mapped == [
        [0],
        [0],
        [1, 2],
        [1, 2, 3],
        [2, 3],
    ]


def test_5_concentration_of_unit_features_is_size_times_one_minus_squared_mean() -> (
    None
):
    size = 9
    features = F.normalize(draw(size, 6))
    clique = torch.zeros(size, dtype=torch.long)
    mean = attribute_features(features, clique, 1)
    actual = concentration_loss(features, clique, mean, Rules())
    squared_mean = float(mean.square().sum())
    expected = size * (1 - squared_mean)

    assert float(actual) == pytest.approx(expected, abs=DOUBLE)


@pytest.mark.parametrize("steps", [1, 3])
def test_6_cliques_learned_in_any_order_give_the_same_prompts(steps: int) -> None:
    adapter = adapter_of(steps=steps)
    hidden, plain = adapter._encode(BATCHES[0])
    sets = [[0, 1, 2], [3, 4], [1, 4, 5, 6], [6, 7]]

    def learn(order: list[int]) -> tuple[Any, Any]:
        """Visual and text prompts of these sets, learned in this order."""
        clique = []
        image = []
        for at, number in enumerate(order):
            clique += [at] * len(sets[number])
            image += sets[number]
        task = Task(
            hidden, plain, torch.tensor(clique), torch.tensor(image), len(order)
        )
        learned = adapter.learner.learn(task, adapter.memory["start_prompt"])
        return learned.visual, learned.text

    visual, text = learn([0, 1, 2, 3])
    for order in ([3, 1, 0, 2], [2], [1, 3]):
        visual_of_order, text_of_order = learn(order)
        assert_near(visual_of_order, visual[order], STEP)
        assert_near(text_of_order, text[order], STEP)


def test_7_the_reported_metric_comes_from_the_logits_that_were_returned(
    tmp_path: Path,
) -> None:
    dataset: ArrayDataset = made_up_dataset(24)
    stream = Stream(dataset, TINY.preprocess, batch_size=8)
    adapter = SCAP(TINY, TINY_PROMPTS, SCAPConfig(threshold=0.3))
    steps: list[Step] = []
    record = evaluate(adapter, stream, out=tmp_path, on_step=steps.append)

    predicted = torch.cat([step.prediction.logits.argmax(dim=1) for step in steps])
    labels = torch.cat([step.labels for step in steps])
    right = (predicted == labels).float().mean()

    assert record.metrics["top1"] == pytest.approx(100 * float(right))

    written = load_predictions(tmp_path / record.id)
    assert written.classes[:, 0].tolist() == predicted.tolist()

    # SCAP was at work: otherwise the logits would be those of zero-shot
    cliques = [len(step.prediction.evidence["cliques"]) for step in steps]

    assert sum(cliques) > 3


def test_8_the_same_members_under_two_classes_have_the_same_prompts_to_the_bit() -> (
    None
):
    adapter = adapter_of(threshold=0.9)
    image = BATCHES[0][:1]
    prediction = adapter.predict(image.repeat(4, 1, 1, 1))
    cliques = prediction.evidence["cliques"]

    assert len(cliques) == 3
    assert len(cliques.sets) == 1

    for name in ("keys", "values"):
        first, second, third = adapter.memory[name][cliques.classes, 0]
        assert first.any()
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize(
    ("dtype", "terms"),
    [
        (torch.float64, TOWER_TERMS),
        (torch.float32, TOWER_TERMS),
        (torch.bfloat16, 2 * BLOCK_STORES),
    ],
    ids=["float64", "float32", "bfloat16"],
)
def test_9_text_cut_at_its_end_equals_text_of_full_length(
    dtype: torch.dtype, terms: int
) -> None:
    model = build_model(0).to(dtype)
    # enough classes for the tower to run what all texts begin with once
    prompts = ClassPrompts((*NAMES, "bird", "grey horse", "deer", "air plane"))
    adapter = SCAP(model, prompts, SCAPConfig())
    text = adapter.text
    tower = model.require_text()
    longest = int(text.ends.max()) + 1
    full_length = text.ids.shape[1]

    assert longest < full_length
    assert full_length == model.tokenizer.context_length

    context = text.start + 0.05
    words_of_context = slice(1, 1 + len(context))
    embedded = tower.tokens(text.ids)
    embedded[:, words_of_context] = context.to(dtype)
    encoded = tower.encode(embedded, text.ends).to(context.dtype)
    expected = F.normalize(encoded, dim=1)
    actual = text.features(context[None])[0]

    assert_near(actual, expected, rounding(dtype, terms))


def test_10_the_text_prompt_is_the_arithmetic_mean_of_all_cliques() -> None:
    adapter = adapter_of()
    seen: list[Tensor] = []
    for images in BATCHES:
        evidence = adapter.predict(images).evidence
        learned = evidence["learned"].text
        sets = evidence["cliques"].set_of.tolist()
        seen += [learned[number] for number in sets]
        mean = torch.stack(seen).mean(dim=0)
        assert_near(adapter.memory["text_mean"], mean, DOUBLE)
        assert int(adapter.memory["text_seen"]) == len(seen)

    assert len(seen) > 6
