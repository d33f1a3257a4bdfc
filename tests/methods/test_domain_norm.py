"""Domain LayerNorms: the behaviour on a stream, figures by hand, and the state."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta import create_method, create_model, get_dataset, predict
from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.domain_norm.health import health, in_words
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.building import assert_same_state
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import LOGIT, SUM

MODEL = build_model(0)
PROMPTS = ClassPrompts(NAMES)


def build(**options: Any) -> DomainNorm:
    return DomainNorm(MODEL, PROMPTS, DomainNormConfig(**options))


def zero_shot(adapter: DomainNorm, images: Tensor) -> Tensor:
    features = MODEL.encode_image(images, normalize=True)
    logits = MODEL.scale * features @ adapter.network.text.T
    return logits.softmax(-1)


def spoilt(images: Tensor) -> Tensor:
    """The images, and two more that are not finite, as features that overflow would be."""
    broken = images[:2].clone()
    broken[0, 0, 0, 0] = torch.nan
    broken[1] = torch.inf
    return torch.cat([images, broken])


def test_order_inside_batches_that_do_not_fit_the_window_does_not_matter() -> None:
    one = build(window=7)
    other = build(window=7)
    for images in make_batches(5, 4, 10):
        straight = one.predict(images).logits
        mixed = other.predict(images.flip(0)).logits

    torch.testing.assert_close(mixed, straight.flip(0), atol=LOGIT, rtol=LOGIT)


def lit(light: float) -> Tensor:
    """40 images of a domain of that brightness."""
    return make_batches(2, 1, 40)[0] + light


def test_images_that_are_not_finite_teach_nothing_and_the_others_are_predicted() -> (
    None
):
    (images,) = make_batches(1, 1, 6)
    adapter = build(window=6)
    # past the check of pixels, which refuses them
    actual = adapter._predict(Batch(spoilt(images)))

    clean = build(window=6)
    expected = clean.predict(images)

    torch.testing.assert_close(actual.logits[:6], expected.logits)
    undecided = torch.full((2, 6), -math.log(6))
    torch.testing.assert_close(actual.logits[6:], undecided)
    assert actual.evidence["non_finite"] == 2

    state = clean.state_dict()
    torch.testing.assert_close(adapter.state_dict(), state, atol=SUM, rtol=SUM)


def test_a_batch_of_images_that_are_not_finite_changes_nothing() -> None:
    (images,) = make_batches(1, 1, 6)
    adapter = build(window=6)
    adapter.predict(images)
    before = adapter.state_dict()
    nothing = adapter._predict(Batch(spoilt(images)[6:]))

    assert adapter.summarize(nothing) == {"images": 2}
    assert_same_state(adapter, before)


def test_every_memory_is_named_class_free_or_depends_on_the_classes() -> None:
    """Only tensors that do not depend on the classes go over to another class list."""
    config = DomainNormConfig(domains=1)
    few = DomainNorm(MODEL, ClassPrompts(NAMES[:3]), config).memory
    every = DomainNorm(MODEL, ClassPrompts(NAMES[:6]), config)
    names = set(every.memory)
    per_class = {name for name in names if few[name].shape != every.memory[name].shape}

    assert per_class
    assert not per_class & every.class_free

    # Sums that belong to per-class sums start again with them.
    sums = ("images", "confidence", "concentration", "recent_concentration")
    beside = {f"domains.0.counts.{name}" for name in sums}

    assert per_class | beside | every.class_free == names


def test_evidence_tells_how_far_the_norms_moved() -> None:
    adapter = build(window=20, domains=1)
    start = adapter.state.domains[0].norms.values
    distances = []
    for images in make_batches(3, 3, 20):
        figures = health(adapter.predict(images).evidence)
        distances.append(figures["distance"])

    # Adam's first step moves every parameter by the learning rate (Eq. 12 at i = 1,
    # k = W).
    assert distances[0] == pytest.approx(0.012, abs=1e-4)
    assert distances[0] < distances[1] < distances[2]

    moved = adapter.state.domains[0].norms.values - start
    root_mean_square = float(moved.square().mean().sqrt())

    assert distances[2] == pytest.approx(root_mean_square, abs=1e-4)


def test_evidence_tells_the_confidence_of_zero_shot_and_the_domains() -> None:
    adapter = build(window=20, domains=1)
    batches = make_batches(3, 3, 20)
    for images in batches:
        figures = health(adapter.predict(images).evidence)
    probabilities = zero_shot(adapter, torch.cat(batches))
    confidence = float(probabilities.amax(1).mean())

    assert figures["confidence"] == pytest.approx(confidence, abs=LOGIT)
    assert figures["domains"] == 1


def test_evidence_tells_how_many_predictions_changed() -> None:
    adapter = build(window=20, domains=1)
    first, *others = make_batches(3, 3, 20)
    for images in (first, *others):
        adapter.predict(images)
    last = adapter.predict(first)
    before = zero_shot(adapter, first).argmax(dim=1)
    changed = (last.logits.argmax(dim=1) != before).float().mean()
    figures = health(last.evidence)

    assert figures["changed"] == pytest.approx(float(changed), abs=1e-4)


def visit(adapter: DomainNorm, images: Tensor) -> list[int]:
    """The domain of each image, sent one at a time."""
    return [adapter.predict(image[None]).evidence["domain"] for image in images]


def test_single_images_that_stray_open_no_domain() -> None:
    (images,) = make_batches(2, 1, 80)
    far = 2.5 * draw(5, 1, 1, 1, seed=5)
    images[40::8] += far
    visits = visit(build(window=16), images)

    assert set(visits) == {0}


def test_sixteen_images_of_another_domain_open_it() -> None:
    adapter = build(window=16)
    (images,) = make_batches(2, 1, 80)
    visit(adapter, images)
    visits = visit(adapter, lit(-3.0))

    assert visits[0] == 0
    assert set(visits[16:]) == {1}


def test_figures_in_words_promise_nothing() -> None:
    figures = {
        "domain": 1,
        "domains": 2,
        "confidence": 0.831,
        "belief": 0.2,
        "changed": 0.05,
    }
    assert in_words("domain_norm", figures) == (
        "domain_norm without labels: 2 domains, zero-shot confidence 83 %, weight of the class "
        "prior 20 %, predictions changed in the last batch 5 %. Whether it gains on your images "
        "only labels can tell: 50 are enough for a first check."
    )


def test_a_burst_of_another_domain_leaves_one_bit_for_bit_as_it_was() -> None:
    """Neither its LayerNorms nor its next steps depend on the images between."""
    plain = build(domains=2, window=40)
    plain.predict(lit(0.0))
    disturbed = build(domains=2, window=40)
    disturbed.predict(lit(0.0))
    for _ in range(8):
        disturbed.predict(lit(-3.0))
    seen = [int(domain.images) for domain in disturbed.state.domains]

    assert seen == [40, 8 * 40]

    for images in (lit(0.0), lit(0.1)):
        actual = disturbed.predict(images).logits
        expected = plain.predict(images).logits
        assert torch.equal(actual, expected)

    assert int(plain.state.domains[0].norms.steps) == 3


def test_a_full_step_asks_for_one_look_and_one_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a GPU replays: one call of each function per batch, in the order of the algorithm."""
    adapter = build(domains=2, window=40)
    asked: list[str] = []

    def call(function: Any, *inputs: Any) -> Any:
        asked.append(function.__name__)
        return function(*inputs)

    run: Any = call
    monkeypatch.setattr(adapter, "setup", adapter.setup._replace(run=run))
    for _ in range(5):
        adapter.predict(lit(0.0))
    young = ["encode_and_measure", "count_batch", "loss_gradient", "features"]

    assert asked[:4] == young
    # From the fourth window on the pass of the step is the prediction.
    assert asked[-3:] == young[:3]


def test_batches_are_as_sure_as_zero_shot_all_along() -> None:
    """One threshold serves: neither the first batches nor the later ones are more sure."""
    model = create_model("micro", device="cpu")
    dataset = get_dataset("bundled")
    shuffled = np.random.default_rng(0).permutation(len(dataset))
    images = [dataset.load(i) for i in shuffled[:192].tolist()]

    def sure(name: str) -> list[float]:
        """Mean confidence of each of three batches."""
        run = predict(images, dataset.names, model=model, method=name)
        values = [float(row["probability"]) for row in run.rows]
        batches = np.reshape(values, (3, 64))
        means: list[float] = batches.mean(axis=1).tolist()
        return means

    expected = sure("zero_shot")
    assert sure("domain_norm") == pytest.approx(expected, rel=0, abs=0.04)


def test_every_way_in_gives_the_same_probabilities() -> None:
    model = create_model("micro", device="cpu")
    dataset = get_dataset("bundled")
    images = [dataset.load(i) for i in range(96)]

    adapter = create_method("domain_norm", model, dataset.prompts)
    first = adapter.predict(images[:64]).probabilities
    second = adapter.predict(images[64:]).probabilities
    expected = torch.cat([first, second]).amax(dim=1)

    run = predict(images, dataset.names, model=model, method="domain_norm")
    actual = torch.tensor([row["probability"] for row in run.rows])

    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
