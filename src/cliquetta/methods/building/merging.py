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
    """One memory from several of a method, each name by its rule."""
    merged: dict[str, Tensor] = {}
    for owner, rule in rules:
        own = [
            name for name in states[0] if f"{name}.".startswith(owner and f"{owner}.")
        ]
        if own:
            merged |= _RULES[rule](
                [{name: state[name] for name in own} for state in states]
            )
    if merged.keys() != states[0].keys():
        raise UserError(
            f"{method} cannot join what several copies of it learned: use one actor, or keep no "
            "state"
        )
    return merged


def _average(states: States) -> dict[str, Tensor]:
    stacked = {
        name: torch.stack([state[name] for state in states]) for name in states[0]
    }
    return {
        name: values.mean(dim=0) if values.is_floating_point() else values.amax(dim=0)
        for name, values in stacked.items()
    }


def merge_caches(states: States) -> dict[str, Tensor]:
    """The K entries of lowest ``entropy`` of caches (N, K, ...); equal ones count once."""
    stacked = {
        name: torch.cat([state[name] for state in states], dim=1) for name in states[0]
    }
    name = next(name for name in stacked if name.rpartition(".")[2] == "entropy")
    stacked = _sorted(stacked, stacked[name])
    stacked[name] = stacked[name].masked_fill(_repeated(stacked, name), torch.inf)
    stacked = _sorted(stacked, stacked[name])
    capacity = states[0][name].shape[1]
    held = stacked[name][:, :capacity].isfinite()
    merged = {}
    for key, values in stacked.items():
        empty = values.new_full((), torch.inf if key == name else 0)
        shape = (*held.shape, *[1] * (values.ndim - 2))
        merged[key] = torch.where(held.view(shape), values[:, :capacity], empty)
    return merged


def _sorted(cache: Mapping[str, Tensor], entropy: Tensor) -> dict[str, Tensor]:
    """The entries (N, K, ...) of each class by entropy, earlier ones first among equals."""
    order = entropy.argsort(dim=1, stable=True)
    rows = torch.arange(len(order), device=order.device)[:, None]
    return {name: values[rows, order] for name, values in cache.items()}


def _repeated(cache: Mapping[str, Tensor], name: str) -> Tensor:
    """Whether an entry of a sorted cache equals one before it, (N, K) bool."""
    entropy = cache[name]
    repeated = torch.zeros_like(entropy, dtype=torch.bool)
    for lag in range(1, entropy.shape[1]):
        equal = entropy[:, lag:] == entropy[:, :-lag]
        if not (equal & entropy[:, lag:].isfinite()).any():
            break
        same = torch.ones_like(repeated[:, lag:])
        for values in cache.values():
            equal = values[:, lag:] == values[:, :-lag]
            same &= equal.flatten(2).all(dim=2) if equal.ndim > 2 else equal
        repeated[:, lag:] |= same
    return repeated


def _first(states: States) -> dict[str, Tensor]:
    return dict(states[0])


_RULES = {"mean": _average, "cache": merge_caches, "first": _first}
