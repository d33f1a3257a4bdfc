"""Loss, votes and arrangement, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from cliquetta.methods.domain_norm.network import arrange
from cliquetta.methods.domain_norm.prior import ClassPrior
from cliquetta.methods.domain_norm.state import ring
from cliquetta.methods.domain_norm.step import (
    add_votes,
    certain_weights,
    domain_loss,
    nearest_images,
    target_marginal,
)
from cliquetta.model.clip import l2_normalize


def test_loss_by_hand() -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
    p = logits.softmax(-1)
    certain = -(p[0] * p[0].log()).sum()
    marginal, target = p.mean(0), torch.tensor([0.25, 0.75])
    expected = certain + 2 * (marginal * (marginal / target).log()).sum()
    torch.testing.assert_close(
        domain_loss(logits, target, certain_weights(2, torch.tensor(0.5)), 2.0), expected
    )


def test_the_nearest_image_votes_be_it_of_the_batch_or_remembered() -> None:
    features = l2_normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))
    others = l2_normalize(torch.tensor([[0.05, 1.0]]))
    nearest = nearest_images(features, others, 1)
    assert nearest.tolist() == [[1], [0], [3]]
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.1, 0.9]])
    voted = add_votes(p, torch.tensor([[0.2, 0.8]]), nearest, 0.4)
    torch.testing.assert_close(voted[0], 0.6 * p[0] + 0.4 * p[1])
    torch.testing.assert_close(voted[2], 0.6 * p[2] + 0.4 * torch.tensor([0.2, 0.8]))
    torch.testing.assert_close(add_votes(p, p[:0], nearest, 0.0), p)


def test_a_single_first_image_has_nobody_to_ask() -> None:
    features, p = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.3, 0.7]])
    nearest = nearest_images(features, features[:0], 5)
    torch.testing.assert_close(add_votes(p, p[:0], nearest, 0.5), p)


def test_the_arrangement_follows_the_images() -> None:
    confidence = torch.rand(50, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    rows = arrange(confidence)
    assert sorted(rows.tolist()) == list(range(50))
    torch.testing.assert_close(confidence[order][arrange(confidence[order])], confidence[rows])
    # A stretch of it is a sample of the batch, not its confident end.
    assert abs(float(confidence[rows[:25]].mean() - confidence.mean())) < 0.1


def test_a_ring_holds_the_last_values() -> None:
    kept, position = torch.full((5,), -1), torch.tensor(0)
    values = torch.arange(100)
    for start, count in ((0, 2), (2, 1), (3, 4), (7, 5), (12, 3), (15, 1)):
        places, position = ring(position, count, 5)
        kept[places] = values[start : start + count]
        end = start + count
        assert sorted(kept[kept >= 0].tolist()) == list(range(max(0, end - 5), end))
        assert min(int(position), 5) == min(end, 5)


def target(window: Tensor, stream: Tensor, prior: Tensor) -> Tensor:
    void = torch.empty(0)
    return target_marginal(window, ClassPrior(stream, prior, void, void, void))


def test_target_divides_out_the_streams_bias_only() -> None:
    stream, uniform = torch.tensor([0.8, 0.2]), torch.tensor([0.5, 0.5])
    torch.testing.assert_close(target(stream, stream, uniform), uniform)
    kept = target(torch.tensor([0.3, 0.7]), stream, stream)
    torch.testing.assert_close(kept, torch.tensor([0.3, 0.7]))
    # A window that holds one class alone keeps it, however biased the stream is.
    alone = target(torch.tensor([0.0, 1.0]), stream, uniform)
    torch.testing.assert_close(alone, torch.tensor([0.0, 1.0]))
