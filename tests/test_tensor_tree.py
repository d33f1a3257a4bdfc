"""Trees of tensors by path."""

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.memory import Memory, Range
from cliquetta.tensor_tree import flatten, map_tensors, unflatten


class Leaf(NamedTuple):
    left: Tensor
    right: Tensor


class Root(NamedTuple):
    leaves: tuple[Leaf, ...]
    name: str
    total: Tensor


def tree() -> Root:
    one = torch.zeros(2)
    two = torch.ones(3)
    return Root((Leaf(one, two), Leaf(two, one)), "constant", torch.tensor(4))


def test_every_tensor_has_the_path_of_its_fields() -> None:
    actual = flatten(tree())
    leaves = [
        f"leaves.{number}.{side}" for number in (0, 1) for side in ("left", "right")
    ]
    assert list(actual) == [*leaves, "total"]
    assert actual["leaves.1.left"].tolist() == [1.0] * 3 and actual["total"] == 4


def test_unflattening_looks_up_paths_whatever_their_order() -> None:
    values = dict(
        reversed(flatten(map_tensors(lambda value: value + 1, tree())).items())
    )
    actual = unflatten(tree(), values)
    assert isinstance(actual, Root) and isinstance(actual.leaves[1], Leaf)
    assert actual.name == "constant" and actual.total == 5
    assert actual.leaves[1].right.tolist() == [1.0, 1.0]


def test_a_memory_holds_a_tree_and_notices_what_is_replaced() -> None:
    memory = Memory()
    start = tree()
    memory.declare_tree(start, {"total": Range(below=9)})
    before = memory.snapshot()
    now = unflatten(start, memory)
    memory.store_tree(now._replace(total=now.total + 1))
    assert [int(value) for value in memory.changed(before)] == [5]
    assert unflatten(start, memory).total == 5
    memory.reset()
    assert unflatten(start, memory).total == 4
