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


def poison(name: str, start: Tensor) -> list[float]:
    """Numbers that a tensor of this name with this start may not hold."""
    if start.dtype in (torch.uint8, torch.bool):
        return []
    if not start.is_floating_point():
        below = min(0, int(start.min())) - 1
        return [below, 2**62]
    numbers = [torch.nan, -torch.inf, 1e30, -1e30]
    if not start.isinf().any():
        numbers.append(torch.inf)
    if NEVER_NEGATIVE.fullmatch(name):
        numbers.append(-1.0)
    if VECTORS.fullmatch(name):
        numbers.append(3.0)
    return numbers


def test_states_with_numbers_that_cannot_be_are_refused(
    adapter: Adapter, batch: Batch
) -> None:
    start = adapter.state_dict()
    logits_of(adapter, stream_of(batch)[:2])
    before = adapter.state_dict()
    for name, value in before.items():
        first_and_last = {0, value.numel() - 1}
        for number in poison(name, start[name]):
            for index in first_and_last:
                bad = value.clone()
                bad.view(-1)[index] = number
                with pytest.raises(UserError, match=re.escape(repr(name))):
                    adapter.load_state_dict({**before, name: bad})
                assert_same_state(adapter, before)


def test_states_with_the_largest_counters_are_refused_or_work(
    adapter: Adapter, batch: Batch
) -> None:
    parts = stream_of(batch)
    logits_of(adapter, parts[:2])
    before = adapter.state_dict()
    counters = [name for name in before if before[name].dtype is torch.long]

    for name in counters:
        for number in (0, 3, 10**6, 2**47):
            counter = torch.full_like(before[name], number)
            try:
                adapter.load_state_dict({**before, name: counter})
            except UserError:
                continue
            loaded = adapter.state_dict()
            try:
                (logits,) = logits_of(adapter, parts[2:3])
            except NonFiniteError:
                assert_same_state(adapter, loaded)
            else:
                assert logits.isfinite().all(), (name, number)
