"""Domain LayerNorms: the behaviour on a stream, figures by hand, and the state."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta import create_method, create_model, get_dataset, predict
from cliquetta.data.stream import Stream
from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.domain_norm.health import health, in_words, verdict
from cliquetta.methods.domain_norm.prior import Figures, count, information
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.building import assert_same_state
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import FEATURE, LOGIT, SUM

MODEL = build_model(0)
PROMPTS = ClassPrompts(NAMES)


def build(**options: Any) -> DomainNorm:
    return DomainNorm(MODEL, PROMPTS, DomainNormConfig(**options))


def zero_shot(adapter: DomainNorm, images: Tensor) -> Tensor:
    features = MODEL.encode_image(images, normalize=True)
    return (MODEL.scale * features @ adapter.network.text.T).softmax(-1)


def test_order_inside_batches_that_do_not_fit_the_window_does_not_matter() -> None:
    one, other = (build(step_every=7, vote_memory=12) for _ in range(2))
    for images in make_batches(5, 4, 10):
        straight, mixed = one.predict(images).logits, other.predict(images.flip(0)).logits
    torch.testing.assert_close(mixed, straight.flip(0), atol=LOGIT, rtol=LOGIT)


def lit(light: float) -> Tensor:
    """40 images of a domain of that brightness."""
    return make_batches(2, 1, 40)[0] + light


def test_images_that_are_not_finite_teach_nothing_and_the_others_are_predicted() -> None:
    images = make_batches(1, 1, 6)[0]
    broken = torch.cat([images, images[:2]])
    broken[6, 0, 0, 0], broken[7] = torch.nan, torch.inf
    adapter, clean = build(step_every=6), build(step_every=6)
    # as features that overflow would come; pixels that are not finite are refused before
    actual, expected = adapter._predict(Batch(broken)), clean.predict(images)
    torch.testing.assert_close(actual.logits[:6], expected.logits)
    torch.testing.assert_close(actual.logits[6:], torch.full((2, 6), -math.log(6)))
    assert actual.evidence["non_finite"] == 2
    torch.testing.assert_close(adapter.state_dict(), clean.state_dict(), atol=SUM, rtol=SUM)
    before, nothing = adapter.state_dict(), adapter._predict(Batch(broken[6:]))
    assert adapter.summarize(nothing) == {"images": 2}
    assert_same_state(adapter, before)


def test_every_memory_is_named_class_free_or_depends_on_the_classes() -> None:
    """Only tensors that do not depend on the classes go over to another class list."""
    few, every = (
        DomainNorm(MODEL, ClassPrompts(NAMES[:n]), DomainNormConfig(domains=1)) for n in (3, 6)
    )
    names = set(every.memory)
    per_class = {name for name in names if few.memory[name].shape != every.memory[name].shape}
    assert per_class and not per_class & every.class_free
    # Counts that belong to per-class sums, and votes that name classes, start again with them.
    beside = {f"counts.{x}" for x in ("images", "confidence", "entropy", "agreement", "asked")}
    beside |= {f"voters.{x}" for x in ("features", "zero_shot", "next")}
    assert per_class | {f"domains.0.{x}" for x in beside} | every.class_free == names


def test_evidence_holds_figures_of_the_adaptation() -> None:
    batches = make_batches(3, 3, 20)
    adapter = build(step_every=20, domains=1)
    lines = [health(adapter.predict(images).evidence) for images in batches]
    assert "agreement" not in lines[0]  # nothing was asked before
    assert [line["distance"] > 0 for line in lines] == [True] * 3
    plain = torch.cat([zero_shot(adapter, images) for images in batches])
    assert lines[2]["confidence"] == pytest.approx(float(plain.amax(1).mean()), abs=LOGIT)
    # Neighbours are chosen by adapted features: without learning, by those of plain CLIP.
    still = build(step_every=20, domains=1, lr=0.0)
    lines = [health(still.predict(images).evidence) for images in batches]
    plain_classes = plain[:20].argmax(1)
    features = MODEL.encode_image(batches[0], normalize=True)
    similar = (features @ features.T).fill_diagonal_(-2).topk(10).indices
    expected = (plain_classes[similar] == plain_classes[:, None]).double().mean()
    assert lines[1]["agreement"] == pytest.approx(float(expected), abs=LOGIT)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ((0.6, 0.0, 0.5, 0), "adapt"),
        ((0.6, 0.0, math.nan, 0), "adapt"),
        ((0.92, 0.1, 0.8, 0), "little to gain"),
        ((0.92, 0.5, 0.8, 0), "adapt"),
        ((0.6, 0.0, 0.1, 0), "careful"),
        ((0.92, 0.0, 0.8, 1), "careful"),
    ],
)
def test_the_verdict_by_hand(figures: tuple[float, float, float, int], expected: str) -> None:
    confidence, belief, agreement, restarts = figures
    for known, actual in ((math.nan, expected), (0.5, expected), (0.05, "abstain")):
        seen = Figures(confidence, belief, agreement, known, 0)
        assert verdict(seen, restarts, 0.1) == actual


def test_information_by_hand() -> None:
    """Two certain predictions: all is explained; two equal ones: nothing; one image: NaN."""
    start, certain = build(domains=1).state.domains[0], torch.eye(6)[:2].double()
    even = torch.full((2, 6), 1 / 6).double()
    mixed = torch.tensor([[0.5, 0.5, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0]]).double()
    half = 1 - math.log(2) / (1.5 * math.log(2))  # H(1/4, 1/2, 1/4) is 1.5 bit
    for p, expected in ((certain, 1.0), (even, 0.0), (mixed, half)):
        counts = start.counts
        for times in (31, 1):
            counts = count(counts, p.repeat(times, 1), DomainNormConfig())
            assert math.isnan(information(counts)) == (times == 31)
        assert float(information(counts)) == pytest.approx(expected, abs=FEATURE)


def test_images_that_say_nothing_are_predicted_by_zero_shot_and_counted() -> None:
    """Nearly equal images are predicted alike, though what is learned would change that."""
    images = 0.5 + 1e-3 * draw(96, 3, 16, 16)
    adapter, always = (build(step_every=32, domains=1, lr=0.1, abstain_below=a) for a in (0.1, 0.0))
    for part in images.split(32):
        actual, other = adapter.predict(part), always.predict(part)
    assert actual.evidence["verdict"] == "abstain" and actual.evidence["abstained"] == 64
    message = in_words("domain_norm", health(actual.evidence))
    assert "without labels: abstain" in message
    assert "64 images predicted by zero-shot CLIP" in message
    torch.testing.assert_close(actual.probabilities.double(), zero_shot(adapter, images[64:]))
    assert other.evidence["abstained"] == 0 and not torch.allclose(actual.logits, other.logits)
    # Learning went on inside, and the exported prediction of such an image is zero-shot's, too.
    one, other_domain = adapter.state.domains[0], always.state.domains[0]
    assert torch.equal(one.norms.values, other_domain.norms.values)
    assert torch.equal(one.voters.predictions, other_domain.voters.predictions)
    frozen = adapter.frozen_model()(images[:4]).softmax(dim=1)
    torch.testing.assert_close(frozen, zero_shot(adapter, images[:4]).to(frozen))


def test_single_images_that_stray_open_no_domain_but_a_change_of_domain_does() -> None:
    """One at a time: outliers stay in their domain; 16 images of another one open it."""
    images = make_batches(2, 1, 80)[0]
    images[40::8] += 2.5 * draw(5, 1, 1, 1, seed=5)
    adapter = build(step_every=16)
    for image in images:
        assert adapter.predict(image[None]).evidence["domain"] == 0
    visits = [adapter.predict(image[None]).evidence["domain"] for image in lit(-3.0)]
    assert visits[0] == 0 and set(visits[16:]) == {1}


def test_a_burst_of_another_domain_leaves_one_bit_for_bit_as_it_was() -> None:
    """Neither its LayerNorms nor its voters nor its next steps depend on the images between."""
    options: dict[str, Any] = {"domains": 2, "step_every": 40, "vote_memory": 64}
    plain, disturbed = (build(**options) for _ in range(2))
    for adapter in (plain, disturbed):
        adapter.predict(lit(0.0))
    for _ in range(8):
        disturbed.predict(lit(-3.0))
    assert [int(domain.images) for domain in disturbed.state.domains] == [40, 320]
    for images in (lit(0.0), lit(0.1)):
        actual, expected = (adapter.predict(images) for adapter in (disturbed, plain))
        assert torch.equal(actual.logits, expected.logits)
    assert int(plain.state.domains[0].norms.steps) == 3


@pytest.mark.parametrize("warmup", [0, 100])
def test_results_computed_ahead_change_no_bit(warmup: int, monkeypatch: Any) -> None:
    """Batches of two domains in turn, mixed, of part of a window and of more than one."""
    bright, dark = lit(0.0), lit(-3.0)
    stream = [bright, dark, bright, torch.cat([bright[:20], dark[:20]]), bright[:7]]
    stream += [torch.cat([dark, dark + 0.1]), dark, bright]
    asked: dict[bool, list[str]] = {True: [], False: []}
    logits: dict[bool, list[Tensor]] = {True: [], False: []}
    for enabled in (True, False):
        adapter = build(domains=2, step_every=40, warmup_images=warmup)
        adapter.ahead.enabled = enabled

        def call(function: Any, *inputs: Any, on: bool = enabled) -> Any:
            asked[on].append(function.__name__)
            return function(*inputs)

        monkeypatch.setattr(adapter.ahead, "replayed", call)
        logits[enabled] = [adapter.predict(images).logits for images in stream]
    torch.testing.assert_close(logits[True], logits[False], rtol=0, atol=0)
    # One look per batch, and most of what the step asks was there already.
    assert asked[True].count("look") == 8 and asked[False].count("encode") == 8
    assert asked[True].count("encode") == 0
    assert asked[True].count("count") < asked[False].count("count")


def test_first_batches_are_as_sure_as_zero_shot_by_default() -> None:
    model, dataset = create_model("micro", device="cpu"), get_dataset("bundled")
    chosen = np.random.default_rng(0).permutation(len(dataset))[:64].tolist()
    images = [dataset.load(i) for i in chosen]

    def sure(name: str, calibrate: bool | None = None) -> float:
        run = predict(images, dataset.names, model=model, method=name, calibrate=calibrate)
        return sum(row["probability"] for row in run.rows) / 64

    zero_shot, uncalibrated = sure("zero_shot"), sure("domain_norm", False)
    assert abs(sure("domain_norm") - zero_shot) < (zero_shot - uncalibrated) / 4


def test_calibration_changes_no_class_and_adds_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dataset = create_model("micro", device="cpu"), get_dataset("bundled")
    config = DomainNormConfig(settled_steps=1, settled_every=128, vote_memory=64)
    batches = [batch for batch, _ in Stream(dataset, model.preprocess, 64, limit=384)]
    plain, calibrated = (create_method("domain_norm", model, dataset.prompts, config) for _ in "ab")
    calibrated.enable(reject=None, calibrate=None)
    monkeypatch.setattr(model, "encode_image", lambda *_, **__: pytest.fail("encoded plainly"))
    lent = []
    for batch in batches:
        one, other = plain.predict(batch), calibrated.predict(batch)
        lent.append("zero_shot" in other.evidence)
        assert one.logits.argmax(dim=1).equal(other.logits.argmax(dim=1))
        assert not one.logits.equal(other.logits)
    assert any(lent) and not all(lent)
