"""Fused kernels equal separate ones: Triton's on a GPU, elsewhere the same source by hand."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from cliquetta.model import vjp
from cliquetta.model.block import Block, Prefix
from cliquetta.model.config import TransformerConfig
from cliquetta.model.vjp import VisualTape
from tests._helpers import triton_by_hand
from tests._helpers.scenes import build_model
from tests._helpers.tolerance import GRADIENT, SUM, rounding

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INDEX = torch.tensor([2, 0, 0, 1, 2, 2, 1], device=DEVICE)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if DEVICE.type == "cpu":
        triton_by_hand.install(monkeypatch)
    return importlib.import_module("cliquetta.model.fused")


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return normal.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_activation(fused: ModuleType, dtype: torch.dtype, tokens: int) -> None:
    size = 1500  # two blocks of 2048 for three tokens, the last one not full
    hidden, grad = draw(dtype, 10, tokens, size).split([3, 7])
    expected = torch.ops.aten.silu_backward(grad, hidden[INDEX])
    actual = fused.silu_backward(grad, hidden, INDEX)
    # computed in float32 and rounded once, on both sides
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=eps, atol=SUM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_norm(fused: ModuleType, dtype: torch.dtype, tokens: int) -> None:
    x, grad, residual, weight = draw(dtype, 18, tokens, 96).split([3, 7, 7, 1])
    weight = weight[0, 0]
    _, mean, rstd = torch.native_layer_norm(x, (96,), weight, weight, 1e-5)
    back = torch.ops.aten.native_layer_norm_backward(
        grad,
        x[INDEX],
        (96,),
        mean[INDEX],
        rstd[INDEX],
        weight,
        weight,
        [True, False, False],
    )[0]
    actual = fused.norm_backward(residual, grad, (x, mean, rstd), weight, INDEX)
    eps = torch.finfo(dtype).eps  # torch rounds before it adds the residual, too
    torch.testing.assert_close(
        actual, residual + back, rtol=eps, atol=eps * float(back.abs().max()) + SUM
    )


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("tokens", [5, 70])
def test_the_attention(
    fused: ModuleType, tokens: int, single: bool, prefix: int, through: bool
) -> None:
    heads = 2
    D = 32
    parts = {
        "packed": (tokens, 2 * D if single else 3 * D),
        "query": (1, D),
        "extra": (prefix, 64),
    }
    given: dict[str, Tensor | None] = {
        name: draw(torch.bfloat16, 3, *shape) for name, shape in parts.items()
    }
    given |= {} if single else {"query": None}
    given |= {} if prefix else {"extra": None}
    grad = draw(torch.bfloat16, len(INDEX), 1 if single else tokens, D)
    exact = {
        k: None if x is None else x.double().requires_grad_() for k, x in given.items()
    }
    rows = {k: None if x is None else x[INDEX] for k, x in exact.items()}
    block = Block(TransformerConfig(width=D, layers=1, heads=heads, hidden=64))

    # the gradient of torch, in double precision
    assert rows["packed"] is not None
    out = vjp._attention(
        block, rows["packed"], rows["query"], rows["extra"], None, False
    )
    actual = fused.attention_backward(
        grad,
        given["packed"],
        given["query"],
        given["extra"],
        heads,
        INDEX,
        through=through,
    )

    half = rounding(torch.bfloat16, 1) / 2  # one side is exact
    for own, back in zip(rows.values(), actual, strict=True):
        if own is None or (back is None and not through):
            continue
        expected = torch.autograd.grad(out, own, grad.double(), retain_graph=True)[0]
        torch.testing.assert_close(back.double(), expected, rtol=half, atol=half)
    assert (actual[0] is None) == (not through)
    assert (actual[2] is None) == (prefix == 0)


@pytest.mark.parametrize("blocks", [(1,), (0, 2)])
def test_a_complete_backward_pass(
    fused: ModuleType, blocks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = build_model(0).float().to(DEVICE).require_vit()
    pixels = draw(torch.float32, 3, 3, 16, 16)
    prefix = {block: Prefix(draw(torch.float32, 1, 2, 2, 32)) for block in blocks}
    hidden = tower.run(tower.embed(pixels), 0, blocks[0])
    tape = VisualTape(tower, hidden, prefix)
    cotangents = draw(torch.float32, len(INDEX), 16)
    if DEVICE.type == "cpu":  # by hand, the attention is exact in single precision, too
        monkeypatch.setattr(fused, "attends", lambda *given: True)

    monkeypatch.setattr(vjp, "_fused", lambda x: fused)
    by_kernels = tape.vjp(cotangents, INDEX)
    monkeypatch.setattr(vjp, "_fused", lambda x: None)
    by_torch = tape.vjp(cotangents, INDEX)
    for block in blocks:
        expected = by_torch[block]
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(by_kernels[block], expected, rtol=GRADIENT, atol=SUM)


def test_every_kernel_is_tried_out(
    fused: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    for name in ("silu_backward", "attention_backward"):
        monkeypatch.setattr(
            fused, name, lambda *given, name=name, **options: tried.append(name)
        )
    for result, expected in ((False, 1), (True, 2)):
        tried.clear()
        monkeypatch.setattr(fused, "attends", lambda *given, result=result: result)
        fused.try_out(draw(torch.bfloat16, 0))
        assert len(tried) == expected


def test_without_triton_or_a_compiler_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kernels() -> ModuleType | None:
        actual: ModuleType | None = vjp._kernels.__wrapped__(
            torch.device("cpu"), torch.float32
        )
        return actual

    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    triton_by_hand.forget(monkeypatch)
    assert kernels() is None
    triton_by_hand.install(monkeypatch)
    assert kernels() is not None
    triton_by_hand.install(monkeypatch)

    def refuse(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_by_hand.Kernel, "__getitem__", refuse)
    assert kernels() is None
    missing, failed = caplog.messages  # nothing is logged where the kernels work
    assert "slower" in missing
    assert "triton" in missing
    assert failed.endswith("RuntimeError: Failed to find C compiler")
