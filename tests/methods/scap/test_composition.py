"""Which prompts every pass takes, against the oracle's composition, one pass at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cliquetta.methods.scap.cliques import Cliques, mine_cliques
from cliquetta.methods.scap.composition import compose_prompts, merge_passes, plan_passes
from tests._helpers.scenes import scap_config
from tests._helpers.tolerance import DOUBLE
from tests.reference import scap_equations as oracle
from tests.reference.scap_equations import ReferenceSettings

CLASSES = 4


def random_cliques(seed: int, b: int, k: int, repeats: bool) -> tuple[Cliques, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    similar = torch.rand(b, b, generator=generator) < 0.4
    top = torch.stack([torch.randperm(CLASSES, generator=generator)[:k] for _ in range(b)])
    count = torch.randint(0, 3, (CLASSES,), generator=generator)
    return mine_cliques(similar, top, repeats=repeats), top, count


def literal_passes(
    cliques: Cliques, top: Tensor, count: Tensor, own: Tensor, kept: Tensor, s: ReferenceSettings
) -> list[Tensor | None]:
    """The prompt of every pass: image by image and class by class."""
    found: list[Tensor | None] = []
    members = [set(row.nonzero()[:, 0].tolist()) for row in cliques.members]
    for j in range(len(top)):
        for i in top[j, :1].tolist() if s.best_class_only else top[j].tolist():
            mine = [g for g, c in enumerate(cliques.classes.tolist()) if c == i and j in members[g]]
            prompts = [own[int(cliques.set_of[g]), None, None] for g in mine]
            retained = [kept[i, None, None]] if s.retention and count[i] > 0 else []
            found.append(oracle.compose(prompts, retained, s))
    return found


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    b=st.integers(1, 8),
    k=st.integers(1, 3),
    best_class_only=st.booleans(),
    clique_combination=st.sampled_from(["concat", "mean"]),
    retained_combination=st.sampled_from(["concat", "mean"]),
    retention=st.booleans(),
    repeats=st.booleans(),
)
def test_composed_prompts_agree_with_the_oracle(
    seed: int,
    b: int,
    k: int,
    best_class_only: bool,
    clique_combination: str,
    retained_combination: str,
    retention: bool,
    repeats: bool,
) -> None:
    cliques, top, count = random_cliques(seed, b, k, repeats)
    generator = torch.Generator().manual_seed(seed + 1)
    own = torch.randn(len(cliques.sets), 3, generator=generator).double()
    kept = torch.randn(CLASSES, 3, generator=generator).double()
    options: dict[str, Any] = {
        "best_class_only": best_class_only,
        "clique_combination": clique_combination,
        "retained_combination": retained_combination,
        "retention": retention,
    }
    config = scap_config(**options)
    expected = literal_passes(cliques, top, count, own, kept, ReferenceSettings(**options))
    passes = plan_passes(cliques, top, count, config)
    table = own[passes.sets] if len(own) else torch.zeros(*passes.sets.shape, 3).double()
    prompts, mask = compose_prompts(
        table, passes.own, kept[passes.labels][:, None], passes.held[:, None], config
    )
    assert len(prompts) == len(expected) == b * passes.width
    assert passes.image.tolist() == [j for j in range(b) for _ in range(passes.width)]
    for row, prompt in enumerate(expected):
        assert bool(passes.prompted[row]) == (prompt is not None)
        found = prompts[row][mask[row]]
        wanted = torch.zeros(0, 3).double() if prompt is None else prompt[:, 0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=DOUBLE)


@pytest.mark.parametrize(("k", "N"), list(itertools.product([1, 2, 3], [3, 5])))
def test_merging_gives_the_mean_probability(k: int, N: int) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = 4 * torch.randn(6, k, N, generator=generator).double()
    expected = logits.softmax(dim=-1).mean(dim=1)
    found = merge_passes(logits).softmax(dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=DOUBLE)
