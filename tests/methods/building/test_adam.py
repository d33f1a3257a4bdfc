"""Adam against torch's, and through a method's memory."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.building.adam import Adam, AdamState, adam_step, minimize
from cliquetta.methods.building.memory import Memory


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam_is_torchs(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    parameter = start.clone().requires_grad_()
    torch_adam = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.8, 0.99), weight_decay=decay)
    learned = AdamState.begin(start)
    for _ in range(7):
        gradient = torch.randn(50, generator=generator)
        parameter.grad = gradient
        torch_adam.step()
        learned = adam_step(learned, gradient, Adam(3e-3, (0.8, 0.99), weight_decay=decay))
        torch.testing.assert_close(learned.values, parameter.detach())
    assert int(learned.steps) == 7


def test_descend_takes_adams_steps_down_the_loss() -> None:
    target = torch.arange(5.0)
    start = torch.zeros(5)

    def loss(values: Tensor) -> Tensor:
        return (values - target).square().sum()

    parameter = start.clone().requires_grad_()
    torch_adam = torch.optim.Adam([parameter], lr=0.1)
    for _ in range(5):
        torch_adam.zero_grad()
        loss(parameter).backward()
        torch_adam.step()
    with torch.no_grad():  # as a caller may have it
        reached = minimize(AdamState.begin(start), loss, 5, Adam(0.1))
    torch.testing.assert_close(reached.values, parameter.detach())
    assert torch.equal(start, torch.zeros(5))


def test_what_is_learned_goes_through_a_memory() -> None:
    memory = Memory()
    AdamState.begin(torch.ones(3)).declare(memory, "norms")
    moved = adam_step(AdamState.load(memory, "norms"), torch.arange(3.0), Adam(1e-3))
    moved.store(memory, "norms")
    for stored, value in zip(AdamState.load(memory, "norms"), moved, strict=True):
        assert torch.equal(stored, value)
    memory.reset()
    assert int(memory["norms.steps"]) == 0
    assert torch.equal(memory["norms.values"], torch.ones(3))
