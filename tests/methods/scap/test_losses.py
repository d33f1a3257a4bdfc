"""Losses of cliques by hand, and the identities that the engine rests on."""

from __future__ import annotations

import math
from typing import Any

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
from tests.reference.scap_equations import ReferenceSettings, clique_loss

TWO = torch.eye(2).double()
ONE_CLIQUE = torch.tensor([0, 0])


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def random_unit(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).double()
    return x / x.norm(dim=1, keepdim=True)


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
@pytest.mark.parametrize("mean_concentration", [False, True])
def test_many_cliques_at_once_equal_one_at_a_time(
    member_entropy: bool, mean_concentration: bool
) -> None:
    features, text = random_unit(9, 6), random_unit(4, 6, seed=1)
    clique = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
    options: dict[str, Any] = {
        "member_entropy": member_entropy,
        "mean_concentration": mean_concentration,
        "concentration": 0.7,
    }
    found = losses_of(Members(features, clique, 4), text, 20.0, scap_config(**options))
    settings = ReferenceSettings(**options)
    for u in range(4):
        expected = clique_loss(features[clique == u], text, 20.0, settings)
        assert float(found.entropy[u]) == pytest.approx(float(expected.entropy), abs=DOUBLE)
        assert float(found.total[u]) == pytest.approx(float(expected.total), abs=DOUBLE)


@pytest.mark.parametrize("member_entropy", [False, True])
def test_text_of_each_clique_is_its_own(member_entropy: bool) -> None:
    features, clique = random_unit(5, 6), torch.tensor([0, 1, 1, 0, 1])
    text = torch.stack([random_unit(3, 6, seed=2), random_unit(3, 6, seed=3)])
    config = scap_config(member_entropy=member_entropy)
    found = losses_of(Members(features, clique, 2), text, 10.0, config)
    for u in range(2):
        alone = losses_of(Members(features, clique, 2), text[u], 10.0, config)
        torch.testing.assert_close(found.total[u], alone.total[u], rtol=0, atol=DOUBLE)
    assert (found.total - alone.total).abs()[0] > 1e-3


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
