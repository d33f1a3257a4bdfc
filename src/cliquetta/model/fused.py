"""Two steps of a block's backward pass as one GPU kernel each, written in Triton.

Row r of a gradient belongs to row ``index[r]`` of the forward pass, of which the kernels read what
they need in place: separate kernels would copy it for every row first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Numbers that one program of :func:`silu_backward` works on."""


@triton.jit  # type: ignore[untyped-decorator]
def _silu_kernel(out, grad, hidden, index, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    image = tl.load(index + row)
    x = tl.load(hidden + image * size + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * size + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(x)
    tl.store(out + row * size + at, g * s * (1 + x * (1 - s)), mask=inside)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    out, residual, grad, x, mean, rstd, weight, index, tokens, width, BLOCK: tl.constexpr
):
    row, token = tl.program_id(1).to(tl.int64), tl.program_id(0)
    there = tl.load(index + row) * tokens + token
    here = (row * tokens + token) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(rstd + there).to(tl.float32)
    value = tl.load(x + there * width + at, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(inside, (value - tl.load(mean + there).to(tl.float32)) * scale, 0.0)
    g = tl.load(grad + here + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.sum(g * normed, axis=0) / width
    back = scale * (g - tl.sum(g, axis=0) / width - slope * normed)
    back += tl.load(residual + here + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here + at, back, mask=inside)


def silu_backward(grad: Tensor, hidden: Tensor, index: Tensor) -> Tensor:
    """Gradient (R, T, H) of the input of silu, whose inputs were ``hidden`` (b, T, H)."""
    grad, out, size = grad.contiguous(), torch.empty_like(grad), hidden[0].numel()
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        grid = len(grad), triton.cdiv(size, BLOCK)
        _silu_kernel[grid](out, grad, hidden.contiguous(), index, size, BLOCK=BLOCK)
    return out


def norm_backward(
    residual: Tensor,
    grad: Tensor,
    forward: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    index: Tensor,
) -> Tensor:
    """``residual`` (R, T, D) plus the gradient of the input of a LayerNorm.

    ``forward`` are input (b, T, D), mean and reciprocal standard deviation (b, T, 1).
    """
    out = torch.empty_like(residual)
    R, T, D = residual.shape
    given = [value.contiguous() for value in (residual, grad, *forward, weight, index)]
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        _norm_kernel[(T, R)](out, *given, T, D, BLOCK=triton.next_power_of_2(D))
    return out


def try_out(like: Tensor) -> None:
    """Build and run a kernel for tensors like this one; raises where Triton cannot."""
    x = like.new_ones(1, 1, 16)
    silu_backward(x, x, torch.zeros(1, dtype=torch.long, device=x.device))
