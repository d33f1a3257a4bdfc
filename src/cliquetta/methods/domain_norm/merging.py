"""States from elsewhere: what they may hold, and joining those of several copies of the method."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.adam import Adam, AdamState
from cliquetta.methods.building.memory import NON_NEGATIVE, UNIT, Range
from cliquetta.methods.building.ring import newest, write
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import distances, merge_keys
from cliquetta.methods.domain_norm.state import (
    Counts,
    Domain,
    Key,
    Network,
    State,
    Voters,
    Window,
    start_state,
)
from cliquetta.methods.domain_norm.step import rate_decay
from cliquetta.tensor_tree import flatten, unflatten

PER_CLASS = frozenset({"counts", "voters"})  # Void for another class list.
Members = list[tuple[int, int]]  # Domains, each by the number of its state and its own.


def ranges(domains: int, classes: int) -> dict[str, Range]:
    """Ranges of the tensors of a state, by the endings of their paths."""
    sums = (f"counts.{name}" for name in Counts._fields if name not in ("absent_logits", "moments"))
    positive = *sums, "norms.second", "voters.predictions", "key.images", "key.scatter"
    return {
        **dict.fromkeys(positive, NON_NEGATIVE),
        **dict.fromkeys(("voters.features", "window.features"), UNIT),
        **dict.fromkeys(("current", "window.domain"), Range(below=domains)),
        "voters.zero_shot": Range(below=classes),
    }


class Member(NamedTuple):
    """A domain of one state, and what it was in the state that all copies began with."""

    now: Domain
    before: Domain | None

    @property
    def new_images(self) -> int:
        """Images since the start."""
        before = 0 if self.before is None else int(self.before.images)
        return int(self.now.images) - before


def merge_states(
    states: Sequence[State], start: State | None, network: Network, config: DomainNormConfig
) -> State:
    """One state from several that began with ``start``, or with nothing.

    Counts are those of the start and what each copy added. LayerNorms move by the mean
    displacement, carried on as far as one copy would have come. Each keeps its newest images.
    """
    matched = match_domains(states, config.domain_threshold, config.domains)
    start_of_all = start_state(network, config)
    domains = list(start_of_all.domains)
    last_used = [[int(domain.last_used) for domain in state.domains] for state in states]
    for number, members in enumerate(matched):
        joined = [_member(states[i].domains[k], start, k, config) for i, k in members]
        age = max(last_used[i][k] / max(last_used[i]) for i, k in members)  # 1 for the last one
        domains[number] = _merge_domain(joined, age, domains[number], config)
    number_of = {member: number for number, members in enumerate(matched) for member in members}
    last = states[-1]
    current = number_of.get((len(states) - 1, int(last.current)), 0)
    windows = [state.window for state in states]
    window = _merge_windows(windows, number_of, start_of_all.window)
    return State(torch.tensor(current), tuple(domains), window, last.group)


def match_domains(states: Sequence[State], threshold: float, most: int) -> list[Members]:
    """Match domains across states: each, the largest first, joins the nearest in ``threshold``."""
    known = [
        (i, k, domain.key)
        for i, state in enumerate(states)
        for k, domain in enumerate(state.domains)
        if domain.key.images > 0
    ]
    groups: list[tuple[Key, Members]] = []
    for i, k, key in sorted(known, key=lambda one: -float(one[2].images)):
        far = distances(key, tuple(other for other, _ in groups)).tolist() if groups else []
        if far and min(far) <= threshold:
            joined, members = groups[far.index(min(far))]
            groups[far.index(min(far))] = (merge_keys(joined, key), [*members, (i, k)])
        else:
            groups.append((key, [(i, k)]))
    groups.sort(key=lambda group: -float(group[0].images))
    return [members for _, members in groups[:most]]


def _member(now: Domain, start: State | None, number: int, config: DomainNormConfig) -> Member:
    """A domain with its start, unless it was another domain then."""
    before = None if start is None else start.domains[number]
    if before is not None and (
        before.key.images == 0
        or before.key.images > now.key.images
        or float(distances(before.key, (now.key,))) > config.domain_threshold
    ):
        before = None
    return Member(now, before)


def _merge_domain(
    members: list[Member], age: float, fresh: Domain, config: DomainNormConfig
) -> Domain:
    starts = list({id(m.before): m.before for m in members if m.before is not None}.values())
    key, *keys = [
        *(one.key for one in starts),
        *(now.key if was is None else _key_since(now.key, was.key) for now, was in members),
    ]
    for other in keys:
        key = merge_keys(key, other)
    added = _added(members, starts)
    every = [member.now.counts for member in members]
    top = added.counts.classes.argmax()  # moments are of the most predicted class
    moments = [one.moments for one in every if one.classes.argmax() == top]
    counts = added.counts._replace(
        recent=torch.stack([one.recent for one in every]).mean(dim=0),
        predicted=torch.stack([one.predicted for one in every]).mean(dim=0),
        moments=torch.stack([torch.zeros_like(every[0].moments), *moments]).sum(dim=0),
    )
    return added._replace(
        norms=_merge_norms(members, fresh.norms, config),
        key=key,
        counts=counts,
        voters=_merge_voters(members, starts, fresh.voters),
        due=torch.stack([member.now.due for member in members]).amax(dim=0),
        last_used=torch.tensor(1 + int(1000 * age)),
    )


def _added(members: list[Member], starts: list[Domain]) -> Domain:
    """Sums of the starts and of what each member added to its own, which is of use for counts."""
    signed = [(1, flatten(one)) for one in (*starts, *(member.now for member in members))]
    signed += [(-1, flatten(member.before)) for member in members if member.before is not None]
    paths = signed[0][1]
    sums = {path: torch.stack([n * values[path] for n, values in signed]).sum(0) for path in paths}
    return unflatten(members[0].now, sums)


def _key_since(now: Key, before: Key) -> Key:
    """The key of the images after ``before``: :func:`merge_keys` solved for one of the two."""
    n, m = before.images, now.images - before.images
    mean = (now.images * now.mean - n * before.mean) / m.clamp_min(1)
    between = (mean - before.mean).square() * (n * m / now.images)
    return Key(m, mean, (now.scatter - before.scatter - between).clamp_min(0))


def _merge_norms(members: list[Member], fresh: AdamState, config: DomainNormConfig) -> AdamState:
    """LayerNorms and moments of members that took steps, from the start that all share."""
    begun = [was.norms if was and was.restarts == now.restarts else fresh for now, was in members]
    base = begun[0] if all(one is begun[0] for one in begun) else fresh
    learned = [member for member in members if member.now.norms.steps > base.steps]
    if not learned:
        return base
    norms = [member.now.norms for member in learned]
    images = torch.tensor([max(1, member.new_images) for member in learned])
    shares = (images / images.sum()).to(base.values)
    first, steps = int(base.steps), [int(one.steps) for one in norms]
    walked = sum(
        float(w) * path_length(first, n, config) for w, n in zip(shares, steps, strict=True)
    )
    last = first + sum(n - first for n in steps)
    farther = path_length(first, last, config) / walked
    moved = shares @ torch.stack([one.values - base.values for one in norms])

    def moment(values: list[Tensor], beta: float) -> Tensor:
        # a moment is as far below its mean as its steps are few, which Adam corrects
        means = [value / (1 - beta**n) for value, n in zip(values, steps, strict=True)]
        return (shares @ torch.stack(means)) * (1 - beta**last)

    beta1, beta2 = Adam(config.lr).betas
    return AdamState(
        base.values + farther * moved,
        moment([one.first for one in norms], beta1),
        moment([one.second for one in norms], beta2),
        torch.tensor(last),
    )


def path_length(first: int, last: int, config: DomainNormConfig) -> float:
    """Length of a straight path from step ``first`` to ``last``, in units of the first step."""
    return sum(rate_decay(step, config.lr_floor) for step in range(first + 1, last + 1))


def _merge_voters(members: list[Member], starts: list[Domain], empty: Voters) -> Voters:
    """The newest voters of every member of a domain, as many of each, after those of the start."""
    size = len(empty.zero_shot)
    parts = []
    for member in members:
        most = min(size // len(members), member.new_images)
        parts.append((member.now.voters, newest(member.now.voters.next, size)[:most]))
    room = size - sum(len(slots) for _, slots in parts)
    for one in starts:
        parts.insert(0, (one.voters, newest(one.voters.next, size)[: room // len(starts)]))
    chosen = [[column[slots[::-1]] for column in voters[:3]] for voters, slots in parts]
    columns = map(torch.cat, zip(*chosen, strict=True))
    return write(empty, **dict(zip(Voters._fields, columns, strict=False)))[0]


def _merge_windows(
    windows: list[Window], number_of: Mapping[tuple[int, int], int], merged: Window
) -> Window:
    """The newest images of every state's window, as many of each."""
    size = len(merged.domain)
    for i, window in enumerate(windows):
        numbers = [number_of.get((i, number), -1) for number in window.domain.tolist()]
        known = [slot for slot in newest(window.next, size) if numbers[slot] >= 0]
        slots = known[: size // len(windows)][::-1]
        rows = {"hidden": window.hidden[slots], "features": window.features[slots]}
        merged, _ = write(merged, **rows, domain=torch.tensor(numbers)[slots])
    return merged
