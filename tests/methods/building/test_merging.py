"""Joining what several copies learned: caches exactly, parameters by averages, domains by keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.domain_norm.merging import match_domains
from cliquetta.methods.registry import create_method
from cliquetta.methods.state import StateMismatchError, merge_states, pack_state
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.scenes import NAMES, build_model, make_batches

MODEL = build_model(0)


def build(method: str) -> Adapter:
    return create_method(method, MODEL, NAMES)


def learn(adapter: Adapter, batches: list[Tensor], start: bytes | None = None) -> bytes:
    """The state after some batches."""
    if start is not None:
        merge_states(adapter, [start])
    for images in batches:
        adapter.predict(images)
    return pack_state(adapter)


@pytest.mark.parametrize("method", ["tda", "dmn", "oga"])
def test_caches_are_those_of_one_copy_that_saw_everything(method: str) -> None:
    """Also where all copies started from a cache that was filled before."""
    batches = make_batches(5, 9, 8)
    start = learn(build(method), batches[:2])
    parts = [learn(build(method), batches[i : i + 2], start) for i in (2, 4, 6)]
    joined = build(method)
    one = build(method)
    merge_states(joined, parts)
    learn(one, batches[:8])
    torch.testing.assert_close(joined.state_dict(), one.state_dict())
    expected = one.predict(batches[8]).logits
    torch.testing.assert_close(joined.predict(batches[8]).logits, expected)


def test_layernorms_are_averaged(tmp_path: Path) -> None:
    batches = make_batches(6, 4, 8)
    copies = [build("tent"), build("tent")]
    for index, adapter in enumerate(copies):
        learn(adapter, batches[2 * index : 2 * index + 2])
        adapter.save(tmp_path / f"{index}.safetensors")
    joined = build("tent")
    merge_states(joined, [tmp_path / "0.safetensors", tmp_path / "1.safetensors"])
    first, second = (adapter.state_dict() for adapter in copies)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    mean["norms.steps"] = first["norms.steps"]
    torch.testing.assert_close(joined.state_dict(), mean)


def test_states_that_cannot_be_joined_are_refused() -> None:
    states = [learn(build("ramen"), make_batches(7, 1, 8)) for _ in range(2)]
    with pytest.raises(UserError, match="ramen"):
        merge_states(build("ramen"), states)
    with pytest.raises(StateMismatchError):
        merge_states(build("tda"), states)
    merge_states(build("ramen"), states[:1])


def domain_norm(count: int, **options: Any) -> list[DomainNorm]:
    config = DomainNormConfig(**options)
    return [DomainNorm(MODEL, ClassPrompts(NAMES), config) for _ in range(count)]


def test_a_shared_start_is_counted_once_and_its_displacement_not_multiplied() -> None:
    """A hundred steps, then four copies of five each: the start, and what is new carried on."""
    batches = make_batches(8, 12, 64)
    before, joined, *copies = domain_norm(6, settled_every=64)
    start = learn(before, batches[:4] * 25)
    parts = [batches[i : i + 5] for i in (4, 5, 6, 7)]
    states = [learn(one, part, start) for one, part in zip(copies, parts, strict=True)]
    merge_states(joined, states, start)
    old, new, *ends = (one.state.domains[0] for one in (before, joined, *copies))
    assert [int(one.norms.steps) for one in (old, new, *ends)] == [100, 120, *[105] * 4]
    assert (
        int(new.images) == float(new.counts.images) == float(new.key.images) == 64 * 120
    )
    moved = torch.stack([one.norms.values - old.norms.values for one in ends]).mean(
        dim=0
    )
    # The rate is at its floor by then, so that twenty steps are four times as long as
    # five.
    torch.testing.assert_close(new.norms.values, old.norms.values + 4 * moved)
    added = [one.counts.marginal - old.counts.marginal for one in ends]
    torch.testing.assert_close(
        new.counts.marginal, old.counts.marginal + torch.stack(added).sum(0)
    )
    new_means = [(105 * one.key.mean - 100 * old.key.mean) / 5 for one in ends]
    mean = (100 * old.key.mean + 5 * torch.stack(new_means).sum(0)) / 120
    torch.testing.assert_close(new.key.mean, mean, atol=1e-6, rtol=1e-6)


def shifted(batches: list[Tensor]) -> list[Tensor]:
    """Move images to another domain."""
    return [3.0 - 2.0 * images for images in batches]


def test_domains_that_are_the_same_are_joined_and_others_kept() -> None:
    batches = make_batches(8, 8, 64)
    a, b, joined, fresh = domain_norm(4)
    states = [learn(a, batches[:4]), learn(b, shifted(batches[4:6]) + batches[6:8])]
    merge_states(joined, states)
    one = a.state
    two = b.state
    both = joined.state
    assert match_domains([one, two], 0.1, 8)[0] == [(0, 0), (1, 1)]
    counts = [float(domain.key.images) for domain in both.domains]
    assert counts[:2] == [64.0 * 6, 64.0 * 2]
    assert not any(counts[2:])
    assert [int(domain.images) for domain in both.domains] == counts
    first = one.domains[0]
    second = two.domains[1]
    merged = both.domains[0]
    torch.testing.assert_close(
        merged.key.mean, (4 * first.key.mean + 2 * second.key.mean) / 6
    )
    # Four and two steps, the n-th of which is 1 / sqrt(n) of the first; one copy takes
    # six.
    path = [sum(n**-0.5 for n in range(1, steps + 1)) for steps in (4, 2, 6)]
    start = fresh.state.domains[0].norms.values
    moved = (4 * (first.norms.values - start) + 2 * (second.norms.values - start)) / 6
    farther = path[2] / ((4 * path[0] + 2 * path[1]) / 6)
    torch.testing.assert_close(merged.norms.values, start + farther * moved)
    assert [int(domain.norms.steps) for domain in both.domains] == [6, 2, 0, 0]
    for name, beta in (("first", 0.9), ("second", 0.999)):
        four = getattr(first.norms, name)
        two_more = getattr(second.norms, name)
        six = getattr(merged.norms, name)
        mean = (4 * four / (1 - beta**4) + 2 * two_more / (1 - beta**2)) / 6
        torch.testing.assert_close(six, mean * (1 - beta**6))
    torch.testing.assert_close(
        both.domains[1].norms.values, two.domains[0].norms.values
    )
    for images, domain in ((batches[0], 0), (shifted(batches[:1])[0], 1)):
        assert joined.predict(images).evidence["domain"] == domain


def test_recent_images_of_every_state_are_kept() -> None:
    batches = make_batches(9, 4, 64)
    a, b, joined = domain_norm(3)
    merge_states(joined, [learn(a, batches[:2]), learn(b, batches[2:])])
    actual = joined.state
    one = a.state
    two = b.state
    newest = [state.window.features[32:] for state in (one, two)]
    torch.testing.assert_close(actual.window.features, torch.cat(newest))
    assert (actual.window.domain == 0).all()
