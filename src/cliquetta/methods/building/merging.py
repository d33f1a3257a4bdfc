"""Joining what several copies of a method learned on parts of a stream."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from cliquetta.errors import UserError

MergeRule = Literal["mean", "cache", "first"]
"""Average, of counters the largest; of every class the entries of lowest entropy
(:mod:`.cache`); or as in the first state: of the names that a rule is given for, of all
if that is empty."""
States = Sequence[Mapping[str, Tensor]]


def merge_memories(
    states: States, rules: Sequence[tuple[str, MergeRule]], method: str
) -> dict[str, Tensor]:
    """Merge several memories of a method, each name by its rule."""
    merged: dict[str, Tensor] = {}
    for owner, rule in rules:
        beginning = f"{owner}." if owner else ""
        names = [name for name in states[0] if f"{name}.".startswith(beginning)]
        if names:
            parts = [{name: state[name] for name in names} for state in states]
            merged |= _RULES[rule](parts)
    if merged.keys() != states[0].keys():
        raise UserError(
            f"{method} cannot join what several copies of it learned: use one actor, or keep no "
            "state"
        )
    return merged


def _average(states: States) -> dict[str, Tensor]:
    """Average numbers; of counters take the largest."""
    merged = {}
    for name in states[0]:
        of_all = [state[name] for state in states]
        values = torch.stack(of_all)
        is_counter = not values.is_floating_point()
        merged[name] = values.amax(dim=0) if is_counter else values.mean(dim=0)
    return merged


def merge_caches(states: States) -> dict[str, Tensor]:
    """Keep the K entries of lowest ``entropy``, equal ones once, of (N, K, ...)."""
    names = list(states[0])
    by_entropy = next(name for name in names if name.rpartition(".")[2] == "entropy")
    capacity = states[0][by_entropy].shape[1]

    # All entries of a class beside each other, (N, K states, ...), repeated ones last.
    entries = {}
    for name in names:
        of_all = [state[name] for state in states]
        entries[name] = torch.cat(of_all, dim=1)
    entries = _sorted(entries, entries[by_entropy])
    repeated = _repeated(entries, by_entropy)
    entries[by_entropy] = entries[by_entropy].masked_fill(repeated, torch.inf)
    entries = _sorted(entries, entries[by_entropy])

    # What is left empty is as at the start: infinite entropy, and zero beside it.
    first = entries[by_entropy][:, :capacity]
    is_filled = first.isfinite()
    merged = {}
    for name, values in entries.items():
        empty = values.new_full((), torch.inf if name == by_entropy else 0)
        broadcast = is_filled.shape + (1,) * (values.ndim - 2)
        has_entry = is_filled.view(broadcast)
        merged[name] = torch.where(has_entry, values[:, :capacity], empty)
    return merged


def _sorted(cache: Mapping[str, Tensor], entropy: Tensor) -> dict[str, Tensor]:
    """Sort the entries (N, K, ...) of each class by entropy, stably."""
    order = entropy.argsort(dim=1, stable=True)
    classes = torch.arange(len(order), device=order.device)
    index = classes[:, None], order
    return {name: values[index] for name, values in cache.items()}


def _repeated(cache: Mapping[str, Tensor], name: str) -> Tensor:
    """Find the entries of a sorted cache that equal one before them, (N, K) bool."""
    entropy = cache[name]
    repeated = torch.zeros_like(entropy, dtype=torch.bool)
    for lag in range(1, entropy.shape[1]):
        # Equal entries have equal entropy, so that they are near each other: once no
        # two at this distance have, none farther apart do.
        later = entropy[:, lag:]
        is_equal = later == entropy[:, :-lag]
        if not (is_equal & later.isfinite()).any():
            break

        # All that is stored beside the entropy must be equal, too.
        is_same = torch.ones_like(is_equal)
        for values in cache.values():
            is_equal = values[:, lag:] == values[:, :-lag]
            if is_equal.ndim > 2:
                is_equal = is_equal.flatten(2).all(dim=2)
            is_same &= is_equal
        repeated[:, lag:] |= is_same
    return repeated


def _first(states: States) -> dict[str, Tensor]:
    """Take the first state."""
    return dict(states[0])


_RULES = {"mean": _average, "cache": merge_caches, "first": _first}
