"""Three steps of a block's backward pass as one GPU kernel each, written in Triton.

Row r of a gradient belongs to row ``index[r]`` of the forward pass, which is read
without copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers that one program of :func:`silu_backward` works on
QUERIES = 32  # queries that :func:`attention_backward` works on at once


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
    out,
    residual,
    grad,
    x,
    mean,
    rstd,
    weight,
    index,
    tokens,
    width,
    BLOCK: tl.constexpr,
):
    row, token = tl.program_id(1).to(tl.int64), tl.program_id(0)
    there = tl.load(index + row) * tokens + token
    here = (row * tokens + token) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(rstd + there).to(tl.float32)
    value = tl.load(x + there * width + at, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(
        inside, (value - tl.load(mean + there).to(tl.float32)) * scale, 0.0
    )
    g = tl.load(grad + here + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.sum(g * normed, axis=0) / width
    back = scale * (g - tl.sum(g, axis=0) / width - slope * normed)
    back += tl.load(residual + here + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here + at, back, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    out_q,
    out_kv,
    out_prefix,
    grad,
    q_of,
    kv_of,
    prefix,
    index,
    scale,
    ASKED: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFIX: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    Q_STEP: tl.constexpr,
    KV_STEP: tl.constexpr,
    THROUGH: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    # One program per head and row. It holds all keys and values, those of a prefix in
    # front, and goes through the queries once; scores are keys by queries, so that sums
    # over keys are columns.
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    image = tl.load(index + row)
    D: tl.constexpr = HEADS * SIZE
    first_kv: tl.constexpr = KV_STEP - 2 * D
    feature = head * SIZE + tl.arange(0, SIZE)[None, :]
    key = tl.arange(0, KEYS)[:, None]
    real = (key >= PREFIX) & (key < PREFIX + TOKENS)
    at = (key - PREFIX) * KV_STEP + first_kv + feature
    k = tl.load(kv_of + image * TOKENS * KV_STEP + at, mask=real, other=0.0)
    v = tl.load(kv_of + image * TOKENS * KV_STEP + at + D, mask=real, other=0.0)
    if PREFIX > 0:
        before = key * 2 * D + feature
        k += tl.load(
            prefix + image * PREFIX * 2 * D + before, mask=key < PREFIX, other=0.0
        )
        v += tl.load(
            prefix + image * PREFIX * 2 * D + before + D, mask=key < PREFIX, other=0.0
        )
    dk = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    dv = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    for first in range(0, ASKED, QUERIES):
        query = first + tl.arange(0, QUERIES)[:, None]
        some = query < ASKED
        at_query = query * Q_STEP + feature
        q = tl.load(q_of + image * ASKED * Q_STEP + at_query, mask=some, other=0.0)
        g = tl.load(grad + (row * ASKED + query) * D + feature, mask=some, other=0.0)
        scores = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
        scores = tl.where(key < PREFIX + TOKENS, scores, float("-inf"))
        p = tl.exp2(scores - tl.max(scores, axis=0)[None, :])
        p = p / tl.sum(p, axis=0)[None, :]
        dp = tl.dot(v, tl.trans(g))
        dv += tl.dot(p.to(g.dtype), g)
        ds = (p * (dp - tl.sum(p * dp, axis=0)[None, :])).to(g.dtype)
        dk += tl.dot(ds, q)
        if THROUGH:
            dq = tl.trans(tl.dot(tl.trans(k), ds)) * scale
            tl.store(out_q + row * ASKED * Q_STEP + at_query, dq, mask=some)
    dk *= scale
    if THROUGH:
        tl.store(out_kv + row * TOKENS * KV_STEP + at, dk, mask=real)
        tl.store(out_kv + row * TOKENS * KV_STEP + at + D, dv, mask=real)
    if PREFIX > 0:
        before = key * 2 * D + feature
        tl.store(out_prefix + row * PREFIX * 2 * D + before, dk, mask=key < PREFIX)
        tl.store(out_prefix + row * PREFIX * 2 * D + before + D, dv, mask=key < PREFIX)


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


def attends(grad: Tensor, heads: int, packed: Tensor, prefix: Tensor | None) -> bool:
    """Whether :func:`attention_backward` can hold all keys of a head at once, as Hopper GPUs do."""
    keys = packed.shape[1] + (0 if prefix is None else prefix.shape[1])
    if (
        keys > 256
        or grad.shape[2] // heads not in (16, 32, 64)
        or grad.element_size() != 2
    ):
        return False
    return torch.cuda.get_device_capability(grad.device) == (9, 0)


def attention_backward(
    grad: Tensor,
    packed: Tensor,
    query: Tensor | None,
    prefix: Tensor | None,
    heads: int,
    index: Tensor,
    *,
    through: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of what was attended to: ``packed``, ``query`` (if ``through``) and ``prefix``.

    ``packed`` (b, T, 3 D) are queries, keys and values, without queries where there is
    a single ``query`` (b, 1, D); ``prefix`` (b, P, 2 D) are keys and values in front.
    """
    R, asked, D = grad.shape
    T, wide = packed.shape[1:]
    P = 0 if prefix is None else prefix.shape[1]
    packed = packed.contiguous()
    asks = packed if query is None else query.contiguous()
    out = grad.new_empty(R, T, wide) if through else None
    out_query = grad.new_empty(R, 1, D) if through and query is not None else None
    out_prefix = None if prefix is None else grad.new_empty(R, P, 2 * D)
    spare = packed  # stands for tensors that are neither read nor written
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        _attention_kernel[(heads, R)](
            *(
                spare if x is None else x
                for x in (out if query is None else out_query, out)
            ),
            spare if out_prefix is None else out_prefix,
            grad.contiguous(),
            asks,
            packed,
            spare if prefix is None else prefix.contiguous(),
            index,
            (D // heads) ** -0.5,
            ASKED=asked,
            TOKENS=T,
            PREFIX=P,
            HEADS=heads,
            SIZE=D // heads,
            Q_STEP=asks.shape[2],
            KV_STEP=wide,
            THROUGH=through,
            KEYS=max(64, triton.next_power_of_2(P + T)),
            QUERIES=QUERIES,
            num_warps=8,
        )
    return out, out_query, out_prefix


def try_out(like: Tensor) -> None:
    """Build and run kernels for tensors like this one; raises where Triton cannot."""
    x, packed = like.new_ones(1, 1, 16), like.new_ones(1, 1, 48)
    index = torch.zeros(1, dtype=torch.long, device=x.device)
    silu_backward(x, x, index)
    if attends(x, 1, packed, None):
        attention_backward(x, packed, None, None, 1, index, through=True)
