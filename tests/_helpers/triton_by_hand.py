"""As much of Triton as our kernels use, on the CPU: one program after the other, over torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

_PROGRAM: list[int] = []


@dataclass(frozen=True)
class Pointer:
    """Indices into a tensor, whose memory they share."""

    flat: Tensor
    at: Tensor

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.at + other)


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    if mask is None:
        return pointer.flat[pointer.at]
    mask = mask.expand_as(pointer.at)
    return torch.where(mask, pointer.flat[torch.where(mask, pointer.at, 0)], other)


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    mask = mask.expand_as(pointer.at)
    pointer.flat[pointer.at[mask]] = value[mask].to(pointer.flat.dtype)


class Kernel:
    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int = 4, **meta: Any) -> None:
            zero = torch.tensor(0)
            own = [
                Pointer(x.view(-1), zero) if isinstance(x, Tensor) else x for x in given
            ]
            for program in itertools.product(*(range(size) for size in grid)):
                _PROGRAM[:] = program
                self.function(*own, **meta)

        return launch


OWN = ("arange", "where", "sigmoid", "exp2", "zeros", "int64", "float32")
LANGUAGE = SimpleNamespace(
    program_id=lambda axis: torch.tensor(_PROGRAM[axis]),
    load=load,
    store=store,
    sum=lambda x, axis: x.sum(dim=axis),
    max=lambda x, axis: x.amax(dim=axis),
    dot=lambda x, y: x.float() @ y.float(),
    trans=lambda x: x.T,
    **{name: getattr(torch, name) for name in OWN},
)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import triton`` find this; our kernels are then imported anew."""
    triton = ModuleType("triton")
    vars(triton).update(
        jit=lambda function=None, **options: Kernel(function) if function else Kernel,
        language=LANGUAGE,
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", LANGUAGE)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import our kernels anew, now and after the test."""
    monkeypatch.setitem(sys.modules, "cliquetta.model.fused", ModuleType("replaced"))
    del sys.modules["cliquetta.model.fused"]
