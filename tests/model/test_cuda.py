"""Replayed functions: called elsewhere, recorded once per shape on CUDA."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.registry import method_entries
from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.scap import SCAP, SCAPConfig
from cliquetta.model import cuda
from cliquetta.model.cuda import Replayed
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.arrays import on_features
from tests._helpers.clusters import make_clusters
from tests._helpers.scenes import NAMES, between_similarities, build_model, make_batches
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip
from tests._helpers.tolerance import FEATURE, LOGIT, SUM, TOWER_TERMS, rounding

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="records CUDA graphs"
)


def test_without_cuda_the_function_is_called() -> None:
    seen = []

    def double(x: Tensor) -> tuple[Tensor]:
        seen.append(len(x))
        return (2 * x,)

    replayed = Replayed()
    for size in (2, 2, 3):
        assert replayed(double, torch.ones(size))[0].tolist() == [2.0] * size
    assert seen == [2, 2, 3]


def test_rows_are_filled_up_and_cut_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda.CHUNK, "cpu", 128)
    seen = []

    def norms(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((len(x), len(index)))
        return x.norm(dim=1), index + 1

    for rows in (1, 9, 33, 64, 65, 300):
        x = torch.randn(rows, 3)
        index = torch.arange(rows)
        lengths, following = Replayed().by_rows(norms, x, index)
        torch.testing.assert_close(lengths, x.norm(dim=1), rtol=0, atol=0)
        assert torch.equal(following, index + 1)
    # 300 rows are two chunks of 128, and what is left
    assert seen == [(size, size) for size in (16, 16, 48, 64, 80, 128, 128, 48)]


@needs_cuda
def test_on_cuda_it_is_recorded_once_per_shape_and_takes_new_inputs() -> None:
    calls = []

    def slope(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = leaf.pow(3).sum()
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient

    replayed = Replayed(shapes=1)
    generator = torch.Generator().manual_seed(0)
    for size in (5, 5, 5, 7):
        x = torch.randn(size, generator=generator).cuda()
        value, gradient = replayed(slope, x)
        torch.testing.assert_close(value, x.pow(3).sum())
        torch.testing.assert_close(gradient, 3 * x.square())
    # three to warm up, one recorded; no room for a second shape
    assert calls == [5, 5, 5, 5, 7]


# Between CPU and GPU; caches multiply what they add to the logits by up to 100.
OTHER = rounding(torch.float32, TOWER_TERMS, 100.0)
PLAIN_ENTRIES = [entry for entry in method_entries() if not entry.fit]
ENTRIES = [entry for entry in PLAIN_ENTRIES if issubclass(entry.adapter, FixedText)]


@needs_cuda
@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
def test_methods_on_features_predict_alike_recorded_called_and_on_the_cpu(
    name: str,
) -> None:
    features, _, text = make_clusters(96)
    recorded = on_features(name, text, model=build_tiny_clip().cuda())
    called = on_features(name, text, model=build_tiny_clip().cuda())
    on_cpu = on_features(name, text, model=build_tiny_clip())
    vars(called).get("_replayed", Replayed()).shapes = 0
    for part in features.split(32):
        actual = recorded.predict_features(part).logits
        plain = called.predict_features(part).logits
        cpu = on_cpu.predict_features(part).logits
        torch.testing.assert_close(actual, plain, atol=LOGIT, rtol=LOGIT)
        torch.testing.assert_close(actual.cpu(), cpu, atol=OTHER, rtol=OTHER)


@needs_cuda
def test_scap_predicts_alike_recorded_and_not() -> None:
    """Batches of two sizes, of which one is recorded, and more cliques than a class may keep."""
    model = build_model(0)
    batches = make_batches(3, 6, 12)
    threshold = between_similarities(model, batches[0], 0.5)
    config = SCAPConfig(threshold=threshold, capacity=2)
    models = model.cuda(), model, build_model(0)
    adapters = [SCAP(own, ClassPrompts(NAMES), config) for own in models]
    adapters[1]._replayed.shapes = 0
    for size, images in zip((12, 12, 9, 12, 9, 12), batches, strict=True):
        batch = Batch(images[:size])
        recorded, called, other = (adapter.predict(batch) for adapter in adapters)
        torch.testing.assert_close(
            recorded.logits, called.logits, atol=FEATURE, rtol=FEATURE
        )
        torch.testing.assert_close(
            recorded.logits.cpu(), other.logits, atol=LOGIT, rtol=LOGIT
        )
    for name in ("keys", "values", "text_mean"):
        actual, plain = (adapter.memory[name] for adapter in adapters[:2])
        torch.testing.assert_close(actual, plain, atol=SUM, rtol=SUM)
    recordings = adapters[0]._replayed._recorded
    # one recording each: plain pass, gradients, fusing, and the blocks behind the
    # prompts
    assert len(recordings) == 4
    assert not any(adapters[1]._replayed._recorded.values())


@needs_cuda
def test_domains_predict_alike_recorded_and_not() -> None:
    model = build_tiny_clip().cuda()
    size = model.image_size
    images = torch.randn(
        4, 16, 3, size, size, generator=torch.Generator().manual_seed(0)
    ).cuda()
    config = DomainNormConfig(window=16)
    models = (model, model, build_tiny_clip())
    adapters = [DomainNorm(own, ClassPrompts(TINY_NAMES), config) for own in models]
    adapters[1].setup.run.shapes = 0
    for batch in images:
        recorded, called, cpu = (a.predict(Batch(batch)).logits.cpu() for a in adapters)
        torch.testing.assert_close(recorded, called, atol=LOGIT, rtol=LOGIT)
        torch.testing.assert_close(recorded, cpu, atol=OTHER, rtol=OTHER)
    assert adapters[0].state.domains[0].norms.steps == 4
