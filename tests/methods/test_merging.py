"""Joining what several copies learned: caches exactly, parameters by averages, domains by keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods._shared.merging import merge_caches
from cliquetta.methods._shared.state import StateMismatchError, merge_states, pack_state, save_state
from cliquetta.methods.base import Adapter
from cliquetta.methods.domain_norm.domains import DomainKeys, key_distance, merge_keys
from cliquetta.methods.domain_norm.merging import match_domains
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from tests._helpers.scenes import NAMES, build_model, make_batches

Build = Callable[[str], Adapter]


@pytest.fixture(scope="module")
def model() -> CLIP:
    return build_model(0)


@pytest.fixture
def build(model: CLIP) -> Build:
    return lambda method: create_method(method, model, NAMES)


def learn(adapter: Adapter, batches: list[Tensor], start: bytes | None = None) -> bytes:
    """The state after some batches."""
    if start is not None:
        merge_states(adapter, [start])
    for images in batches:
        adapter.predict(images)
    return pack_state(adapter)


@pytest.mark.parametrize("method", ["tda", "dmn", "oga"])
def test_caches_are_those_of_one_copy_that_saw_everything(build: Build, method: str) -> None:
    """Also where all copies started from a cache that was filled before."""
    batches = make_batches(5, 9, 8)
    start = learn(build(method), batches[:2])
    parts = [learn(build(method), batches[i : i + 2], start) for i in (2, 4, 6)]
    joined, one = build(method), build(method)
    merge_states(joined, parts)
    learn(one, batches[:8])
    for name, value in one.state_dict().items():
        torch.testing.assert_close(joined.state_dict()[name], value)
    expected = one.predict(batches[8]).logits
    torch.testing.assert_close(joined.predict(batches[8]).logits, expected)


def test_cache_by_hand() -> None:
    inf = float("inf")
    first = {"entropy": torch.tensor([[0.1, 0.4]]), "keys": torch.tensor([[[1.0], [4.0]]])}
    second = {"entropy": torch.tensor([[0.1, inf]]), "keys": torch.tensor([[[1.0], [0.0]]])}
    third = {"entropy": torch.tensor([[0.1, 0.3]]), "keys": torch.tensor([[[9.0], [3.0]]])}
    found = merge_caches([first, second])
    assert found["entropy"].tolist() == first["entropy"].tolist()
    assert found["keys"].tolist() == [[[1.0], [4.0]]]
    found = merge_caches([second, third])
    assert found["keys"].tolist() == [[[1.0], [9.0]]]
    assert merge_caches([second, second])["entropy"].tolist() == [[pytest.approx(0.1), inf]]


def test_layernorms_are_averaged(build: Build, tmp_path: Path) -> None:
    batches = make_batches(6, 4, 8)
    copies = [build("tent"), build("tent")]
    for place, adapter in enumerate(copies):
        learn(adapter, batches[2 * place : 2 * place + 2])
        save_state(adapter, tmp_path / f"{place}.safetensors")
    joined = build("tent")
    merge_states(joined, [tmp_path / "0.safetensors", tmp_path / "1.safetensors"])
    for name, value in joined.state_dict().items():
        first, second = (adapter.state_dict()[name] for adapter in copies)
        wanted = (first + second) / 2 if value.is_floating_point() else first
        torch.testing.assert_close(value, wanted)


def test_what_cannot_be_joined_is_refused(build: Build) -> None:
    states = [learn(build("ramen"), make_batches(7, 1, 8)) for _ in range(2)]
    with pytest.raises(UserError, match="Ramen cannot join"):
        merge_states(build("ramen"), states)
    with pytest.raises(StateMismatchError, match="another method"):
        merge_states(build("tda"), states)
    merge_states(build("ramen"), states[:1])


def shifted(batches: list[Tensor]) -> list[Tensor]:
    """The same images in another domain."""
    return [3.0 - 2.0 * images for images in batches]


def test_domains_that_are_the_same_are_joined_and_others_kept(build: Build) -> None:
    batches = make_batches(8, 8, 64)
    a, b = build("domain_norm"), build("domain_norm")
    states = [learn(a, batches[:4]), learn(b, shifted(batches[4:6]) + batches[6:8])]
    joined = build("domain_norm")
    merge_states(joined, states)
    one, two, both = (adapter.state_dict() for adapter in (a, b, joined))
    assert match_domains([one, two], 0.1, 8)[0] == [(0, 0), (1, 1)]
    counts = both["key_count"].tolist()
    assert counts[:2] == [64.0 * 6, 64.0 * 2] and not any(counts[2:])
    assert both["images"].tolist()[:2] == counts[:2]
    signature = (4 * one["key_mean"][0] + 2 * two["key_mean"][1]) / 6
    torch.testing.assert_close(both["key_mean"][0], signature)
    # Four and two steps, the n-th of which is 1 / sqrt(n) of the first; one copy takes six.
    path = [sum(n**-0.5 for n in range(1, steps + 1)) for steps in (4, 2, 6)]
    start = build("domain_norm").state_dict()["norms"][0]
    moved = (4 * (one["norms"][0] - start) + 2 * (two["norms"][1] - start)) / 6
    farther = path[2] / ((4 * path[0] + 2 * path[1]) / 6)
    torch.testing.assert_close(both["norms"][0], start + farther * moved)
    assert both["steps"].tolist()[:2] == [6, 2]
    for name, beta in (("first_moment", 0.9), ("second_moment", 0.999)):
        means = (one[name][0] / (1 - beta**4), two[name][1] / (1 - beta**2))
        wanted = (4 * means[0] + 2 * means[1]) / 6 * (1 - beta**6)
        torch.testing.assert_close(both[name][0], wanted)
    assert torch.equal(both["norms"][1], two["norms"][0])
    for images, domain in ((batches[0], 0), (shifted(batches[:1])[0], 1)):
        assert joined.predict(images).evidence["domain"] == domain


def test_recent_images_of_every_state_are_kept(build: Build) -> None:
    batches = make_batches(9, 4, 64)
    a, b = build("domain_norm"), build("domain_norm")
    states = [learn(a, batches[:2]), learn(b, batches[2:])]
    joined = build("domain_norm")
    merge_states(joined, states)
    size = len(joined.memory["window_domain"])
    newest = [adapter.state_dict()["window_features"][-size // 2 :] for adapter in (a, b)]
    torch.testing.assert_close(joined.memory["window_features"], torch.cat(newest))
    assert (joined.memory["window_domain"] == 0).all()
    assert joined.memory["voters_next"].tolist() == [256, 0, 0, 0]
    for name in ("voters", "votes", "plain_votes"):
        both = torch.cat([adapter.memory[name][0, :128] for adapter in (a, b)])
        torch.testing.assert_close(joined.memory[name][0], both)


def test_keys_of_two_halves_are_those_of_the_whole() -> None:
    images = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))

    def key(rows: Tensor) -> DomainKeys:
        scatter = (rows - rows.mean(0)).square().sum(0, keepdim=True)
        return DomainKeys(torch.tensor([float(len(rows))]), rows.mean(0, keepdim=True), scatter)

    found, whole = merge_keys(key(images[:20]), key(images[20:])), key(images)
    for name in DomainKeys._fields:
        torch.testing.assert_close(getattr(found, name), getattr(whole, name))
    assert float(key_distance(key(images[:20]), key(images[20:]))) < 0.2
    assert float(key_distance(key(images[:20] + 3), key(images[20:]))) > 4
