"""States from elsewhere: what they may hold, and joining those of several copies of the method."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.adam import Adam, AdamState
from cliquetta.methods.building.memory import NON_NEGATIVE, UNIT, Range
from cliquetta.methods.building.ring import newest, write
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import key_distances, merge_keys
from cliquetta.methods.domain_norm.state import (
    Counts,
    Domain,
    Key,
    Network,
    State,
    Window,
    start_state,
)
from cliquetta.methods.domain_norm.step import COLDEST, HOTTEST, rate_decay
from cliquetta.tensor_tree import flatten, unflatten

PER_CLASS = frozenset({"counts"})
"""Parts of a domain that mean nothing for another class list."""
Members = list[tuple[int, int]]
"""Domains, each by the number of its state and its own."""


def ranges(domains: int) -> dict[str, Range]:
    """List the ranges of the tensors of a state, by the endings of their paths."""
    signed = {"absent_logits", "moments"}
    sums = [f"counts.{name}" for name in Counts._fields if name not in signed]
    positive = (*sums, "norms.second", "key.images", "key.scatter")
    return {
        **dict.fromkeys(positive, NON_NEGATIVE),
        "window.features": UNIT,
        "temperature": Range(least=COLDEST / 2, below=2 * HOTTEST),
        "current": Range(below=domains),
        "window.domain": Range(below=domains),
    }


class Member(NamedTuple):
    """A domain of one state, and what it was in the state that all copies began with."""

    now: Domain
    before: Domain | None

    @property
    def new_images(self) -> int:
        """Count the images since the start."""
        before = 0 if self.before is None else int(self.before.images)
        return int(self.now.images) - before


def merge_states(
    states: Sequence[State],
    start: State | None,
    network: Network,
    config: DomainNormConfig,
) -> State:
    """Join several states that began with ``start``, or with nothing.

    Counts are those of the start and what each copy added. LayerNorms move by the mean
    displacement, carried on as far as one copy would have come. Each keeps its newest
    images.
    """
    matched = match_domains(states, config.domain_threshold, config.domains)
    start_of_all = start_state(network, config)
    domains = list(start_of_all.domains)
    last_used = [
        [int(domain.last_used) for domain in state.domains] for state in states
    ]
    number_of: dict[tuple[int, int], int] = {}
    for number, members in enumerate(matched):
        joined = [_member(states[i].domains[k], start, k, config) for i, k in members]
        # The domain that a state used last has the age 1.
        age = max(last_used[i][k] / max(last_used[i]) for i, k in members)
        domains[number] = _merge_domain(joined, age, domains[number], config)
        number_of |= dict.fromkeys(members, number)
    last = states[-1]
    current = number_of.get((len(states) - 1, int(last.current)), 0)
    windows = [state.window for state in states]
    return State(
        current=torch.tensor(current),
        domains=tuple(domains),
        window=_merge_windows(windows, number_of, start_of_all.window),
        group=last.group,
    )


def match_domains(
    states: Sequence[State], threshold: float, most: int
) -> list[Members]:
    """Match domains across states: each, the largest first, joins the nearest within reach."""
    # All domains with images, the largest first.
    every: list[tuple[int, int, Key]] = []
    for i, state in enumerate(states):
        for k, domain in enumerate(state.domains):
            if domain.key.images > 0:
                every.append((i, k, domain.key))
    every.sort(key=lambda one: -float(one[2].images))

    groups: list[tuple[Key, Members]] = []
    for i, k, key in every:
        keys = tuple(other for other, _ in groups)
        distances = key_distances(key, keys).tolist() if groups else []
        if distances and min(distances) <= threshold:
            nearest = distances.index(min(distances))
            joined, members = groups[nearest]
            groups[nearest] = (merge_keys(joined, key), [*members, (i, k)])
        else:
            groups.append((key, [(i, k)]))
    groups.sort(key=lambda group: -float(group[0].images))
    return [members for _, members in groups[:most]]


def _member(
    now: Domain, start: State | None, number: int, config: DomainNormConfig
) -> Member:
    """Pair a domain with its start, unless it was another domain then."""
    if start is None:
        return Member(now, None)
    before = start.domains[number]
    empty = bool(before.key.images == 0)
    larger = bool(before.key.images > now.key.images)
    if empty or larger:
        return Member(now, None)
    distance = float(key_distances(before.key, (now.key,)))
    return Member(now, before if distance <= config.domain_threshold else None)


def _merge_domain(
    members: list[Member], age: float, fresh: Domain, config: DomainNormConfig
) -> Domain:
    """Join the same domain of several states."""
    starts = _distinct_starts(members)
    keys = [one.key for one in starts]
    for member in members:
        before = member.before
        keys.append(
            member.now.key if before is None else _key_since(member.now.key, before.key)
        )
    key = keys[0]
    for other in keys[1:]:
        key = merge_keys(key, other)
    added = _added(members, starts)
    every = [member.now.counts for member in members]
    recent = torch.stack([one.recent for one in every])
    squares = torch.stack([one.recent_concentration for one in every])
    # Moments are of the most predicted class: those of another class are void.
    top = added.counts.classes.argmax()
    alike = [one.moments for one in every if one.classes.argmax() == top]
    moments = sum(alike, start=torch.zeros_like(every[0].moments))
    temperatures = torch.stack([member.now.temperature for member in members])
    return added._replace(
        norms=_merge_norms(members, fresh.norms, config),
        temperature=temperatures.log().mean().exp(),
        key=key,
        counts=added.counts._replace(
            recent=recent.mean(dim=0),
            recent_concentration=squares.mean(dim=0),
            moments=moments,
        ),
        due=torch.stack([member.now.due for member in members]).amax(dim=0),
        last_used=torch.tensor(1 + int(1000 * age)),
    )


def _distinct_starts(members: list[Member]) -> list[Domain]:
    """List what members began with, each start once."""
    starts: list[Domain] = []
    for member in members:
        before = member.before
        if before is not None and all(before is not known for known in starts):
            starts.append(before)
    return starts


def _added(members: list[Member], starts: list[Domain]) -> Domain:
    """Sum the starts and what each member added to its own, which is of use for counts."""
    positive = [flatten(one) for one in starts]
    negative = []
    for member in members:
        positive.append(flatten(member.now))
        if member.before is not None:
            negative.append(flatten(member.before))
    sums = {}
    for path in positive[0]:
        total = torch.stack([values[path] for values in positive]).sum(dim=0)
        for values in negative:
            total = total - values[path]
        sums[path] = total
    return unflatten(members[0].now, sums)


def _key_since(now: Key, before: Key) -> Key:
    """Compute the key of the images after ``before``: :func:`merge_keys` solved for it."""
    n = before.images
    m = now.images - n

    # Their sum is what the sum of all has beyond that of the earlier ones.
    total = now.images * now.mean - n * before.mean
    mean = total / m.clamp_min(1)

    step = mean - before.mean
    between = step.square() * (n * m / now.images)
    scatter = now.scatter - before.scatter - between
    return Key(images=m, mean=mean, scatter=scatter.clamp_min(0))


def _merge_norms(
    members: list[Member], fresh: AdamState, config: DomainNormConfig
) -> AdamState:
    """Join LayerNorms and moments of members that took steps, from the start that all share."""
    begun = [fresh if was is None else was.norms for _, was in members]
    base = begun[0] if all(one is begun[0] for one in begun) else fresh
    learned = [member for member in members if member.now.norms.steps > base.steps]
    if not learned:
        return base
    norms = [member.now.norms for member in learned]
    images = torch.tensor([max(1, member.new_images) for member in learned])
    shares = (images / images.sum()).to(base.values)

    # The mean displacement, carried on as far as one copy would have come in all steps.
    first = int(base.steps)
    steps = [int(one.steps) for one in norms]
    last = first + sum(own - first for own in steps)
    lengths = [path_length(first, own, config) for own in steps]
    walked = sum(float(share) * own for share, own in zip(shares, lengths, strict=True))
    farther = path_length(first, last, config) / walked
    displacements = torch.stack([one.values - base.values for one in norms])
    moved = shares @ displacements

    def moment(values: list[Tensor], beta: float) -> Tensor:
        # A moment is as far below its mean as its steps are few, which Adam corrects.
        means = [
            value / (1 - beta**own) for value, own in zip(values, steps, strict=True)
        ]
        mean = shares @ torch.stack(means)
        return mean * (1 - beta**last)

    beta1, beta2 = Adam(config.lr).betas
    return AdamState(
        values=base.values + farther * moved,
        first=moment([one.first for one in norms], beta1),
        second=moment([one.second for one in norms], beta2),
        steps=torch.tensor(last),
    )


def path_length(first: int, last: int, config: DomainNormConfig) -> float:
    """Compute the length of a straight path between two steps, in units of the first step."""
    steps = range(first + 1, last + 1)
    return sum(rate_decay(step, config.lr_floor) for step in steps)


def _merge_windows(
    windows: list[Window], number_of: Mapping[tuple[int, int], int], merged: Window
) -> Window:
    """Write the newest images of every state's window into one, as many of each."""
    size = len(merged.domain)
    share = size // len(windows)
    for i, window in enumerate(windows):
        # Numbers of the joined domains; images of one that was left out have none.
        old_numbers = window.domain.tolist()
        numbers = [number_of.get((i, number), -1) for number in old_numbers]
        of_a_domain = [slot for slot in newest(window.next, size) if numbers[slot] >= 0]

        # The oldest of them first.
        slots = of_a_domain[:share][::-1]
        merged, _ = write(
            merged,
            hidden=window.hidden[slots],
            features=window.features[slots],
            domain=torch.tensor(numbers)[slots],
        )
    return merged
