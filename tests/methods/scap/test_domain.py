"""The domain prompt: its loss by hand, its step by autograd, its behaviour on a stream."""

from __future__ import annotations

import math

import pytest
import torch

from cliquetta.methods.contract import Batch
from cliquetta.methods.scap.domain import (
    DomainSCAP,
    DomainSCAPConfig,
    bias_power,
    clique_vote,
    domain_loss,
    effective_classes,
    target_marginal,
)
from cliquetta.model.block import Prefix
from cliquetta.model.clip import unit
from cliquetta.prompts.classes import ClassPrompts
from methods.scap.scenes import NAMES, build_model, make_batches

MODEL = build_model(0)


def test_effective_classes_counts_the_equally_likely() -> None:
    assert float(effective_classes(torch.full((8,), 1 / 8))) == pytest.approx(1.0)
    two = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert float(effective_classes(two)) == pytest.approx(2 / 8, rel=1e-4)


def test_bias_is_believed_when_few_classes_are_present() -> None:
    config = DomainSCAPConfig()
    few, four = torch.tensor([0.5, 0.5] + [0.0] * 8), torch.tensor([0.25] * 4 + [0.0] * 6)
    six, all_ten = torch.tensor([1 / 6] * 6 + [0.0] * 4), torch.full((10,), 0.1)
    for confidence in (torch.tensor(0.5), torch.tensor(0.9)):
        assert float(bias_power(few, confidence, config)) == 1.0
        assert float(bias_power(all_ten, confidence, config)) == 0.0
    # Six of ten: believed in part from sure answers, not at all from doubtful ones.
    assert float(bias_power(six, torch.tensor(0.6), config)) == 0.0
    assert float(bias_power(six, torch.tensor(0.9), config)) == pytest.approx(2 / 3, abs=1e-3)
    assert float(bias_power(four, torch.tensor(0.6), config)) == pytest.approx(2 / 3, abs=1e-3)
    assert float(bias_power(four, torch.tensor(0.9), config)) == 1.0


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
    config = DomainSCAPConfig(teachers=0.5, diversity=2.0)
    p = logits.softmax(-1)
    certain = -(p[0] * p[0].log()).sum()
    marginal, target = p.mean(0), torch.tensor([0.25, 0.75])
    expected = certain + 2 * (marginal * (marginal / target).log()).sum()
    torch.testing.assert_close(domain_loss(logits, target, config), expected)


def test_vote_mixes_in_the_nearest_images_only() -> None:
    features = unit(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    p = logits.softmax(-1)
    voted = clique_vote(logits, features, neighbours=1, share=0.4).exp()
    torch.testing.assert_close(voted[0], 0.6 * p[0] + 0.4 * p[1])
    torch.testing.assert_close(clique_vote(logits, features, 1, 0.0).exp(), p)
    torch.testing.assert_close(clique_vote(logits[:1], features[:1], 5, 0.5).exp(), p[:1])


def test_first_step_equals_autograd_through_the_whole_tower() -> None:
    images = make_batches(4, 1, 6)[0]
    config = DomainSCAPConfig(prompt_length=2, full_batch=6)
    adapter = DomainSCAP(MODEL, ClassPrompts(NAMES), config, seed=3)
    start = adapter.memory["prompt"].clone()
    leaf = start.clone().requires_grad_()
    prefix = {block: Prefix(leaf[block][None]) for block in range(len(leaf))}
    scale, words = MODEL.scale, adapter.classifier
    plain = (scale * MODEL.encode_image(images, normalize=True) @ words.T).softmax(-1)
    stream = plain.mean(0)
    confidence = plain.amax(dim=1).mean()
    target = target_marginal(plain.mean(0), stream, bias_power(stream, confidence, config))
    features = MODEL.encode_image(images, prefix=prefix, normalize=True)
    domain_loss(scale * features @ words.T, target, config).backward()
    assert leaf.grad is not None

    adapter.predict(Batch(images))
    gradient = leaf.grad
    torch.testing.assert_close(adapter.memory["first_moment"], 0.1 * gradient, atol=1e-12, rtol=0)
    moved = start - 0.1 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(adapter.memory["prompt"], moved, rtol=0, atol=1e-9)


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
        config = DomainSCAPConfig(learning_rate=rate, full_batch=8, vote=0.0, diversity=0.0)
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
        {"few_classes": 0.6},
        {"doubt": 0.9},
        {"steps": 0},
        {"learning_rate": -1},
    ],
    ids=str,
)
def test_meaningless_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="scap_domain"):
        DomainSCAPConfig(**wrong)


def test_log_probabilities_are_normalised() -> None:
    images = make_batches(1, 1, 5)[0]
    logits = (
        DomainSCAP(MODEL, ClassPrompts(NAMES), DomainSCAPConfig()).predict(Batch(images)).logits
    )
    assert math.isclose(float(logits.exp().sum(-1).max()), 1.0, abs_tol=1e-5)
