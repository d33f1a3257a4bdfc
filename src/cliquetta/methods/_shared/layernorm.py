"""Adapting the LayerNorms of a tower without touching it: Tent, BATCLIP, CLIPArTT, WATT.

The gains and biases of all LayerNorms of a tower are one flat vector, given to the tower from
outside at every call. What a method learns is that vector, kept in its memory or dropped after
the batch; the shared model stays as it was loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from cliquetta.errors import UserError
from cliquetta.methods._shared.memory import Memory
from cliquetta.model.clip import to_float32


class Float32LayerNorm(nn.Module):
    """LayerNorm computed in the precision of its gain, answered in that of its input.

    A step of 1e-3 on a gain near one is below the resolution of bfloat16.
    """

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.shape = norm.normalized_shape
        self.eps = norm.eps
        self.weight = norm.weight
        self.bias = norm.bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        normed = F.layer_norm(x.to(self.weight.dtype), self.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)


class LayerNormTower:
    """A tower as a function of its LayerNorm parameters; all other weights are shared with it."""

    def __init__(self, tower: nn.Module) -> None:
        shared: dict[int, Any] = {id(p): p for p in [*tower.parameters(), *tower.buffers()]}
        self._tower = copy.deepcopy(tower, shared)
        self._names: list[str] = []
        self._shapes: list[torch.Size] = []
        start = []
        for name, module in list(self._tower.named_modules()):
            if not isinstance(module, nn.LayerNorm):
                continue
            self._tower.set_submodule(name, Float32LayerNorm(module))
            for kind, value in (("weight", module.weight), ("bias", module.bias)):
                self._names.append(f"{name}.{kind}")
                self._shapes.append(value.shape)
                start.append(to_float32(value.detach()).flatten())
        self.start = torch.cat(start)
        """(P,) the parameters as loaded, at least float32."""

    def __call__(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        """Features of ``inputs`` under flat LayerNorm ``parameters`` (P,), at least float32."""
        parts = torch.split(parameters, [shape.numel() for shape in self._shapes])
        norms = {
            name: part.view(shape)
            for name, part, shape in zip(self._names, parts, self._shapes, strict=True)
        }
        features: Tensor = functional_call(self._tower, norms, (inputs,))
        return to_float32(features)


@dataclass(frozen=True)
class Adam:
    """The settings of Adam; with ``weight_decay`` it is AdamW (decay apart from the gradient)."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the step at the door."""
        if not self.learning_rate > 0:
            raise UserError(f"learning_rate must be above 0, got {self.learning_rate}")


class AdamState(NamedTuple):
    """Parameters under Adam: the values, both moments and the number of steps taken."""

    values: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor

    @classmethod
    def begin(cls, values: Tensor) -> AdamState:
        """Before the first step."""
        zero = torch.zeros_like(values)
        return cls(values, zero, zero, torch.zeros((), dtype=torch.long, device=values.device))

    @classmethod
    def recall(cls, memory: Memory, name: str) -> AdamState:
        """As kept in a method's memory under ``name``."""
        return cls(*(memory[f"{name}.{part}"] for part in cls._fields))

    def declare(self, memory: Memory, name: str) -> None:
        """Enter a memory under ``name`` as the start."""
        for part, value in zip(self._fields, self, strict=True):
            memory.declare(f"{name}.{part}", value)

    def keep(self, memory: Memory, name: str) -> None:
        """Replace what the memory holds under ``name``."""
        for part, value in zip(self._fields, self, strict=True):
            memory[f"{name}.{part}"] = value


@torch.no_grad()
def adam_step(learned: AdamState, gradient: Tensor, adam: Adam) -> AdamState:
    """One step of Adam; nothing is changed in place."""
    beta1, beta2 = adam.betas
    first = torch.lerp(learned.first, gradient, 1 - beta1)
    second = beta2 * learned.second + (1 - beta2) * gradient.square()
    steps = learned.steps + 1
    count = steps.double()  # powers near one lose their digits in float32
    size = (adam.learning_rate / (1 - beta1**count)).to(first.dtype)
    spread = (second / (1 - beta2**count).to(second.dtype)).sqrt() + adam.eps
    decayed = learned.values * (1 - adam.learning_rate * adam.weight_decay)
    return AdamState(decayed - size * first / spread, first, second, steps)


def minimize(
    learned: AdamState, loss: Callable[[Tensor], Tensor], steps: int, adam: Adam
) -> AdamState:
    """``steps`` steps of Adam down ``loss``, a function of the parameters."""
    for _ in range(steps):
        with torch.enable_grad():
            values = learned.values.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(values), values)
        learned = adam_step(learned, gradient, adam)
    return learned
