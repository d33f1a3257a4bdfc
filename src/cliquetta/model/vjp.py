"""Many vector-Jacobian products from one forward pass.

Autograd runs one backward pass per forward pass. Where many gradients start from the same point
(every clique of a batch starts from the same prompts; a Jacobian has hundreds of rows), that means
the same forward pass over and over. Here a forward pass is recorded once per image or text, and
pulled back for any number of cotangents, each naming the row that it belongs to. The weights are
frozen, so that linear layers need nothing of the forward pass; norms, activations and attention
gather what they need by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta.model.block import Block, Prefix
from cliquetta.model.text import TextTower
from cliquetta.model.vision import VisionTower


@dataclass(frozen=True)
class Norm:
    """Input and statistics of a LayerNorm."""

    x: Tensor
    mean: Tensor
    rstd: Tensor


@dataclass(frozen=True)
class BlockTape:
    """What the backward pass of one block needs of its forward pass, by row."""

    first: Norm
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    second: Norm
    hidden: Tensor
    prefix: int
    rows: Tensor | None


def _norm(layer: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Norm]:
    out, mean, rstd = torch.native_layer_norm(
        x, layer.normalized_shape, layer.weight, layer.bias, layer.eps
    )
    return out, Norm(x, mean, rstd)


def _norm_back(layer: nn.LayerNorm, tape: Norm, grad: Tensor, index: Tensor | None) -> Tensor:
    back: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad,
        _rows(tape.x, index),
        layer.normalized_shape,
        _rows(tape.mean, index),
        _rows(tape.rstd, index),
        layer.weight,
        layer.bias,
        [True, False, False],
    )[0]
    return back


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def record_block(
    block: Block,
    x: Tensor,
    *,
    prefix: Prefix | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    rows: Tensor | None = None,
) -> tuple[Tensor, BlockTape]:
    """The block's output, as :meth:`Block.forward` gives it, and the tape of it."""
    B, D = len(x), x.shape[-1]
    normed, first = _norm(block.ln_1, x)
    q, k, v = block.heads_of(normed, rows)
    width = 0 if prefix is None else prefix.tokens.shape[1]
    if prefix is not None:
        k, v, mask = block.prepend(prefix, k, v, mask)
    causal = causal and mask is None and rows is None
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    own = x if rows is None else x.gather(1, rows[:, None, None].expand(-1, 1, D))
    y = own + block.out(attended.transpose(1, 2).reshape(B, -1, D))
    normed, second = _norm(block.ln_2, y)
    hidden = block.expand(normed)
    return block.contract(y, hidden), BlockTape(
        first, q, k, v, mask, causal, second, hidden, width, rows
    )


def pull_block(
    block: Block, tape: BlockTape, grad: Tensor, index: Tensor | None, *, through: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients with respect to the block's input (if ``through``) and to its prefix tokens.

    ``grad`` (R, T, D) is that of the block's output; row r belongs to row ``index[r]`` of the
    tape. The gradient of the prefix is (R, P, 2, D).
    """
    R, T, D = grad.shape
    derivative = (
        torch.ops.aten.gelu_backward if block.activation == "gelu" else torch.ops.aten.silu_backward
    )
    # For QuickGELU the factor 1.702 inside silu and the one outside cancel in the derivative.
    inner = derivative(grad @ block.proj.weight, _rows(tape.hidden, index))
    mid = grad + _norm_back(block.ln_2, tape.second, inner @ block.fc.weight, index)
    heads = block.heads
    attended = (mid @ block.out.weight).view(R, T, heads, D // heads).transpose(1, 2)
    gq, gk, gv = _pull_attention(tape, attended, index, through=through)

    weight = block.qkv.weight
    P = tape.prefix
    prefix = None
    if P:
        key = _merge(gk[:, :, :P]) @ weight[D : 2 * D]
        value = _merge(gv[:, :, :P]) @ weight[2 * D :]
        prefix = torch.stack([key, value], dim=2)
    if not through or gq is None:
        return None, prefix
    if tape.rows is None:
        joined = torch.cat([_merge(gq), _merge(gk[:, :, P:]), _merge(gv[:, :, P:])], dim=-1)
        return mid + _norm_back(block.ln_1, tape.first, joined @ weight, index), prefix
    joined = torch.cat([_merge(gk[:, :, P:]), _merge(gv[:, :, P:])], dim=-1)
    place = _rows(tape.rows, index)[:, None, None].expand(-1, 1, D)
    normed = (joined @ weight[D:]).scatter_add(1, place, _merge(gq) @ weight[:D])
    back = _norm_back(block.ln_1, tape.first, normed, index)
    return back.scatter_add(1, place, mid), prefix


def _pull_attention(
    tape: BlockTape, grad: Tensor, index: Tensor | None, *, through: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of queries, keys and values; of the prefix's keys and values only if that is all.

    The attention itself is done again: its fused kernels are cheaper than keeping the weights.
    """
    q, k, v = (_rows(x, index) for x in (tape.q, tape.k, tape.v))
    mask = None if tape.mask is None else _rows(tape.mask, index)
    with torch.enable_grad():
        if through:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            q, k, v = leaves
        else:
            P = tape.prefix
            leaves = [x[:, :, :P].detach().requires_grad_() for x in (k, v)]
            k = torch.cat([leaves[0], k[:, :, P:]], dim=2)
            v = torch.cat([leaves[1], v[:, :, P:]], dim=2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=tape.causal)
    grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    return (grads[0], grads[1], grads[2]) if through else (None, grads[0], grads[1])


def _merge(x: Tensor) -> Tensor:
    """Heads (R, H, T, D/H) side by side, (R, T, D)."""
    R, H, T, d = x.shape
    return x.transpose(1, 2).reshape(R, T, H * d)


class VisualTape:
    """A prompted image forward pass from one block on, ready for many backward passes.

    ``hidden`` (b, T, D) are the states at the input of the first prompted block; nothing before
    depends on the prompts. ``prefix`` maps blocks to what all images start from.
    """

    @torch.no_grad()
    def __init__(
        self, tower: VisionTower, hidden: Tensor, start: int, prefix: Mapping[int, Prefix]
    ) -> None:
        if min(prefix) != start:
            raise ValueError(f"the tape starts at block {start}, the first prefix at {min(prefix)}")
        self.tower, self.start = tower, start
        self.tapes: list[BlockTape] = []
        last = len(tower.blocks) - 1
        for at in range(start, last + 1):
            rows = None
            if at == last:
                rows = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
            block = tower.block(at)
            hidden, tape = record_block(block, hidden, prefix=prefix.get(at), rows=rows)
            self.tapes.append(tape)
        normed, self.post = _norm(tower.ln_post, hidden[:, 0])
        self.features = normed @ tower.projection
        """Features (b, E) at the start prompts, not normalised, in the tower's dtype."""

    @torch.no_grad()
    def pull(self, cotangents: Tensor, index: Tensor) -> dict[int, Tensor]:
        """Gradients (R, P, 2, D) of every prefix, float32.

        ``cotangents`` (R, E) are gradients of the loss in the features; row r is of image
        ``index[r]``.
        """
        tower = self.tower
        unit, size = _unit_rows(cotangents)
        grad = (unit.to(tower.projection.dtype) @ tower.projection.t())[:, None]
        grad = _norm_back(tower.ln_post, self.post, grad[:, 0], index)[:, None]
        found: dict[int, Tensor] = {}
        for offset in range(len(self.tapes) - 1, -1, -1):
            at = self.start + offset
            back, prefix = pull_block(
                tower.block(at), self.tapes[offset], grad, index, through=offset > 0
            )
            if prefix is not None:
                found[at] = prefix.to(size.dtype) * size[:, None, None, None]
            if back is not None:
                grad = back
        return found


class TextTape:
    """A text forward pass of some classes, ready for many backward passes to their context."""

    @torch.no_grad()
    def __init__(self, tower: TextTower, embeddings: Tensor, ends: Tensor) -> None:
        self.tower = tower
        L = embeddings.shape[1]
        x = embeddings + tower.position[:L]
        self.tapes: list[BlockTape] = []
        last = len(tower.blocks) - 1
        for at in range(last + 1):
            if at < last:
                x, tape = record_block(tower.block(at), x, causal=True)
            else:
                seen = torch.arange(L, device=x.device) <= ends[:, None]
                x, tape = record_block(tower.block(at), x, mask=seen[:, None, None], rows=ends)
            self.tapes.append(tape)
        normed, self.final = _norm(tower.ln_final, x[:, 0])
        self.features = normed @ tower.projection
        """Features (n, E), not normalised, in the tower's dtype."""

    @torch.no_grad()
    def pull(self, cotangents: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        """Gradients (R, M, D), float32, of the embeddings at ``positions`` (R, M)."""
        tower = self.tower
        unit, size = _unit_rows(cotangents)
        grad = unit.to(tower.projection.dtype) @ tower.projection.t()
        grad = _norm_back(tower.ln_final, self.final, grad, index)[:, None]
        for at in range(len(self.tapes) - 1, -1, -1):
            back, _ = pull_block(tower.block(at), self.tapes[at], grad, index, through=True)
            assert back is not None
            grad = back
        D = grad.shape[-1]
        grad = grad.gather(1, positions[:, :, None].expand(-1, -1, D))
        return grad.to(size.dtype) * size[:, None, None]


def _unit_rows(cotangents: Tensor) -> tuple[Tensor, Tensor]:
    """Directions and lengths: a backward pass is linear, and half precision likes unit vectors."""
    size = cotangents.norm(dim=-1)
    return cotangents / size.clamp_min(1e-30)[:, None], size


def chunks(total: int, most: int) -> Sequence[slice]:
    """Slices of at most ``most`` that cover ``total``."""
    return [slice(at, min(at + most, total)) for at in range(0, total, max(1, most))]
