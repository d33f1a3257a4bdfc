"""Domain prompts: loss and keys by hand, the step by autograd, the behaviour on a stream."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cliquetta.methods.scap.domain import (
    DomainSCAP,
    DomainSCAPConfig,
    believed,
    clique_vote,
    domain_loss,
    evenness,
    target_marginal,
)
from cliquetta.methods.scap.domain_keys import DomainKeys, absorb, domain_distance, signature
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.scenes import NAMES, build_model, make_batches

MODEL = build_model(0)


def test_evenness_counts_the_equally_frequent() -> None:
    assert float(evenness(torch.full((8,), 1000.0))) == pytest.approx(1.0)
    two = torch.tensor([1000.0, 1000.0] + [0.0] * 6)
    assert float(evenness(two)) == pytest.approx(2 / 8, rel=1e-3)


def test_evenness_of_few_answers_is_not_far_too_low() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [
        torch.randint(0, 80, (64,), generator=generator).bincount(minlength=80) for _ in range(50)
    ]
    shares = [counts[counts > 0] / 64 for counts in draws]
    plain = sum(float((-(q * q.log()).sum()).exp()) / 80 for q in shares) / 50
    found = sum(float(evenness(counts.float())) for counts in draws) / 50
    assert plain < 0.55 < 0.65 < found <= 1.0


def test_uneven_answers_are_believed_if_they_are_sure_enough() -> None:
    config = DomainSCAPConfig(least_even=0.4, most_even=0.8, even_slope=2.0, even_band=0.1)
    two, ten = torch.tensor([1e6, 1e6] + [0.0] * 8), torch.full((10,), 1e6)
    seven = torch.tensor([1e6] * 7 + [0.0] * 3)
    for confidence in (torch.tensor(0.3), torch.tensor(0.9)):
        assert float(believed(two, confidence, config)) == 1.0
        assert float(believed(ten, confidence, config)) == 0.0
    # Seven of ten against a limit of 0.4, of 0.4 + 2 * 0.18 = 0.76, and of 0.8 at most.
    for confidence, expected in ((0.3, 0.0), (0.68, 0.6), (0.95, 1.0)):  # type: ignore[assignment]
        found = float(believed(seven, torch.tensor(confidence), config))
        assert found == pytest.approx(expected, abs=1e-3)


def test_the_prior_can_be_fixed() -> None:
    answers, confidence = torch.tensor([5.0, 0.0, 0.0, 0.0]), torch.tensor(0.9)
    assert float(believed(answers, confidence, DomainSCAPConfig(prior="uniform"))) == 0.0
    even = torch.full((4,), 5.0)
    assert float(believed(even, confidence, DomainSCAPConfig(prior="zero-shot"))) == 1.0


def test_target_divides_out_the_streams_bias_only() -> None:
    stream = torch.tensor([0.8, 0.2])
    uniform = target_marginal(stream, stream, torch.tensor(0.0))
    torch.testing.assert_close(uniform, torch.tensor([0.5, 0.5]))
    kept = target_marginal(torch.tensor([0.3, 0.7]), stream, torch.tensor(1.0))
    torch.testing.assert_close(kept, torch.tensor([0.3, 0.7]))
    # A batch that holds one class alone keeps it, however biased the stream is.
    alone = target_marginal(torch.tensor([0.0, 1.0]), stream, torch.tensor(0.0))
    torch.testing.assert_close(alone, torch.tensor([0.0, 1.0]))


def test_loss_by_hand() -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
    p = logits.softmax(-1)
    certain = -(p[0] * p[0].log()).sum()
    marginal, target = p.mean(0), torch.tensor([0.25, 0.75])
    expected = certain + 2 * (marginal * (marginal / target).log()).sum()
    torch.testing.assert_close(domain_loss(logits, target, 0.5, 2.0), expected)


def test_vote_mixes_in_the_nearest_images_only() -> None:
    features = l2_normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.1, 0.9]])
    voted = clique_vote(p, features, neighbours=1, share=0.4)
    torch.testing.assert_close(voted[0], 0.6 * p[0] + 0.4 * p[1])
    torch.testing.assert_close(clique_vote(p, features, 1, 0.0), p)
    torch.testing.assert_close(clique_vote(p[:1], features[:1], 5, 0.5), p[:1])


def test_first_step_equals_autograd_through_the_whole_tower() -> None:
    images = make_batches(4, 1, 6)[0]
    config = DomainSCAPConfig(prompt_length=2, full_batch=6, full_doubt=0.9)
    adapter = DomainSCAP(MODEL, ClassPrompts(NAMES), config, seed=3)
    start = adapter.memory["prompt"][0].clone()
    leaf = start.clone().requires_grad_()
    prefix = {block: Prefix(leaf[block][None]) for block in range(len(leaf))}
    scale, words = MODEL.scale, adapter.classifier
    plain = (scale * MODEL.encode_image(images, normalize=True) @ words.T).softmax(-1)
    confidence = plain.amax(dim=1).mean()
    answers = plain.argmax(dim=1).bincount(minlength=len(NAMES)).to(plain)
    belief = believed(answers, confidence, config)
    target = target_marginal(plain.mean(0), plain.mean(0), belief)
    features = MODEL.encode_image(images, prefix=prefix, normalize=True)
    teachers = 0.5 + 0.5 * float(belief)
    domain_loss(scale * features @ words.T, target, teachers, 1.0).backward()
    assert leaf.grad is not None

    adapter.predict(Batch(images))
    gradient, memory = leaf.grad, adapter.memory
    torch.testing.assert_close(memory["first_moment"][0], 0.1 * gradient, atol=1e-12, rtol=0)
    rate = 0.1 * min(1.0, (1 - float(confidence)) / 0.9)
    moved = start - rate * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(memory["prompt"][0], moved, rtol=0, atol=1e-9)


def test_small_batches_take_small_steps() -> None:
    images = make_batches(4, 1, 4)[0]
    moves = []
    for full in (4, 16):
        config = DomainSCAPConfig(prompt_length=1, full_batch=full)
        adapter = DomainSCAP(MODEL, ClassPrompts(NAMES), config, seed=0)
        start = adapter.memory["prompt"].clone()
        adapter.predict(Batch(images))
        moves.append(float((adapter.memory["prompt"] - start).abs().max()))
    assert moves[0] == pytest.approx(4 * moves[1])


def test_learning_lowers_the_loss_that_it_is_given() -> None:
    """Switched off (rate 0) the entropy of a repeated batch stays; switched on it falls."""
    images = make_batches(7, 1, 8)[0]

    def mean_entropy(rate: float) -> float:
        config = DomainSCAPConfig(
            learning_rate=rate, full_batch=8, full_doubt=0.0, vote=0.0, diversity=0.0
        )
        adapter = DomainSCAP(MODEL, ClassPrompts(NAMES), config, seed=0)
        for _ in range(6):
            logits = adapter.predict(Batch(images)).logits
        p = logits.softmax(-1)
        return float(-(p * p.clamp_min(1e-12).log()).sum(-1).mean())

    assert mean_entropy(0.1) < mean_entropy(0.0) - 0.02


@pytest.mark.parametrize(
    "wrong",
    [
        {"teachers": 0.0},
        {"vote": 1.5},
        {"least_even": 0.9},
        {"even_band": 0.0},
        {"even_slope": -1.0},
        {"domains": 0},
        {"zero_shot_share": 2.0},
        {"prior": "balanced"},
        {"steps": 0},
        {"learning_rate": -1},
    ],
    ids=str,
)
def test_meaningless_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="scap_domain"):
        DomainSCAPConfig(**wrong)


def test_log_probabilities_are_normalised() -> None:
    images = make_batches(1, 1, 5)[0]
    logits = (
        DomainSCAP(MODEL, ClassPrompts(NAMES), DomainSCAPConfig()).predict(Batch(images)).logits
    )
    assert math.isclose(float(logits.exp().sum(-1).max()), 1.0, abs_tol=1e-5)


def test_distance_is_cohens_d_squared_by_hand() -> None:
    known, batch = torch.tensor([[0.0], [2.0]]), torch.tensor([[5.0], [7.0], [6.0]])
    empty = DomainKeys(torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, 1))
    keys = absorb(known, empty)
    assert (float(keys.count), float(keys.mean), float(keys.scatter)) == (2.0, 1.0, 2.0)
    variance = (2.0 + 2.0) / (2 + 3 - 2)
    expected = (6.0 - 1.0) ** 2 / variance - (1 / 3 + 1 / 2)
    assert float(domain_distance(batch, keys)) == pytest.approx(expected)
    assert math.isinf(float(domain_distance(batch, empty)))


def test_keys_absorb_batch_by_batch_what_they_would_absorb_at_once() -> None:
    rows = torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros(1, 5, dtype=torch.float64)
    keys = DomainKeys(torch.zeros(1, dtype=torch.float64), zero, zero)
    for part in rows.split(7):
        keys = absorb(part, keys)
    torch.testing.assert_close(keys.mean[0], rows.mean(0))
    torch.testing.assert_close(keys.scatter[0] / 29, rows.var(0))


def test_distance_within_a_domain_is_near_zero_whatever_the_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    empty = DomainKeys(torch.zeros(1), torch.zeros(1, 400), torch.zeros(1, 400))
    for known, size in ((64, 64), (640, 8), (2000, 64)):
        keys = absorb(torch.randn(known, 400, generator=generator), empty)
        same, other = torch.randn(size, 400, generator=generator), 1.0
        assert abs(float(domain_distance(same, keys))) < 0.1
        assert float(domain_distance(same + other, keys)) > 0.8


def test_signature_leaves_the_class_token_out() -> None:
    early = torch.tensor([[[9.0], [1.0], [3.0]]])
    torch.testing.assert_close(signature(early), torch.tensor([[2.0, 2.0**0.5]]))


def test_a_domain_that_comes_back_finds_its_prompt_again() -> None:
    bright, dark = (make_batches(2, 1, 40)[0] + light for light in (0.0, -3.0))
    config = DomainSCAPConfig(prompt_length=1, domains=2)
    adapter = DomainSCAP(MODEL, ClassPrompts(NAMES), config)
    visits = []
    for images in (bright, dark, bright, dark):
        visits.append(adapter.predict(Batch(images)).evidence["domain"])
    assert visits == [0, 1, 0, 1]
    assert adapter.memory["key_count"].tolist() == [80, 80]
    assert adapter.memory["steps"].tolist() == [2, 2]

    one = DomainSCAP(MODEL, ClassPrompts(NAMES), DomainSCAPConfig(prompt_length=1, domains=1))
    assert [one.predict(Batch(x)).evidence["domain"] for x in (bright, dark)] == [0, 0]


def test_the_domain_not_met_for_longest_makes_room() -> None:
    batches = [make_batches(2, 1, 40)[0] + light for light in (0.0, -3.0, 3.0)]
    config = DomainSCAPConfig(prompt_length=1, domains=2)
    adapter = DomainSCAP(MODEL, ClassPrompts(NAMES), config)
    visits = [adapter.predict(Batch(batches[i])).evidence["domain"] for i in (0, 1, 0, 2)]
    assert visits == [0, 1, 0, 1]
    assert adapter.memory["key_count"].tolist() == [80, 40]
    assert adapter.memory["steps"].tolist() == [2, 1]


def test_where_clip_is_sure_its_answer_is_mixed_in() -> None:
    images = make_batches(1, 1, 5)[0]
    sure = DomainSCAPConfig(full_doubt=1e9, zero_shot_share=1.0, vote=0.0)
    adapter = DomainSCAP(MODEL, ClassPrompts(NAMES), sure)
    plain = MODEL.scale * MODEL.encode_image(images, normalize=True) @ adapter.classifier.T
    found = adapter.predict(Batch(images)).probabilities
    torch.testing.assert_close(found, plain.softmax(-1).float(), atol=1e-5, rtol=1e-4)
