"""States from elsewhere: numbers that no method can have written are refused."""

import re

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter, NonFiniteError
from cliquetta.methods.building.checks import logits_of, stream_of
from cliquetta.types import Batch
from tests._helpers.building import assert_same_state

NEVER_NEGATIVE = re.compile(
    r"(.*\.)?(entropy|entropies|doubt|average|scatter|second|\w*counts|priors|scores|covariances?)"
    r"|batches|.*key\.images|.*counts\.(images|confidence|entropy|agreement|classes|marginal"
    r"|absence|debiased|recent)|.*predicted\.\w+|.*voters\.predictions"
)  # What counts, entropies, sums of squares and of probabilities are called.
VECTORS = re.compile(r".*\.keys|(.*\.)?(features|text|embeddings|proxies|means)")
"""Features and texts, of length one or less; SCAP's ``keys`` may be longer."""


def poison(name: str, start: Tensor) -> tuple[float, ...]:
    """Numbers that a tensor of this name with this start may not hold."""
    if start.dtype in (torch.uint8, torch.bool):
        return ()
    if not start.is_floating_point():
        return (min(0, int(start.min())) - 1, 2**62)
    infinite = () if start.isinf().any() else (torch.inf,)
    negative = (-1.0,) if NEVER_NEGATIVE.fullmatch(name) else ()
    long = (3.0,) if VECTORS.fullmatch(name) else ()
    return (torch.nan, -torch.inf, 1e30, -1e30, *infinite, *negative, *long)


def test_states_with_numbers_that_cannot_be_are_refused(
    adapter: Adapter, batch: Batch
) -> None:
    start = adapter.state_dict()
    logits_of(adapter, stream_of(batch)[:2])
    before = adapter.state_dict()
    for name, value in before.items():
        for number in poison(name, start[name]):
            for index in {0, value.numel() - 1}:
                bad = value.clone()
                bad.view(-1)[index] = number
                with pytest.raises(UserError, match=re.escape(repr(name))):
                    adapter.load_state_dict({**before, name: bad})
                assert_same_state(adapter, before)


def test_states_with_the_largest_counters_are_refused_or_work(
    adapter: Adapter, batch: Batch
) -> None:
    logits_of(adapter, stream_of(batch)[:2])
    before = adapter.state_dict()
    for name, value in before.items():
        if value.dtype is not torch.long:
            continue
        for number in (0, 3, 10**6, 2**47):
            try:
                adapter.load_state_dict(
                    {**before, name: torch.full_like(value, number)}
                )
            except UserError:
                continue
            actual = adapter.state_dict()
            try:
                logits = logits_of(adapter, stream_of(batch)[2:3])
            except NonFiniteError:
                assert_same_state(adapter, actual)
            else:
                assert all(value.isfinite().all() for value in logits), (name, number)
