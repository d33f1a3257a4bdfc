"""Three steps of a block's backward pass as one GPU kernel each, written in Triton.

Row r of a gradient belongs to row ``index[r]`` of the forward pass, which is read
without copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers that one program of :func:`silu_backward` works on.
BLOCK = 2048
# Queries that :func:`attention_backward` works on at once.
QUERIES = 32


@triton.jit  # type: ignore[untyped-decorator]
def _silu_kernel(out, grad, hidden, index, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program per row and BLOCK of its numbers.
    row = tl.program_id(0).to(tl.int64)

    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size

    # The row of the forward pass that this one belongs to.
    image = tl.load(index + row)

    forward = hidden + image * size + at
    x = tl.load(forward, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * size + at, mask=inside, other=0.0).to(tl.float32)

    # silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x).
    s = tl.sigmoid(x)
    back = g * s * (1 + x * (1 - s))
    tl.store(out + row * size + at, back, mask=inside)


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
    # One program per token and row; `there` is the token in the forward pass, `here`
    # its first number in the backward pass.
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0)

    there = tl.load(index + row) * tokens + token
    here = (row * tokens + token) * width

    # BLOCK is the width, rounded up to a power of two.
    at = tl.arange(0, BLOCK)
    inside = at < width

    # The norm's output before its weight.
    scale = tl.load(rstd + there).to(tl.float32)
    centre = tl.load(mean + there).to(tl.float32)
    value = tl.load(x + there * width + at, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(inside, (value - centre) * scale, 0.0)

    # Its gradient, less the parts along a constant and along the output.
    g = tl.load(grad + here + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)

    slope = tl.sum(g * normed, axis=0) / width
    offset = tl.sum(g, axis=0) / width
    back = scale * (g - offset - slope * normed)

    # The gradient past the norm, by the residual connection.
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
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)

    image = tl.load(index + row)
    D: tl.constexpr = HEADS * SIZE

    # Keys and values lie side by side, behind the queries if there are any.
    first_kv: tl.constexpr = KV_STEP - 2 * D
    feature = head * SIZE + tl.arange(0, SIZE)[None, :]

    # Keys and values of the tokens: (KEYS, SIZE).
    key = tl.arange(0, KEYS)[:, None]
    real = (key >= PREFIX) & (key < PREFIX + TOKENS)

    at = (key - PREFIX) * KV_STEP + first_kv + feature
    keys = kv_of + image * TOKENS * KV_STEP + at
    k = tl.load(keys, mask=real, other=0.0)
    v = tl.load(keys + D, mask=real, other=0.0)

    # Those of the prefix, in front.
    if PREFIX > 0:
        before = key * 2 * D + feature
        prefix_keys = prefix + image * PREFIX * 2 * D + before
        k += tl.load(prefix_keys, mask=key < PREFIX, other=0.0)
        v += tl.load(prefix_keys + D, mask=key < PREFIX, other=0.0)

    # Gradients of keys and values add up over the queries.
    dk = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    dv = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    for first in range(0, ASKED, QUERIES):
        # QUERIES of them at a time.
        query = first + tl.arange(0, QUERIES)[:, None]
        some = query < ASKED

        at_query = query * Q_STEP + feature
        q = tl.load(q_of + image * ASKED * Q_STEP + at_query, mask=some, other=0.0)
        g = tl.load(grad + (row * ASKED + query) * D + feature, mask=some, other=0.0)

        # The weights again: softmax over keys, by powers of two, as exp2 is faster.
        scores = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
        scores = tl.where(key < PREFIX + TOKENS, scores, float("-inf"))
        p = tl.exp2(scores - tl.max(scores, axis=0)[None, :])
        p = p / tl.sum(p, axis=0)[None, :]

        # Back through the weighted sum and the softmax.
        dp = tl.dot(v, tl.trans(g))
        dv += tl.dot(p.to(g.dtype), g)
        mean_dp = tl.sum(p * dp, axis=0)[None, :]
        ds = (p * (dp - mean_dp)).to(g.dtype)

        dk += tl.dot(ds, q)
        if THROUGH:
            dq = tl.trans(tl.dot(tl.trans(k), ds)) * scale
            tl.store(out_q + row * ASKED * Q_STEP + at_query, dq, mask=some)

    # The scale of the scores, once for all queries.
    dk *= scale
    if THROUGH:
        out_keys = out_kv + row * TOKENS * KV_STEP + at
        tl.store(out_keys, dk, mask=real)
        tl.store(out_keys + D, dv, mask=real)
    if PREFIX > 0:
        before = key * 2 * D + feature
        out_prefix_keys = out_prefix + row * PREFIX * 2 * D + before
        tl.store(out_prefix_keys, dk, mask=key < PREFIX)
        tl.store(out_prefix_keys + D, dv, mask=key < PREFIX)


def silu_backward(grad: Tensor, hidden: Tensor, index: Tensor) -> Tensor:
    """Compute the gradient (R, T, H) of the input of silu, which was ``hidden`` (b, T, H)."""
    grad = grad.contiguous()
    out = torch.empty_like(grad)
    size = hidden[0].numel()
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        grid = (len(grad), triton.cdiv(size, BLOCK))
        _silu_kernel[grid](out, grad, hidden.contiguous(), index, size, BLOCK=BLOCK)
    return out


def norm_backward(
    residual: Tensor,
    grad: Tensor,
    forward: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    index: Tensor,
) -> Tensor:
    """Compute ``residual`` (R, T, D) plus the gradient of the input of a LayerNorm.

    ``forward`` are input (b, T, D), mean and reciprocal standard deviation (b, T, 1).
    """
    out = torch.empty_like(residual)
    x, mean, rstd = forward
    R, T, D = residual.shape

    # One program holds a whole token.
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        _norm_kernel[(T, R)](
            out,
            residual.contiguous(),
            grad.contiguous(),
            x.contiguous(),
            mean.contiguous(),
            rstd.contiguous(),
            weight.contiguous(),
            index.contiguous(),
            T,
            D,
            BLOCK=triton.next_power_of_2(D),
        )
    return out


def attends(grad: Tensor, heads: int, packed: Tensor, prefix: Tensor | None) -> bool:
    """Whether :func:`attention_backward` can hold all keys of a head at once, as Hopper GPUs do."""
    keys = packed.shape[1]
    if prefix is not None:
        keys += prefix.shape[1]

    # A program holds keys of one head in 16 bits, up to 256 of them.
    size = grad.shape[2] // heads

    # More keys, or other sizes, do not fit into the registers of a program.
    if keys > 256 or size not in (16, 32, 64) or grad.element_size() != 2:
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
    """Compute gradients of ``packed`` and ``query`` (if ``through``), and of ``prefix``.

    ``packed`` (b, T, 3 D) are queries, keys and values, without queries where there is
    a single ``query`` (b, 1, D); ``prefix`` (b, P, 2 D) are keys and values in front.
    """
    R, asked, D = grad.shape
    T, wide = packed.shape[1:]
    P = 0 if prefix is None else prefix.shape[1]

    # The kernel counts on memory without gaps.
    packed = packed.contiguous()
    asks = packed if query is None else query.contiguous()

    out = grad.new_empty(R, T, wide) if through else None
    out_query = grad.new_empty(R, 1, D) if through and query is not None else None
    out_prefix = None if prefix is None else grad.new_empty(R, P, 2 * D)

    # Queries lie beside keys and values, unless there is a single one.
    out_asks = out if query is None else out_query

    def pointer(value: Tensor | None) -> Tensor:
        # The kernel neither reads nor writes what is missing.
        return packed if value is None else value

    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        _attention_kernel[(heads, R)](
            pointer(out_asks),
            pointer(out),
            pointer(out_prefix),
            grad.contiguous(),
            asks,
            packed,
            packed if prefix is None else prefix.contiguous(),
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
    # The smallest tensors that each kernel takes.
    x = like.new_ones(1, 1, 16)
    packed = like.new_ones(1, 1, 48)
    index = torch.zeros(1, dtype=torch.long, device=x.device)

    silu_backward(x, x, index)
    if attends(x, 1, packed, None):
        attention_backward(x, packed, None, None, heads=1, index=index, through=True)
