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
    return (MODEL.scale * features @ adapter.network.text.T).softmax(-1)


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
    images = make_batches(1, 1, 6)[0]
    broken = torch.cat([images, images[:2]])
    broken[6, 0, 0, 0] = torch.nan
    broken[7] = torch.inf
    adapter = build(window=6)
    clean = build(window=6)
    # as features that overflow would come; pixels that are not finite are refused
    # before
    actual = adapter._predict(Batch(broken))
    expected = clean.predict(images)
    torch.testing.assert_close(actual.logits[:6], expected.logits)
    torch.testing.assert_close(actual.logits[6:], torch.full((2, 6), -math.log(6)))
    assert actual.evidence["non_finite"] == 2
    torch.testing.assert_close(
        adapter.state_dict(), clean.state_dict(), atol=SUM, rtol=SUM
    )
    before = adapter.state_dict()
    nothing = adapter._predict(Batch(broken[6:]))
    assert adapter.summarize(nothing) == {"images": 2}
    assert_same_state(adapter, before)


def test_every_memory_is_named_class_free_or_depends_on_the_classes() -> None:
    """Only tensors that do not depend on the classes go over to another class list."""
    few = DomainNorm(MODEL, ClassPrompts(NAMES[:3]), DomainNormConfig(domains=1))
    every = DomainNorm(MODEL, ClassPrompts(NAMES[:6]), DomainNormConfig(domains=1))
    names = set(every.memory)
    per_class = {
        name for name in names if few.memory[name].shape != every.memory[name].shape
    }
    assert per_class
    assert not per_class & every.class_free
    # Sums that belong to per-class sums start again with them.
    sums = ("images", "confidence", "concentration", "recent_concentration")
    beside = {f"domains.0.counts.{x}" for x in sums}
    assert per_class | beside | every.class_free == names


def test_evidence_holds_figures_of_the_adaptation() -> None:
    batches = make_batches(3, 3, 20)
    adapter = build(window=20, domains=1)
    lines = [health(adapter.predict(images).evidence) for images in batches]
    distances = [line["distance"] for line in lines]
    # Adam's first step moves every parameter by the learning rate (Eq. 12 at i = 1, k =
    # W).
    assert distances[0] == pytest.approx(0.012, abs=1e-4)
    moved = (
        adapter.state.domains[0].norms.values - build().state.domains[0].norms.values
    )
    assert distances[2] == pytest.approx(float(moved.square().mean().sqrt()), abs=1e-4)
    assert distances[0] < distances[1] < distances[2]
    plain = torch.cat([zero_shot(adapter, images) for images in batches])
    assert lines[2]["confidence"] == pytest.approx(
        float(plain.amax(1).mean()), abs=LOGIT
    )
    assert lines[2]["domains"] == 1
    last = adapter.predict(batches[0])
    changed = last.logits.argmax(dim=1) != zero_shot(adapter, batches[0]).argmax(dim=1)
    assert health(last.evidence)["changed"] == pytest.approx(
        float(changed.float().mean()), abs=1e-4
    )


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


def test_single_images_that_stray_open_no_domain_but_a_change_of_domain_does() -> None:
    """One at a time: outliers stay in their domain; 16 images of another one open it."""
    images = make_batches(2, 1, 80)[0]
    images[40::8] += 2.5 * draw(5, 1, 1, 1, seed=5)
    adapter = build(window=16)
    for image in images:
        assert adapter.predict(image[None]).evidence["domain"] == 0
    visits = [adapter.predict(image[None]).evidence["domain"] for image in lit(-3.0)]
    assert visits[0] == 0
    assert set(visits[16:]) == {1}


def test_a_burst_of_another_domain_leaves_one_bit_for_bit_as_it_was() -> None:
    """Neither its LayerNorms nor its next steps depend on the images between."""
    plain = build(domains=2, window=40)
    disturbed = build(domains=2, window=40)
    for adapter in (plain, disturbed):
        adapter.predict(lit(0.0))
    for _ in range(8):
        disturbed.predict(lit(-3.0))
    assert [int(domain.images) for domain in disturbed.state.domains] == [40, 320]
    for images in (lit(0.0), lit(0.1)):
        actual = disturbed.predict(images)
        expected = plain.predict(images)
        assert torch.equal(actual.logits, expected.logits)
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
    chosen = np.random.default_rng(0).permutation(len(dataset))[:192].tolist()
    images = [dataset.load(i) for i in chosen]

    def sure(name: str) -> list[float]:
        rows = predict(images, dataset.names, model=model, method=name).rows
        values = [float(row["probability"]) for row in rows]
        return [sum(values[i : i + 64]) / 64 for i in (0, 64, 128)]

    for actual, expected in zip(sure("domain_norm"), sure("zero_shot"), strict=True):
        assert actual == pytest.approx(expected, abs=0.04)


def test_every_way_in_gives_the_same_probabilities() -> None:
    model = create_model("micro", device="cpu")
    dataset = get_dataset("bundled")
    images = [dataset.load(i) for i in range(96)]
    adapter = create_method("domain_norm", model, dataset.prompts)
    expected = torch.cat(
        [adapter.predict(images[i : i + 64]).probabilities for i in (0, 64)]
    )
    run = predict(images, dataset.names, model=model, method="domain_norm")
    actual = torch.tensor([row["probability"] for row in run.rows])
    torch.testing.assert_close(actual, expected.amax(dim=1), atol=1e-4, rtol=0)
