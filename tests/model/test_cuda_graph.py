"""Replayed functions: called elsewhere, recorded once per shape on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cliquetta.methods._shared.feature_level import Transductive
from cliquetta.methods.registry import list_methods
from cliquetta.methods.scap_domain import DomainSCAP, DomainSCAPConfig
from cliquetta.model.cuda_graph import Replayed
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.clusters import make_clusters
from tests._helpers.literal_numpy import on_features
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")


def test_without_cuda_the_function_is_called() -> None:
    seen = []

    def double(x: Tensor) -> tuple[Tensor]:
        seen.append(len(x))
        return (2 * x,)

    replayed = Replayed()
    for size in (2, 2, 3):
        assert replayed(double, torch.ones(size))[0].tolist() == [2.0] * size
    assert seen == [2, 2, 3]


@needs_cuda
def test_on_cuda_it_is_recorded_once_per_shape_and_answers_new_inputs() -> None:
    calls = []

    def slope(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = leaf.pow(3).sum()
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    replayed, generator = Replayed(shapes=1), torch.Generator().manual_seed(0)
    for size in (5, 5, 5, 7):
        x = torch.randn(size, generator=generator).cuda()
        value, gradient = replayed(slope, x)
        torch.testing.assert_close(value, x.pow(3).sum())
        torch.testing.assert_close(gradient, 3 * x.square())
    assert calls == [5] * 4 + [7]  # three to warm up, one recorded; no room for a second shape


TRANSDUCTIVE = [e.name for e in list_methods() if issubclass(e.adapter, Transductive)]


@needs_cuda
@pytest.mark.parametrize("name", TRANSDUCTIVE)
def test_transduction_answers_alike_recorded_and_not(name: str) -> None:
    features, _, text = make_clusters(96)
    recorded, called = (on_features(build_tiny_clip().cuda(), name, text) for _ in range(2))
    assert isinstance(called, Transductive)
    called._replayed.shapes = 0
    for part in features.split(32):
        found, plain = (adapter.predict_features(part).logits for adapter in (recorded, called))
        torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)


@needs_cuda
def test_domains_answer_alike_recorded_and_not() -> None:
    model = build_tiny_clip().cuda()
    size = model.image_size
    images = torch.randn(4, 16, 3, size, size, generator=torch.Generator().manual_seed(0)).cuda()
    config = DomainSCAPConfig(step_every=16, warmup_images=32)
    models = (
        model,
        model,
        build_tiny_clip(),
    )  # the last one on the CPU, which learns nothing ahead
    adapters = [DomainSCAP(own, ClassPrompts(TINY_NAMES), config) for own in models]
    adapters[1]._replayed.shapes = 0
    for batch in images:
        recorded, called, other = (a.predict(Batch(batch)).logits.cpu() for a in adapters)
        torch.testing.assert_close(recorded, called, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(recorded, other, atol=2e-3, rtol=2e-3)
    assert adapters[0].memory["steps"][0] == 4
