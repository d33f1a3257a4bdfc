"""Many vector-Jacobian products of towers from one recorded forward pass.

Where many gradients start from the same point (cliques from the same prompts, rows of a
Jacobian), autograd would run the forward pass over and over. Each cotangent names the
recorded row that it belongs to; weights are frozen, so only norms, activations and
attention gather anything by row.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta.errors import UserError
from cliquetta.model.block import Block, Prefix
from cliquetta.model.cuda import Recording, Replayed, record
from cliquetta.model.text import TextTower
from cliquetta.model.vision import VisionTower

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Norm:
    """Input and statistics of a LayerNorm."""

    x: Tensor
    mean: Tensor
    rstd: Tensor


@dataclass(frozen=True)
class BlockTape:
    """Values of one block's forward pass that its backward pass needs, by row."""

    first: Norm
    # Queries, keys and values side by side (B, T, 3 D); without queries if
    # `query`.
    packed: Tensor
    # The single one of each row (B, 1, D): of `rows`, or a pooling head's.
    query: Tensor | None
    # Keys and values of the prefix (B, P, 2 D).
    extra: Tensor | None
    mask: Tensor | None
    causal: bool
    second: Norm
    hidden: Tensor
    rows: Tensor | None


def record_norm(layer: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Norm]:
    """Compute a norm's output and the tape of it."""
    out, mean, rstd = torch.native_layer_norm(
        x, layer.normalized_shape, layer.weight, layer.bias, layer.eps
    )
    return out, Norm(x, mean, rstd)


def norm_vjp(
    layer: nn.LayerNorm,
    tape: Norm,
    grad: Tensor,
    index: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the gradient with respect to the norm's input, plus ``residual``."""
    fused = _fused(grad)
    if fused is not None and index is not None and residual is not None:
        forward = (tape.x, tape.mean, tape.rstd)
        return fused.norm_backward(residual, grad, forward, layer.weight, index)  # type: ignore[no-any-return]

    # Without fused kernels, the recorded rows are copied for each gradient.
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
    return back if residual is None else residual + back


def _activation_back(
    block: Block, grad: Tensor, hidden: Tensor, index: Tensor | None
) -> Tensor:
    """Compute the gradient with respect to what :meth:`Block.expand` gives."""
    if block.activation != "quick_gelu":
        return torch.ops.aten.gelu_backward(  # type: ignore[no-any-return]
            grad, _rows(hidden, index), approximate=block.approximation
        )
    # The factor 1.702 inside silu and the one outside cancel in the derivative.
    fused = _fused(grad)
    if fused is not None and index is not None:
        return fused.silu_backward(grad, hidden, index)  # type: ignore[no-any-return]
    return torch.ops.aten.silu_backward(grad, _rows(hidden, index))  # type: ignore[no-any-return]


def _fused(x: Tensor) -> ModuleType | None:
    """Return the kernels of :mod:`cliquetta.model.fused` for tensors like ``x``, if they work."""
    if not x.is_cuda or x.dtype == torch.float64 or len(x) >= 2**16:
        return None
    return _kernels(x.device, x.dtype)


@cache
def _kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Try the fused kernels once on a device; without them, warn."""
    try:
        fused = import_module("cliquetta.model.fused")
        fused.try_out(torch.empty(0, dtype=dtype, device=device))
    # Without Triton or a compiler for it, anything may be raised.
    except Exception as error:
        _log.warning(
            "no fused kernels on %s, backward passes are slower: %s: %s",
            device,
            type(error).__name__,
            error,
        )
        return None
    return fused


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    """Take rows ``index`` of a recorded value, or all."""
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
    """Compute the block's output, as :meth:`Block.forward` does, and the tape of it."""
    normed, first = record_norm(block.ln_1, x)
    query = block.single_query(normed, rows)

    # A single query is projected by itself, all others with keys and values.
    first_row = 0 if query is None else x.shape[-1]
    packed = F.linear(normed, block.qkv.weight[first_row:], block.qkv.bias[first_row:])

    extra = None
    if prefix is not None:
        if mask is not None or prefix.mask is not None:
            raise UserError("a recorded prefix takes no mask")
        extra = torch.cat(block.project_prefix(prefix, packed.dtype), dim=-1)
        extra = extra.expand(len(x), -1, -1)
    causal = causal and mask is None and rows is None
    attended = _attention(block, packed, query, extra, mask, causal)

    # The MLP half of the block.
    y = block.residual(x, rows) + block.out(attended)
    normed, second = record_norm(block.ln_2, y)
    hidden = block.expand(normed)
    tape = BlockTape(
        first=first,
        packed=packed,
        query=query,
        extra=extra,
        mask=mask,
        causal=causal,
        second=second,
        hidden=hidden,
        rows=rows,
    )
    return block.contract(y, hidden), tape


def _attention(
    block: Block,
    packed: Tensor,
    query: Tensor | None,
    extra: Tensor | None,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attend (B, T, D), heads side by side, from packed projections."""
    B, T, _ = packed.shape
    heads = block.heads
    if query is None:
        q, k, v = packed.view(B, T, 3, heads, -1).unbind(dim=2)
    else:
        q = query.view(B, 1, heads, -1)
        k, v = packed.view(B, T, 2, heads, -1).unbind(dim=2)

    # By heads: (B, heads, T, D / heads); those of the prefix in front.
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    if extra is not None:
        before = extra.view(B, extra.shape[1], 2, heads, -1)
        k = torch.cat([before[:, :, 0].transpose(1, 2), k], dim=2)
        v = torch.cat([before[:, :, 1].transpose(1, 2), v], dim=2)

    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal
    )
    return out.transpose(1, 2).flatten(2)


def block_vjp(
    block: Block, tape: BlockTape, grad: Tensor, index: Tensor | None, *, through: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute gradients of the block's input (if ``through``) and of its prefix (R, P, 2, D).

    ``grad`` (R, T, D) is that of the output; row r belongs to row ``index[r]`` of the
    tape.
    """
    D = grad.shape[-1]

    # Back through the MLP: `middle` is the gradient between attention and MLP.
    inner = _activation_back(block, grad @ block.proj.weight, tape.hidden, index)
    middle = norm_vjp(
        block.ln_2, tape.second, inner @ block.fc.weight, index, residual=grad
    )

    # Back through the attention to its projections.
    attended = middle @ block.out.weight
    packed, query, extra = _attention_vjp(block, tape, attended, index, through=through)
    weight = block.qkv.weight
    prefix = None
    if extra is not None:
        keys = extra[..., :D] @ weight[D : 2 * D]
        values = extra[..., D:] @ weight[2 * D :]
        prefix = torch.stack([keys, values], dim=2)
    if packed is None:
        return None, prefix

    # Back to the block's input; it also reaches the output past the attention.
    if query is None:
        normed = packed @ weight
        hidden = norm_vjp(block.ln_1, tape.first, normed, index, residual=middle)
        return hidden, prefix

    normed = packed @ weight[D:]
    if tape.rows is None:
        # Query and output of a pooling head belong to no position.
        return norm_vjp(block.ln_1, tape.first, normed, index), prefix

    # A single query was read at one position.
    position = _rows(tape.rows, index)[:, None, None].expand(-1, 1, D)
    normed = normed.scatter_add(1, position, query @ weight[:D])
    hidden = norm_vjp(block.ln_1, tape.first, normed, index)
    return hidden.scatter_add(1, position, middle), prefix


def _attention_vjp(
    block: Block, tape: BlockTape, grad: Tensor, index: Tensor | None, *, through: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients of projections and query (if ``through``), and of the prefix."""
    is_plain = tape.mask is None and not tape.causal and index is not None
    fused = _fused(grad) if is_plain else None
    if fused is not None and fused.attends(grad, block.heads, tape.packed, tape.extra):
        return fused.attention_backward(  # type: ignore[no-any-return]
            grad,
            tape.packed,
            tape.query,
            tape.extra,
            block.heads,
            index,
            through=through,
        )

    # The attention itself is done again: its fused kernels are cheaper than keeping the
    # weights.
    def leaf(x: Tensor | None, wanted: bool) -> Tensor | None:
        if x is None:
            return None
        return _rows(x, index).detach().requires_grad_(wanted)

    packed = _rows(tape.packed, index).detach().requires_grad_(through)
    query = leaf(tape.query, through)
    extra = leaf(tape.extra, True)
    mask = None if tape.mask is None else _rows(tape.mask, index)

    with torch.enable_grad():
        out = _attention(block, packed, query, extra, mask, tape.causal)

    # Only what needs a gradient may be asked for one.
    leaves = [packed, query] if through else []
    leaves.append(extra)
    present = [x for x in leaves if x is not None]
    gradients = iter(torch.autograd.grad(out, present, grad.to(out.dtype)))
    return (
        next(gradients) if through else None,
        next(gradients) if through and query is not None else None,
        next(gradients) if extra is not None else None,
    )


class VisualTape:
    """Prompted image forward pass from one block on, ready for many backward passes.

    ``hidden`` (b, T, D) are the states at the input of the first block with a
    ``prefix``. Backward passes may be ``replayed`` if the tape does not move in memory.
    """

    @torch.no_grad()
    def __init__(
        self,
        tower: VisionTower,
        hidden: Tensor,
        prefix: Mapping[int, Prefix],
        replayed: Replayed | None = None,
    ) -> None:
        self.tower = tower
        self.start = min(prefix)
        self.blocks = sorted(prefix)
        self.replayed = replayed or Replayed(shapes=0)
        self.tapes: list[BlockTape] = []

        last = len(tower.blocks) - 1
        for number in range(self.start, last + 1):
            # Of the last block only the class token is read.
            rows = None
            if number == last and tower.head is None:
                rows = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
            hidden, tape = record_block(
                tower.block(number), hidden, prefix=prefix.get(number), rows=rows
            )
            self.tapes.append(tape)

        # What turns the last state into features is recorded, too.
        if tower.head is None:
            normed, self.post = record_norm(tower.ln_post, hidden[:, 0])
            self.features = normed @ tower.projection
            """Features (b, E) at the start prompts, not normalised, in the tower's dtype."""
        else:
            pooled, self.pooling = record_block(tower.head, hidden)
            self.features = pooled[:, 0]

    @torch.no_grad()
    def vjp(self, cotangents: Tensor, index: Tensor | None) -> dict[int, Tensor]:
        """Compute gradients (R, P, 2, D) of every prefix, float32.

        ``cotangents`` (R, E) are gradients of the loss in the features; row r is of
        image ``index[r]``, or of image r without an index.
        """
        if index is None:
            gradients = self._pull(cotangents, index)
            return dict(zip(self.blocks, gradients, strict=True))

        # Rows of one image, one behind the other, are read from a cache.
        order = index.argsort()
        gradients = self.replayed.by_rows(self._pull, cotangents[order], index[order])

        # Back into the order of the cotangents.
        by_block = {}
        for block, rows in zip(self.blocks, gradients, strict=True):
            by_block[block] = torch.empty_like(rows).index_copy(0, order, rows)
        return by_block

    @torch.no_grad()
    def _pull(self, cotangents: Tensor, index: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the gradients in order of blocks."""
        tower = self.tower
        unit, size = _unit_rows(cotangents)
        direction = unit.to(self.features.dtype)

        # Back through the projection or the pooling head.
        grad: Tensor | None
        if tower.head is None:
            grad = direction @ tower.projection.t()
            grad = norm_vjp(tower.ln_post, self.post, grad, index)[:, None]
        else:
            grad, _ = block_vjp(
                tower.head, self.pooling, direction[:, None], index, through=True
            )

        # Back through the blocks, down to the first that has a prefix.
        gradients: list[Tensor] = []
        for number in range(len(tower.blocks) - 1, self.start - 1, -1):
            assert grad is not None
            grad, prefix = block_vjp(
                tower.block(number),
                self.tapes[number - self.start],
                grad,
                index,
                through=number > self.start,
            )
            if prefix is not None:
                gradients.insert(0, prefix.to(size.dtype) * size[:, None, None, None])
        return tuple(gradients)


class VisualTapes:
    """Makes visual tapes of prompts in some blocks; on CUDA, those of one shape are replayed.

    A replayed tape is good until the next one is made: it is in the same memory.
    Batches of more than ``most`` images are not recorded, because their memory is held.
    """

    def __init__(
        self, tower: VisionTower, blocks: Sequence[int], replayed: Replayed, most: int
    ) -> None:
        self.tower = tower
        self.blocks = tuple(blocks)
        self.replayed = replayed
        self.most = most
        self._forward: Recording | None = None
        self._tape: VisualTape | None = None

    def __call__(self, hidden: Tensor, prompts: Tensor) -> VisualTape:
        """Record images with hidden states (b, T, D) under prompts (B, P, 2, D)."""
        if not hidden.is_cuda:
            return self._new(hidden, prompts, self.replayed)
        if self._forward is None and len(hidden) <= self.most and self.replayed.shapes:
            # The first batch is recorded; the tape lives in the recording's memory.
            made: list[VisualTape] = []

            def run(hidden: Tensor, prompts: Tensor) -> tuple[()]:
                made[:] = [self._new(hidden, prompts, self.replayed)]
                return ()

            with torch.cuda.device(hidden.device):
                self._forward = record(run, (hidden, prompts))
            self._tape = made[0]

        # Inputs of another shape are not replayed.
        if self._tape is None or self._forward is None:
            return self._new(hidden, prompts)
        if not self._forward.fits(hidden, prompts):
            return self._new(hidden, prompts)

        self._forward.replay((hidden, prompts))
        return self._tape

    def _new(
        self, hidden: Tensor, prompts: Tensor, replayed: Replayed | None = None
    ) -> VisualTape:
        """Record images anew."""
        prefix = {}
        for block, tokens in zip(self.blocks, prompts, strict=True):
            prefix[block] = Prefix(tokens[None])
        return VisualTape(self.tower, hidden, prefix, replayed)


class TextTape:
    """Text forward pass of some classes, ready for many backward passes to their context."""

    @torch.no_grad()
    def __init__(self, tower: TextTower, embeddings: Tensor, ends: Tensor) -> None:
        self.tower = tower
        L = embeddings.shape[1]

        last = len(tower.blocks) - 1
        x = embeddings + tower.position[:L]
        self.tapes: list[BlockTape] = []
        for number in range(last):
            x, tape = record_block(tower.block(number), x, causal=tower.config.causal)
            self.tapes.append(tape)

        # Of the last block only the end is read.
        mask = tower.seen(ends, L)
        x, tape = record_block(tower.block(last), x, mask=mask, rows=ends)
        self.tapes.append(tape)

        normed, self.final = record_norm(tower.ln_final, x[:, 0])
        self.features = tower.project(normed)
        """Features (n, E), not normalised, in the tower's dtype."""

    @torch.no_grad()
    def vjp(self, cotangents: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        """Compute gradients (R, M, D), float32, of the embeddings at ``positions`` (R, M)."""
        # Back through projection and final norm.
        tower = self.tower
        unit, size = _unit_rows(cotangents)
        grad = unit.to(tower.projection.dtype) @ tower.projection.t()
        grad = norm_vjp(tower.ln_final, self.final, grad, index)[:, None]

        for number in range(len(self.tapes) - 1, -1, -1):
            back, _ = block_vjp(
                tower.block(number), self.tapes[number], grad, index, through=True
            )
            assert back is not None
            grad = back

        # Only the words of the context are asked for.
        where = positions[:, :, None].expand(-1, -1, grad.shape[-1])
        grad = grad.gather(1, where)
        return grad.to(size.dtype) * size[:, None, None]


def _unit_rows(cotangents: Tensor) -> tuple[Tensor, Tensor]:
    """Split into directions and lengths.

    A backward pass is linear, and half precision is most exact for unit vectors.
    """
    size = cotangents.norm(dim=-1)
    return cotangents / size.clamp_min(1e-30)[:, None], size


def chunks(total: int, most: int) -> Sequence[slice]:
    """Cover ``total`` by slices of at most ``most``."""
    firsts = range(0, total, max(1, most))
    return [slice(first, min(first + most, total)) for first in firsts]
