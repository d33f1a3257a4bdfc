"""Joining what several copies of the method learned on parts of a stream, domain by domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cliquetta.methods._shared.adam import Adam
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import KEYS, DomainKeys, key_distance, merge_keys
from cliquetta.methods.domain_norm.learning import rate_decay

State = Mapping[str, Tensor]
Places = list[tuple[int, int]]
"""Domains, each by the number of its state and its place there."""

ADDED = (
    *("counted", "confidence", "agreement", "entropy", "answers", "class_mass", "freed_mass"),
    *("background_weight", "background_total", "recent_mass", "recent_plain", "recent_adapted"),
    *("steps", "images", "restarts", "abstained"),
)
WINDOW, VOTERS = ("window_hidden", "window_features"), ("voters", "votes", "plain_votes")


def match_domains(states: Sequence[State], threshold: float, most: int) -> list[Places]:
    """Which domains of which states are one, those of most images first.

    From the largest on, a domain joins the one that lies nearest, if that is within ``threshold``
    as for a batch of the stream. Of more than ``most`` domains the smallest are forgotten.
    """
    known = [
        (float(count), state, place)
        for state, values in enumerate(states)
        for place, count in enumerate(values["key_count"].tolist())
        if count > 0
    ]
    groups: list[tuple[DomainKeys, Places]] = []
    for _, state, place in sorted(known, key=lambda domain: -domain[0]):
        key = DomainKeys(*(states[state][name][place : place + 1] for name in KEYS))
        distances = [float(key_distance(key, other)) for other, _ in groups]
        if distances and min(distances) <= threshold:
            nearest = distances.index(min(distances))
            joined, members = groups[nearest]
            groups[nearest] = (merge_keys(joined, key), [*members, (state, place)])
        else:
            groups.append((key, [(state, place)]))
    groups.sort(key=lambda group: -float(group[0].images))
    return [members for _, members in groups[:most]]


def merge_domains(
    states: Sequence[State], fresh: State, config: DomainNormConfig
) -> dict[str, Tensor]:
    """One memory from several; ``fresh`` is that of a domain that has seen nothing.

    Counts are added, LayerNorms are averaged by the images they were learned from and carried on
    as far as one copy would have come, and of the recent images every state keeps its newest.
    """
    matched = match_domains(states, config.domain_threshold, config.domains)
    merged = {name: value.clone() for name, value in states[-1].items()}
    for name, value in fresh.items():
        merged[name] = value.expand(merged[name].shape).clone()
    for place, members in enumerate(matched):
        _merge_domain(merged, states, place, members)
        _merge_learned(merged, states, place, members, fresh["norms"], config)
        _merge_voters(merged, states, place, members)
    place_of = {member: place for place, members in enumerate(matched) for member in members}
    _merge_window(merged, states, place_of)
    last = (len(states) - 1, int(states[-1]["domain"]))
    merged["domain"] = torch.tensor(place_of.get(last, 0))
    return merged


def _merge_domain(
    merged: dict[str, Tensor], states: Sequence[State], place: int, members: Places
) -> None:
    def of(name: str) -> Tensor:
        return torch.stack([states[state][name][old] for state, old in members])

    for name in ADDED:
        merged[name][place] = of(name).sum(dim=0)
    merged["due"][place] = of("due").amax(dim=0)
    key = DomainKeys(*(of(name)[:1] for name in KEYS))
    for one in range(1, len(members)):
        key = merge_keys(key, DomainKeys(*(of(name)[one : one + 1] for name in KEYS)))
    for name, value in zip(KEYS, key, strict=True):
        merged[name][place] = value[0]
    ages = [
        states[state]["last_met"][old] / states[state]["last_met"].max() for state, old in members
    ]
    merged["last_met"][place] = 1 + int(1000 * max(map(float, ages)))


def _merge_learned(
    merged: dict[str, Tensor],
    states: Sequence[State],
    place: int,
    members: Places,
    start: Tensor,
    config: DomainNormConfig,
) -> None:
    """LayerNorms and Adam's moments of a domain, from those of its members that took steps."""
    learned = [(state, old) for state, old in members if states[state]["steps"][old] > 0]
    if not learned:
        return

    def of(name: str) -> Tensor:
        return torch.stack([states[state][name][old] for state, old in learned])

    images, steps = of("images"), of("steps").tolist()
    shares = (images / images.sum()).to(start)
    walked = sum(float(w) * path_length(n, config) for w, n in zip(shares, steps, strict=True))
    farther = path_length(sum(steps), config) / walked
    merged["norms"][place] = start + farther * (shares @ (of("norms") - start))
    # A moment is as far below its mean as it has taken few steps, which Adam corrects.
    for name, beta in zip(("first_moment", "second_moment"), Adam(config.lr).betas, strict=True):
        mean = shares @ (of(name) / (1 - beta ** of("steps").to(start)[:, None]))
        merged[name][place] = mean * (1 - beta ** sum(steps))


def path_length(steps: int, config: DomainNormConfig) -> float:
    """Length of a path of ``steps`` steps in one direction, the first of length 1."""
    return sum(rate_decay(step, config.lr_floor) for step in range(1, steps + 1))


def _merge_voters(
    merged: dict[str, Tensor], states: Sequence[State], place: int, members: Places
) -> None:
    """The newest voters of every member of a domain, as many of each."""
    size, filled = merged["voters"].shape[1], 0
    for number, old in members:
        state = states[number]
        slots = newest(int(state["voters_next"][old]), size)[: size // len(members)][::-1]
        for name in VOTERS:
            merged[name][place, filled : filled + len(slots)] = state[name][old, slots]
        filled += len(slots)
    merged["voters_next"][place] = filled


def _merge_window(
    merged: dict[str, Tensor], states: Sequence[State], place_of: Mapping[tuple[int, int], int]
) -> None:
    """The newest images of every state's window, as many of each."""
    size, filled = len(merged["window_domain"]), 0
    merged["window_domain"].fill_(-1)
    for number, state in enumerate(states):
        domains = {
            slot: place_of.get((number, int(state["window_domain"][slot])))
            for slot in newest(int(state["window_next"]), size)
        }
        known = [slot for slot, domain in domains.items() if domain is not None]
        slots = known[: size // len(states)][::-1]
        target = slice(filled, filled + len(slots))
        for name in WINDOW:
            merged[name][target] = state[name][slots]
        merged["window_domain"][target] = torch.tensor([domains[slot] for slot in slots]).long()
        filled += len(slots)
    merged["window_next"] = torch.tensor(filled)


def newest(position: int, size: int) -> list[int]:
    """The filled slots of a ring buffer, the newest first."""
    return [(position - back) % size for back in range(1, min(position, size) + 1)]
