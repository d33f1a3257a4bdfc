"""Joining what several copies learned: caches exactly, parameters by averages, domains by keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.state import (
    StateMismatchError,
    merge_states,
    pack_state,
)
from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.domain_norm.merging import match_domains
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
    parts = [
        learn(build(method), batches[2:4], start),
        learn(build(method), batches[4:6], start),
        learn(build(method), batches[6:8], start),
    ]
    joined = build(method)
    merge_states(joined, parts)

    one = build(method)
    learn(one, batches[:8])

    torch.testing.assert_close(joined.state_dict(), one.state_dict())
    expected = one.predict(batches[8]).logits
    actual = joined.predict(batches[8]).logits

    torch.testing.assert_close(actual, expected)


def test_layernorms_are_averaged(tmp_path: Path) -> None:
    batches = make_batches(6, 4, 8)
    first = build("tent")
    learn(first, batches[:2])
    first.save(tmp_path / "first.safetensors")
    second = build("tent")
    learn(second, batches[2:])
    second.save(tmp_path / "second.safetensors")

    joined = build("tent")
    files = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    merge_states(joined, files)

    one = first.state_dict()
    other = second.state_dict()
    expected = {name: (one[name] + other[name]) / 2 for name in one}
    # both took as many steps; a mean of integers would be a float
    expected["norms.steps"] = one["norms.steps"]

    torch.testing.assert_close(joined.state_dict(), expected)


def test_states_of_a_method_that_cannot_join_are_refused() -> None:
    (images,) = make_batches(7, 1, 8)
    first = learn(build("ramen"), [images])
    second = learn(build("ramen"), [images])

    with pytest.raises(UserError, match="ramen"):
        merge_states(build("ramen"), [first, second])
    # one alone needs no joining
    merge_states(build("ramen"), [first])


def test_states_of_another_method_are_refused() -> None:
    state = learn(build("ramen"), make_batches(7, 1, 8))
    with pytest.raises(StateMismatchError):
        merge_states(build("tda"), [state, state])


def domain_norm(count: int, **options: Any) -> list[DomainNorm]:
    config = DomainNormConfig(**options)
    return [DomainNorm(MODEL, ClassPrompts(NAMES), config) for _ in range(count)]


def test_a_shared_start_is_counted_once_and_its_displacement_not_multiplied() -> None:
    """A hundred steps, then four copies of five each: the start, and what is new carried on."""
    batches = make_batches(8, 12, 64)
    before, joined, *copies = domain_norm(6, settled_every=64)
    start = learn(before, batches[:4] * 25)
    states = []
    for first, copy in enumerate(copies, start=4):
        states.append(learn(copy, batches[first : first + 5], start))
    merge_states(joined, states, start)

    old = before.state.domains[0]
    new = joined.state.domains[0]
    ends = [copy.state.domains[0] for copy in copies]

    assert int(old.norms.steps) == 100
    assert [int(end.norms.steps) for end in ends] == [105, 105, 105, 105]
    assert int(new.norms.steps) == 120
    assert int(new.images) == 64 * 120
    assert float(new.counts.images) == 64 * 120
    assert float(new.key.images) == 64 * 120

    # The rate is at its floor by then, so that twenty steps are four times as long as
    # five.
    moved = [end.norms.values - old.norms.values for end in ends]
    mean_move = torch.stack(moved).mean(dim=0)
    expected = old.norms.values + 4 * mean_move

    torch.testing.assert_close(new.norms.values, expected)
    # Counts are sums: what every copy added is added.
    added = [end.counts.marginal - old.counts.marginal for end in ends]
    expected = old.counts.marginal + torch.stack(added).sum(0)

    torch.testing.assert_close(new.counts.marginal, expected)
    # The mean of a key is that of all images, each counted once.
    total = 100 * old.key.mean
    for end in ends:
        total = total + (105 * end.key.mean - 100 * old.key.mean)

    torch.testing.assert_close(new.key.mean, total / 120, atol=1e-6, rtol=1e-6)


def shifted(batches: list[Tensor]) -> list[Tensor]:
    """Move images to another domain."""
    return [3.0 - 2.0 * images for images in batches]


def test_domains_that_are_the_same_are_joined_and_others_kept() -> None:
    """The second copy opens another domain before it meets that of the first."""
    batches = make_batches(8, 8, 64)
    a, b, joined, fresh = domain_norm(4)
    state_of_a = learn(a, batches[:4])
    state_of_b = learn(b, shifted(batches[4:6]) + batches[6:8])
    merge_states(joined, [state_of_a, state_of_b])
    one = a.state
    two = b.state
    both = joined.state

    assert match_domains([one, two], 0.1, 8)[0] == [(0, 0), (1, 1)]

    counts = [float(domain.key.images) for domain in both.domains]
    assert counts == [64 * 6, 64 * 2, 0, 0]
    assert [int(domain.images) for domain in both.domains] == counts
    assert [int(domain.norms.steps) for domain in both.domains] == [6, 2, 0, 0]

    # The common domain: four batches of the first copy, two of the second.
    first = one.domains[0]
    second = two.domains[1]
    merged = both.domains[0]

    def mean_by_images(of_first: Tensor, of_second: Tensor) -> Tensor:
        return (4 * of_first + 2 * of_second) / 6

    mean = mean_by_images(first.key.mean, second.key.mean)
    torch.testing.assert_close(merged.key.mean, mean)

    # The n-th step is 1 / sqrt(n) of the first; one copy takes six.
    def path(steps: int) -> float:
        return sum(n**-0.5 for n in range(1, steps + 1))

    start = fresh.state.domains[0].norms.values
    move = mean_by_images(first.norms.values - start, second.norms.values - start)
    farther = path(6) / ((4 * path(4) + 2 * path(2)) / 6)

    torch.testing.assert_close(merged.norms.values, start + farther * move)
    # Adam's moments without their bias of so many steps
    for name, beta in (("first", 0.9), ("second", 0.999)):
        after_four = getattr(first.norms, name) / (1 - beta**4)
        after_two = getattr(second.norms, name) / (1 - beta**2)
        after_six = getattr(merged.norms, name) / (1 - beta**6)
        torch.testing.assert_close(after_six, mean_by_images(after_four, after_two))

    # The other domain is that of the second copy as it was.
    kept = both.domains[1].norms.values

    torch.testing.assert_close(kept, two.domains[0].norms.values)
    for images, domain in ((batches[0], 0), (shifted(batches[:1])[0], 1)):
        assert joined.predict(images).evidence["domain"] == domain


def test_recent_images_of_every_state_are_kept() -> None:
    batches = make_batches(9, 4, 64)
    a, b, joined = domain_norm(3)
    state_of_a = learn(a, batches[:2])
    state_of_b = learn(b, batches[2:])
    merge_states(joined, [state_of_a, state_of_b])
    # half of the window is the newest half of each
    newest_of_a = a.state.window.features[32:]
    newest_of_b = b.state.window.features[32:]
    window = joined.state.window

    torch.testing.assert_close(window.features, torch.cat([newest_of_a, newest_of_b]))
    assert (window.domain == 0).all()
