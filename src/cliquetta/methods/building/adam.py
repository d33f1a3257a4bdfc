"""Adam as a pure function of its state, for LayerNorms, contexts and prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.config import Decay, MethodConfig, NonNegative, Positive
from cliquetta.methods.building.memory import ANY, NON_NEGATIVE, Memory


@dataclass(frozen=True)
class Adam:
    """Settings of Adam; with ``weight_decay`` it is AdamW."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr >= 0:  # of a plug-in; configs check theirs
            raise UserError(f"lr must be 0 or more, got {self.lr}")


@dataclass(frozen=True)
class AdamConfig(MethodConfig):
    """Base of the configs of methods that take Adam steps on LayerNorms."""

    lr: Positive = 1e-3  # Learning rate of Adam.
    betas: tuple[Decay, Decay] = (0.9, 0.999)  # Decay rates of Adam's two moments.

    @property
    def adam(self) -> Adam:
        """The optimiser's settings."""
        return Adam(self.lr, self.betas)


@dataclass(frozen=True)
class AdamWConfig(AdamConfig):
    """Base of the configs of methods that take AdamW steps."""

    weight_decay: NonNegative = 0.01  # Weight decay of AdamW.

    @property
    def adam(self) -> Adam:
        """The optimiser's settings."""
        return Adam(self.lr, self.betas, weight_decay=self.weight_decay)


class AdamState(NamedTuple):
    """Parameters under Adam: the values, both moments and the number of steps."""

    values: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor

    @classmethod
    def begin(cls, values: Tensor) -> AdamState:
        """Return the state before the first step."""
        zero = torch.zeros_like(values)
        steps = torch.zeros((), dtype=torch.long, device=values.device)
        return cls(
            values=values,
            first=zero,
            second=zero,
            steps=steps,
        )

    @classmethod
    def load(cls, memory: Memory, name: str) -> AdamState:
        """Read the state in a method's memory under ``name``."""
        return cls._make(memory[f"{name}.{part}"] for part in cls._fields)

    @classmethod
    def names(cls, name: str) -> frozenset[str]:
        """Return the names that :meth:`declare` enters in a memory."""
        return frozenset(f"{name}.{part}" for part in cls._fields)

    def declare(self, memory: Memory, name: str) -> None:
        """Enter a memory under ``name`` as the start."""
        for part, value in self._asdict().items():
            allowed = NON_NEGATIVE if part == "second" else ANY
            memory.declare(f"{name}.{part}", value, allowed)

    def store(self, memory: Memory, name: str) -> None:
        """Replace what the memory holds under ``name``."""
        for part, value in self._asdict().items():
            memory[f"{name}.{part}"] = value


@torch.no_grad()
def adam_step(state: AdamState, gradient: Tensor, adam: Adam) -> AdamState:
    """Take a step of Adam, in the operations of ``torch.optim``."""
    beta1, beta2 = adam.betas

    # Both moments.
    first = torch.lerp(state.first, gradient, 1 - beta1)
    decayed_second = state.second * beta2
    second = torch.addcmul(decayed_second, gradient, gradient, value=1 - beta2)

    # Their bias corrections; powers near one lose their digits in float32.
    steps = state.steps + 1
    count = steps.double()
    size = adam.lr / (1 - beta1**count)
    size = size.to(first.dtype)
    root = second.sqrt()
    correction = (1 - beta2**count).sqrt()
    spread = root / correction.to(second.dtype) + adam.eps

    # AdamW decays the weights apart from the gradient.
    values = state.values * (1 - adam.lr * adam.weight_decay)
    values = values - size * first / spread
    return AdamState(values, first, second, steps)


def minimize(
    state: AdamState, loss: Callable[[Tensor], Tensor], steps: int, adam: Adam
) -> AdamState:
    """Take ``steps`` steps of Adam down ``loss``, a function of the parameters."""
    for _ in range(steps):
        with torch.enable_grad():
            values = state.values.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(values), values)
        state = adam_step(state, gradient, adam)
    return state
