"""Losses of cliques by hand, and the identities that the engine rests on."""

import math

import pytest
import torch
from torch import Tensor

from cliquetta.methods.scap import losses
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.losses import (
    CliqueLosses,
    Members,
    clique_losses,
    entropy_loss,
    queries,
    query_logits,
)
from cliquetta.methods.scap.released import Rules
from tests._helpers.scenes import scap_config
from tests._helpers.tolerance import DOUBLE

TWO = torch.eye(2).double()
ONE_CLIQUE = torch.tensor([0, 0])


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def losses_of(members: Members, text: Tensor, scale: float, config: SCAPConfig) -> CliqueLosses:
    query_features, owner = queries(members, config.rules)
    logits = query_logits(query_features, owner, text, scale)
    return clique_losses(members, logits, owner, config)


def test_two_orthogonal_members_by_hand() -> None:
    """The mean feature is undecided; each member alone is not."""
    scale, sure = 3.0, 1 / (1 + math.exp(-3.0))
    for member_entropy, expected in ((False, math.log(2)), (True, binary_entropy(sure))):
        config = scap_config(member_entropy=member_entropy, concentration=0.5)
        losses = losses_of(Members(TWO, ONE_CLIQUE, 1), TWO, scale, config)
        assert float(losses.entropy) == pytest.approx(expected, abs=DOUBLE)
        # each is at squared distance 1/2 from (1/2, 1/2)
        assert float(losses.concentration) == pytest.approx(1.0, abs=DOUBLE)
        assert float(losses.total) == pytest.approx(expected + 0.5, abs=DOUBLE)
        assert losses.attributes.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("member_entropy", [False, True])
def test_certain_members_give_finite_losses_and_gradients(member_entropy: bool) -> None:
    """Probabilities that underflow to zero must not become NaN."""
    logits = torch.tensor([[400.0, 0.0, -300.0], [390.0, 0.0, -300.0]]).requires_grad_()
    owner, count = (ONE_CLIQUE, 1) if member_entropy else (torch.arange(2), 2)
    loss = entropy_loss(logits, owner, count, Rules(member_entropy=member_entropy))
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logits.grad).all()


def test_sums_over_cliques_are_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cliques at a time give what a scattered addition gives."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(40, 3, 2, generator=generator, dtype=torch.float64)
    clique = torch.randint(7, (40,), generator=generator)
    expected = torch.zeros(7, 3, 2, dtype=torch.float64).index_add_(0, clique, rows)
    seen: list[int] = []
    split = torch.split

    def watched(values: Tensor, size: int) -> tuple[Tensor, ...]:
        seen.append(size)
        return split(values, size)

    monkeypatch.setattr(losses, "CELLS", 100)
    monkeypatch.setattr(torch, "split", watched)
    torch.testing.assert_close(losses.clique_sum(rows, clique, 7), expected)
    assert seen == [2]
