"""Losses of cliques by hand, and the identities that the engine rests on."""

import math

import pytest
import torch
from torch import Tensor

from cliquetta.methods.scap import losses
from cliquetta.methods.scap.losses import Members, classify, clique_losses, entropy_loss
from cliquetta.methods.scap.released import Rules
from tests._helpers.oracle import scap_config
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import DOUBLE

TWO = torch.eye(2).double()
ONE_CLIQUE = torch.tensor([0, 0])


@pytest.mark.parametrize("member_entropy", [False, True])
def test_losses_of_two_orthogonal_members_by_hand(member_entropy: bool) -> None:
    """The mean feature is undecided; each member alone is not."""
    config = scap_config(member_entropy=member_entropy, concentration=0.5)
    members = Members(TWO, ONE_CLIQUE, 1)
    queries, logits = classify(members, TWO, 3.0, config.rules)
    losses = clique_losses(members, logits, queries.clique, config)

    entropy = math.log(2)
    if member_entropy:
        p = 1 / (1 + math.exp(-3.0))
        entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    # each member is at squared distance 1/2 from their mean (1/2, 1/2)
    concentration = 2 * 0.5

    assert losses.attributes.tolist() == [[0.5, 0.5]]
    assert float(losses.entropy) == pytest.approx(entropy, abs=DOUBLE)
    assert float(losses.concentration) == pytest.approx(concentration, abs=DOUBLE)

    total = entropy + 0.5 * concentration
    assert float(losses.total) == pytest.approx(total, abs=DOUBLE)


@pytest.mark.parametrize("member_entropy", [False, True])
def test_certain_members_give_finite_losses_and_gradients(member_entropy: bool) -> None:
    """Probabilities that underflow to zero must not become NaN."""
    logits = torch.tensor(
        [
            [400.0, 0.0, -300.0],
            [390.0, 0.0, -300.0],
        ],
        requires_grad=True,
    )
    if member_entropy:
        owner = ONE_CLIQUE
        count = 1
    else:
        owner = torch.arange(2)
        count = 2

    rules = Rules(member_entropy=member_entropy)
    loss = entropy_loss(logits, owner, count, rules)
    loss.sum().backward()

    assert loss.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_sums_over_cliques_are_bounded_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few cliques at a time give what a scattered addition gives."""
    rows = draw(40, 3, 2)
    clique = torch.arange(40) ** 2 % 7
    expected = torch.zeros(7, 3, 2).double().index_add_(0, clique, rows)
    split = torch.split
    seen = []

    def watched(values: Tensor, size: int) -> tuple[Tensor, ...]:
        seen.append(size)
        return split(values, size)

    monkeypatch.setattr(losses, "CELLS", 100)
    monkeypatch.setattr(torch, "split", watched)

    torch.testing.assert_close(losses.clique_sum(rows, clique, 7), expected)
    assert seen == [2]
