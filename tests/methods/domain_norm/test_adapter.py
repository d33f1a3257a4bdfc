"""Domain LayerNorms: the step by autograd, the behaviour on a stream, what is kept and what not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.domain_norm.health import health, in_words, verdict
from cliquetta.methods.domain_norm.prior import Figures, class_prior, count, information
from cliquetta.methods.registry import method_config
from cliquetta.methods.state import StateMismatchError, load_state
from cliquetta.methods.tda import TDA
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tolerance import FEATURE, LOGIT, STEP, SUM

MODEL = build_model(0)
PROMPTS = ClassPrompts(NAMES)


def build(seed: int = 0, **options: Any) -> DomainNorm:
    return DomainNorm(MODEL, PROMPTS, DomainNormConfig(**options), seed=seed)


def steps(adapter: DomainNorm) -> list[int]:
    return [int(domain.norms.steps) for domain in adapter.state.domains]


def images_of(adapter: DomainNorm) -> list[int]:
    return [int(domain.images) for domain in adapter.state.domains]


def zero_shot(adapter: DomainNorm, images: Tensor) -> Tensor:
    features = MODEL.encode_image(images, normalize=True)
    return (MODEL.scale * features @ adapter.network.text.T).softmax(-1)


def test_single_images_are_learned_from_like_a_batch() -> None:
    """With the window full, the step over remembered images is that over one batch of them."""
    images = make_batches(4, 1, 8)[0]
    options: dict[str, Any] = {"step_every": 8, "uncertainty_scale": 0.0, "prior": "uniform"}
    together, alone = build(**options), build(**options)
    together.predict(Batch(images))
    for image in images:
        alone.predict(Batch(image[None]))
    norms = [adapter.state.domains[0].norms.values for adapter in (alone, together)]
    torch.testing.assert_close(*norms, atol=STEP, rtol=0)


def test_order_inside_batches_that_do_not_fit_the_window_does_not_matter() -> None:
    batches = make_batches(5, 4, 10)
    shuffled = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    one, other = (build(step_every=7, vote_memory=12) for _ in range(2))
    for images in batches:
        straight = one.predict(Batch(images)).logits
        mixed = other.predict(Batch(images[shuffled])).logits
    torch.testing.assert_close(mixed, straight[shuffled], atol=LOGIT, rtol=LOGIT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"confident_fraction": 0.0},
        {"vote_share": 1.5},
        {"evenness_floor": 0.95},
        {"evenness_band": 0.0},
        {"domains": 0},
        {"prior": "balanced"},
        {"warmup_images": -1},
        {"lr": -1.0},
    ],
    ids=str,
)
def test_meaningless_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        DomainNormConfig(**wrong)


def lit(light: float) -> Tensor:
    """40 images of a domain of that brightness."""
    return make_batches(2, 1, 40)[0] + light


def test_a_domain_that_comes_back_finds_its_prompt_again() -> None:
    adapter = build(domains=2, step_every=40)
    visits = [
        adapter.predict(Batch(lit(light))).evidence["domain"] for light in (0.0, -3.0, 0.0, -3.0)
    ]
    assert visits == [0, 1, 0, 1]
    assert images_of(adapter) == [80, 80] and steps(adapter) == [2, 2]

    one = build(domains=1)
    assert [one.predict(Batch(lit(x))).evidence["domain"] for x in (0.0, -3.0)] == [0, 0]


def test_the_least_recently_used_domain_makes_room() -> None:
    adapter = build(domains=2, step_every=40)
    visits = [
        adapter.predict(Batch(lit(light))).evidence["domain"] for light in (0.0, -3.0, 0.0, 3.0)
    ]
    assert visits == [0, 1, 0, 1]
    assert images_of(adapter) == [80, 40] and steps(adapter) == [2, 1]


def test_images_of_a_mixed_batch_are_answered_with_the_prompts_of_their_domains() -> None:
    """A batch of two known domains is answered like the two halves by themselves."""
    bright, dark = lit(0.0), lit(-3.0)
    options: dict[str, Any] = {"vote_share": 0.0, "warmup_images": 0, "lr": 0.5}
    mixed, apart = (build(domains=2, step_every=40, **options) for _ in range(2))
    for adapter in (mixed, apart):
        for images in (bright, dark):
            adapter.predict(Batch(images))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    both = torch.cat([bright[:20], dark[:20]])[order]
    found = mixed.predict(Batch(both))
    assert found.evidence["domains_in_batch"] == 2
    halves = [apart.predict(Batch(images[:20])).logits for images in (bright, dark)]
    torch.testing.assert_close(found.logits, torch.cat(halves)[order], atol=LOGIT, rtol=LOGIT)


def test_images_that_are_not_finite_teach_nothing_and_the_others_are_answered() -> None:
    images = make_batches(1, 1, 6)[0]
    broken = torch.cat([images, images[:2]])
    broken[6, 0, 0, 0], broken[7] = torch.nan, torch.inf
    adapter, clean = build(step_every=6), build(step_every=6)
    # as features that overflow would come; pixels that are not finite are refused before
    found, expected = adapter._predict(Batch(broken)), clean.predict(Batch(images))
    torch.testing.assert_close(found.logits[:6], expected.logits)
    torch.testing.assert_close(found.logits[6:], torch.full((2, 6), -math.log(6)))
    assert found.evidence["non_finite"] == 2
    for name, value in adapter.state_dict().items():
        torch.testing.assert_close(value, clean.memory[name], atol=SUM, rtol=SUM)
    before, nothing = adapter.state_dict(), adapter._predict(Batch(broken[6:]))
    assert adapter.summarize(nothing) == {"images": 2}
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())


def test_a_collapsed_domain_is_restarted_and_counted() -> None:
    images = torch.cat(make_batches(1, 4, 32))
    adapter = build(domains=1, step_every=32)
    for part in images.split(32):
        adapter.predict(Batch(part))
    assert adapter.state.domains[0].restarts == 0
    plain = zero_shot(adapter, images).argmax(1).bincount(minlength=len(NAMES))
    assert plain.max() < 0.5 * plain.sum()
    answers = torch.tensor([[0.0, 200.0, 0, 0, 0, 3.0], [40.0, 40.0, 40, 40, 40, 3.0]]).double()
    domain = adapter.state.domains[0]
    domain = domain._replace(counts=domain.counts._replace(answers=answers))
    adapter.memory.store_tree(adapter.state._replace(domains=(domain,)))
    found = adapter.predict(Batch(images[:8]))
    after, fresh = adapter.state.domains[0], build(domains=1).state.domains[0]
    assert after.restarts == 1 == found.evidence["restarts"]
    assert after.norms.steps == 0 and torch.equal(after.norms.values, fresh.norms.values)
    # Votes of the collapsed domain went, too: those of this batch alone are there.
    assert after.voters.next == 8
    alone = build(domains=1, step_every=32, frequency_power=0.0, recent_images=0.0)
    expected = alone.predict(Batch(images[:8])).logits
    weights = class_prior(after.counts, adapter.config).weights
    votes = expected.exp() * weights
    torch.testing.assert_close(found.logits, (votes / votes.sum(1, keepdim=True)).log().float())


def test_the_learned_domain_outlives_a_change_of_classes(tmp_path: Any) -> None:
    images = make_batches(1, 1, 40)[0]
    adapter = build(step_every=40)
    adapter.predict(Batch(images))
    names = ("horse", "frog", "ship")
    other = adapter.with_classes(names)
    assert other.prompts.names == names
    kept, before = other.state.domains[0], adapter.state.domains[0]
    assert torch.equal(kept.norms.values, before.norms.values)
    assert before.counts.images == 40 and kept.counts.images == 0
    assert other.predict(Batch(images[:7])).logits.shape == (7, 3)

    adapter.save(tmp_path / "state")
    loaded = DomainNorm(MODEL, ClassPrompts(names), adapter.config)
    with pytest.raises(StateMismatchError, match="another class list"):
        load_state(loaded, tmp_path / "state")
    assert load_state(loaded, tmp_path / "state", other_classes=True).classes_changed
    for name in loaded.class_free:
        assert torch.equal(loaded.memory[name], adapter.memory[name]), name
    same = load_state(build(step_every=40), tmp_path / "state", other_classes=True)
    assert not same.classes_changed

    with pytest.raises(UserError, match="build a new one"):
        TDA(MODEL, PROMPTS, method_config("tda")).with_classes(names)


def test_every_memory_is_named_class_free_or_depends_on_the_classes() -> None:
    """A tensor that counts classes and is kept, or one that does not and is dropped, is a slip."""
    few, all_of = (
        DomainNorm(MODEL, ClassPrompts(NAMES[:count]), DomainNormConfig(domains=1))
        for count in (3, 6)
    )
    names = set(all_of.memory)
    per_class = {name for name in names if few.memory[name].shape != all_of.memory[name].shape}
    assert per_class and not per_class & all_of.class_free
    # Counts that belong to per-class sums, and votes that name classes, start again with them.
    beside = {
        f"counts.{name}" for name in ("images", "confidence", "entropy", "agreement", "asked")
    }
    beside |= {f"voters.{name}" for name in ("features", "zero_shot", "next")}
    assert per_class | {f"domains.0.{name}" for name in beside} | all_of.class_free == names


def test_evidence_tells_how_adaptation_is_doing() -> None:
    batches = make_batches(3, 3, 20)
    adapter = build(step_every=20, domains=1)
    lines = [health(adapter.predict(Batch(images)).evidence) for images in batches]
    assert "agreement" not in lines[0]  # nothing was asked before
    assert [line["distance"] > 0 for line in lines] == [True] * 3
    plain = torch.cat([zero_shot(adapter, images) for images in batches])
    assert lines[2]["confidence"] == pytest.approx(float(plain.amax(1).mean()), abs=LOGIT)
    # Neighbours are told by adapted features: without learning, by those of plain CLIP.
    still = build(step_every=20, domains=1, lr=0.0)
    lines = [health(still.predict(Batch(images)).evidence) for images in batches]
    answers = plain[:20].argmax(1)
    features = MODEL.encode_image(batches[0], normalize=True)
    similar = (features @ features.T).fill_diagonal_(-2).topk(10).indices
    expected = (answers[similar] == answers[:, None]).double().mean()
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
    for known, found in ((math.nan, expected), (0.5, expected), (0.05, "abstain")):
        seen = Figures(confidence, belief, agreement, known, 0)
        assert verdict(seen, restarts, 0.1) == found


def test_information_by_hand() -> None:
    """Two certain answers: all is explained; two equal ones: nothing; one image: not told."""
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


def test_images_that_say_nothing_are_answered_by_zero_shot_and_counted() -> None:
    """Nearly equal images get nearly equal answers, though what is learned would change them."""
    generator = torch.Generator().manual_seed(0)
    images = 0.5 + 1e-3 * torch.randn(96, 3, 16, 16, generator=generator).double()
    usual = torch.cat(make_batches(1, 3, 32))
    adapter, always = (build(step_every=32, domains=1, lr=0.1, abstain_below=a) for a in (0.1, 0.0))
    for part in images.split(32):
        found, other = adapter.predict(Batch(part)), always.predict(Batch(part))
    assert found.evidence["verdict"] == "abstain" and found.evidence["abstained"] == 64
    said = in_words("domain_norm", health(found.evidence))
    assert "without labels: abstain" in said and "64 images answered by zero-shot CLIP" in said
    torch.testing.assert_close(found.probabilities.double(), zero_shot(adapter, images[64:]))
    assert other.evidence["abstained"] == 0 and not torch.allclose(found.logits, other.logits)
    # Learning went on inside, and the exported answer to such an image is zero-shot's, too.
    one, other_domain = adapter.state.domains[0], always.state.domains[0]
    assert torch.equal(one.norms.values, other_domain.norms.values)
    assert torch.equal(one.voters.predictions, other_domain.voters.predictions)
    frozen = adapter.frozen_model()(images[:4]).softmax(dim=1)
    torch.testing.assert_close(frozen, zero_shot(adapter, images[:4]).to(frozen))
    # Images that differ end it; where nothing was abstained from, answers are bit for bit the same.
    for part in (usual, usual):
        found = adapter.predict(Batch(part))
    assert found.evidence["verdict"] != "abstain" and found.evidence["abstained"] == 64
    plain, never = (build(step_every=32, domains=1, abstain_below=a) for a in (0.1, 0.0))
    for part in usual.split(32):
        assert torch.equal(plain.predict(Batch(part)).logits, never.predict(Batch(part)).logits)


def test_single_images_that_stray_open_no_domain_but_a_change_of_domain_does() -> None:
    """One at a time: outliers stay in their domain; 16 images of another one open it."""
    generator = torch.Generator().manual_seed(5)
    images = make_batches(2, 1, 80)[0]
    images[40::8] += 2.5 * torch.randn(5, 1, 1, 1, generator=generator).double()
    adapter = build(step_every=16)
    for image in images:
        assert adapter.predict(Batch(image[None])).evidence["domain"] == 0
    visits = [adapter.predict(Batch(image[None])).evidence["domain"] for image in lit(-3.0)]
    assert visits[0] == 0 and set(visits[16:]) == {1}


def test_a_burst_of_another_domain_leaves_one_bit_for_bit_as_it_was() -> None:
    """Neither its LayerNorms nor its voters nor its next steps depend on the images between."""
    options: dict[str, Any] = {"domains": 2, "step_every": 40, "vote_memory": 64}
    plain, disturbed = (build(**options) for _ in range(2))
    for adapter in (plain, disturbed):
        adapter.predict(Batch(lit(0.0)))
    for _ in range(8):
        disturbed.predict(Batch(lit(-3.0)))
    assert images_of(disturbed) == [40, 320]
    for images in (lit(0.0), lit(0.1)):
        found, expected = (adapter.predict(Batch(images)) for adapter in (disturbed, plain))
        assert torch.equal(found.logits, expected.logits)
    assert steps(plain)[0] == 3


def lit_stream() -> list[Tensor]:
    """Batches of two domains in turn, mixed, of part of a window and of more than one."""
    bright, dark = lit(0.0), lit(-3.0)
    mixed = torch.cat([bright[:20], dark[:20]])
    return [bright, dark, bright, mixed, bright[:7], torch.cat([dark, dark + 0.1]), dark, bright]


@pytest.mark.parametrize("warmup", [0, 100])
def test_what_is_computed_ahead_changes_no_bit(warmup: int, monkeypatch: Any) -> None:
    asked: dict[bool, list[str]] = {True: [], False: []}
    logits: dict[bool, list[Tensor]] = {True: [], False: []}
    for enabled in (True, False):
        adapter = build(domains=2, step_every=40, warmup_images=warmup)
        adapter.ahead.enabled = enabled

        def call(function: Any, *inputs: Any, on: bool = enabled) -> Any:
            asked[on].append(function.__name__)
            return function(*inputs)

        monkeypatch.setattr(adapter.ahead, "replayed", call)
        logits[enabled] = [adapter.predict(Batch(images)).logits for images in lit_stream()]
    for found, expected in zip(logits[True], logits[False], strict=True):
        assert torch.equal(found, expected)
    # One look per batch, and most of what the step asks was there already.
    assert asked[True].count("look") == 8 and asked[False].count("encode") == 8
    assert asked[True].count("encode") == 0
    assert asked[True].count("count") < asked[False].count("count")
