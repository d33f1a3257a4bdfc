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
    # queries, keys and values side by side (B, T, 3 D); without queries if `rows`
    packed: Tensor
    query: (
        Tensor | None
    )  # the single one of each row (B, 1, D): of `rows`, or a pooling head's
    extra: Tensor | None  # keys and values of the prefix (B, P, 2 D)
    mask: Tensor | None
    causal: bool
    second: Norm
    hidden: Tensor
    rows: Tensor | None


def record_norm(layer: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Norm]:
    """The norm's output and the tape of it."""
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
    """Gradient with respect to the norm's input, plus ``residual``."""
    fused = _fused(grad)
    if fused is not None and index is not None and residual is not None:
        forward = tape.x, tape.mean, tape.rstd
        return fused.norm_backward(residual, grad, forward, layer.weight, index)  # type: ignore[no-any-return]
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
    """Gradient with respect to what :meth:`Block.expand` gives."""
    if block.activation != "quick_gelu":
        inputs = grad, _rows(hidden, index)
        return torch.ops.aten.gelu_backward(*inputs, approximate=block.approximation)  # type: ignore[no-any-return]
    # The factor 1.702 inside silu and the one outside cancel in the derivative.
    fused = _fused(grad)
    if fused is not None and index is not None:
        return fused.silu_backward(grad, hidden, index)  # type: ignore[no-any-return]
    return torch.ops.aten.silu_backward(grad, _rows(hidden, index))  # type: ignore[no-any-return]


def _fused(x: Tensor) -> ModuleType | None:
    """The kernels of :mod:`cliquetta.model.fused` for tensors like this one, where they work."""
    if not x.is_cuda or x.dtype == torch.float64 or len(x) >= 2**16:
        return None
    return _kernels(x.device, x.dtype)


@cache
def _kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    try:
        fused = import_module("cliquetta.model.fused")
        fused.try_out(torch.empty(0, dtype=dtype, device=device))
    except (
        Exception
    ) as error:  # without Triton or a compiler for it, anything may be raised
        reason = f"{type(error).__name__}: {error}"
        _log.warning(
            "no fused kernels on %s, backward passes are slower: %s", device, reason
        )
        return None
    return fused


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
    D = x.shape[-1]
    normed, first = record_norm(block.ln_1, x)
    query = block.single_query(normed, rows)
    first_row = 0 if query is None else D
    packed = F.linear(normed, block.qkv.weight[first_row:], block.qkv.bias[first_row:])
    extra = None
    if prefix is not None:
        if mask is not None or prefix.mask is not None:
            raise UserError("a recorded prefix takes no mask")
        extra = torch.cat(block.project_prefix(prefix, packed.dtype), dim=-1)
        extra = extra.expand(len(x), -1, -1)
    causal = causal and mask is None and rows is None
    attended = _attention(block, packed, query, extra, mask, causal)
    y = block.residual(x, rows) + block.out(attended)
    normed, second = record_norm(block.ln_2, y)
    hidden = block.expand(normed)
    tape = BlockTape(first, packed, query, extra, mask, causal, second, hidden, rows)
    return block.contract(y, hidden), tape


def _attention(
    block: Block,
    packed: Tensor,
    query: Tensor | None,
    extra: Tensor | None,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attended values (B, T, D), heads side by side, from packed projections."""
    B, T, _ = packed.shape
    parts = packed.view(B, T, 3 if query is None else 2, block.heads, -1).unbind(dim=2)
    k, v = parts[-2].transpose(1, 2), parts[-1].transpose(1, 2)
    q = parts[0] if query is None else query.view(B, 1, block.heads, -1)
    if extra is not None:
        before = extra.view(B, extra.shape[1], 2, block.heads, -1)
        k = torch.cat([before[:, :, 0].transpose(1, 2), k], dim=2)
        v = torch.cat([before[:, :, 1].transpose(1, 2), v], dim=2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal
    )
    return out.transpose(1, 2).flatten(2)


def block_vjp(
    block: Block, tape: BlockTape, grad: Tensor, index: Tensor | None, *, through: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the block's input (if ``through``) and of its prefix tokens (R, P, 2, D).

    ``grad`` (R, T, D) is that of the output; row r belongs to row ``index[r]`` of the
    tape.
    """
    D = grad.shape[-1]
    inner = _activation_back(block, grad @ block.proj.weight, tape.hidden, index)
    mid = norm_vjp(
        block.ln_2, tape.second, inner @ block.fc.weight, index, residual=grad
    )
    grad = mid @ block.out.weight
    packed, query, extra = _attention_vjp(block, tape, grad, index, through=through)
    weight = block.qkv.weight
    prefix = None
    if extra is not None:
        key, value = (
            extra[..., :D] @ weight[D : 2 * D],
            extra[..., D:] @ weight[2 * D :],
        )
        prefix = torch.stack([key, value], dim=2)
    if packed is None:
        return None, prefix
    if query is None:
        hidden = norm_vjp(block.ln_1, tape.first, packed @ weight, index, residual=mid)
        return hidden, prefix
    if (
        tape.rows is None
    ):  # a pooling head: its query and its output owe nothing to one position
        return norm_vjp(block.ln_1, tape.first, packed @ weight[D:], index), prefix
    column = _rows(tape.rows, index)[:, None, None].expand(-1, 1, D)
    normed = (packed @ weight[D:]).scatter_add(1, column, query @ weight[:D])
    hidden = norm_vjp(block.ln_1, tape.first, normed, index)
    return hidden.scatter_add(1, column, mid), prefix


def _attention_vjp(
    block: Block, tape: BlockTape, grad: Tensor, index: Tensor | None, *, through: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the projections and the query (if ``through``), and of the prefix."""
    # the attention itself is done again: its fused kernels are cheaper than keeping the
    # weights
    fused, free = (
        _fused(grad),
        tape.mask is None and not tape.causal and index is not None,
    )
    if (
        free
        and fused is not None
        and fused.attends(grad, block.heads, tape.packed, tape.extra)
    ):
        given = grad, tape.packed, tape.query, tape.extra, block.heads, index
        return fused.attention_backward(*given, through=through)  # type: ignore[no-any-return]

    def leaf(x: Tensor, wanted: bool) -> Tensor:
        return _rows(x, index).detach().requires_grad_(wanted)

    packed = leaf(tape.packed, through)
    query = None if tape.query is None else leaf(tape.query, through)
    extra = None if tape.extra is None else leaf(tape.extra, True)
    mask = None if tape.mask is None else _rows(tape.mask, index)
    with torch.enable_grad():
        out = _attention(block, packed, query, extra, mask, tape.causal)
    leaves = [x for x in (packed, query, extra) if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(out, leaves, grad.to(out.dtype)))
    return (
        next(gradients) if through else None,
        next(gradients) if through and query is not None else None,
        next(gradients) if extra is not None else None,
    )


class VisualTape:
    """A prompted image forward pass from one block on, ready for many backward passes.

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
        self.tower, self.start, self.blocks = tower, min(prefix), sorted(prefix)
        self.replayed = replayed or Replayed(shapes=0)
        self.tapes: list[BlockTape] = []
        last = len(tower.blocks) - 1
        for number in range(self.start, last + 1):
            rows = None
            if number == last and tower.head is None:
                rows = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
            block, own = tower.block(number), prefix.get(number)
            hidden, tape = record_block(block, hidden, prefix=own, rows=rows)
            self.tapes.append(tape)
        if tower.head is None:
            normed, self.post = record_norm(tower.ln_post, hidden[:, 0])
            self.features = normed @ tower.projection
            """Features (b, E) at the start prompts, not normalised, in the tower's dtype."""
        else:
            pooled, self.pooling = record_block(tower.head, hidden)
            self.features = pooled[:, 0]

    @torch.no_grad()
    def vjp(self, cotangents: Tensor, index: Tensor | None) -> dict[int, Tensor]:
        """Gradients (R, P, 2, D) of every prefix, float32.

        ``cotangents`` (R, E) are gradients of the loss in the features; row r is of
        image ``index[r]``, or of image r without an index.
        """
        if index is None:
            return dict(zip(self.blocks, self._pull(cotangents, index), strict=True))
        order = (
            index.argsort()
        )  # rows of one image, one behind the other, are read from a cache
        sorted_rows = self.replayed.by_rows(self._pull, cotangents[order], index[order])
        back = [
            torch.empty_like(rows).index_copy(0, order, rows) for rows in sorted_rows
        ]
        return dict(zip(self.blocks, back, strict=True))

    @torch.no_grad()
    def _pull(self, cotangents: Tensor, index: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients in order of blocks."""
        tower = self.tower
        unit, size = _unit_rows(cotangents)
        direction = unit.to(self.features.dtype)
        grad: Tensor | None
        if tower.head is None:
            grad = direction @ tower.projection.t()
            grad = norm_vjp(tower.ln_post, self.post, grad, index)[:, None]
        else:
            grad, _ = block_vjp(
                tower.head, self.pooling, direction[:, None], index, through=True
            )
        gradients: list[Tensor] = []
        for number in range(len(tower.blocks) - 1, self.start - 1, -1):
            assert grad is not None
            tape, through = self.tapes[number - self.start], number > self.start
            grad, prefix = block_vjp(
                tower.block(number), tape, grad, index, through=through
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
        self.tower, self.blocks, self.replayed, self.most = (
            tower,
            tuple(blocks),
            replayed,
            most,
        )
        self._forward: Recording | None = None
        self._tape: VisualTape | None = None

    def __call__(self, hidden: Tensor, prompts: Tensor) -> VisualTape:
        """The tape of images with these hidden states (b, T, D) under prompts (B, P, 2, D)."""
        if not hidden.is_cuda:
            return self._new(hidden, prompts, self.replayed)
        if self._forward is None and len(hidden) <= self.most and self.replayed.shapes:
            made: list[VisualTape] = []

            def run(hidden: Tensor, prompts: Tensor) -> tuple[()]:
                made[:] = [self._new(hidden, prompts, self.replayed)]
                return ()

            with torch.cuda.device(hidden.device):
                self._forward = record(run, (hidden, prompts))
            self._tape = made[0]
        if (
            self._tape is None
            or self._forward is None
            or not self._forward.fits(hidden, prompts)
        ):
            return self._new(hidden, prompts)
        self._forward.replay((hidden, prompts))
        return self._tape

    def _new(
        self, hidden: Tensor, prompts: Tensor, replayed: Replayed | None = None
    ) -> VisualTape:
        prefix = {
            block: Prefix(own[None])
            for block, own in zip(self.blocks, prompts, strict=True)
        }
        return VisualTape(self.tower, hidden, prefix, replayed)


class TextTape:
    """A text forward pass of some classes, ready for many backward passes to their context."""

    @torch.no_grad()
    def __init__(self, tower: TextTower, embeddings: Tensor, ends: Tensor) -> None:
        self.tower = tower
        L = embeddings.shape[1]
        x = embeddings + tower.position[:L]
        self.tapes: list[BlockTape] = []
        for number in range(len(tower.blocks) - 1):
            x, tape = record_block(tower.block(number), x, causal=tower.config.causal)
            self.tapes.append(tape)
        last = tower.block(len(tower.blocks) - 1)
        x, tape = record_block(last, x, mask=tower.seen(ends, L), rows=ends)
        self.tapes.append(tape)
        normed, self.final = record_norm(tower.ln_final, x[:, 0])
        self.features = tower.project(normed)
        """Features (n, E), not normalised, in the tower's dtype."""

    @torch.no_grad()
    def vjp(self, cotangents: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        """Gradients (R, M, D), float32, of the embeddings at ``positions`` (R, M)."""
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
        grad = grad.gather(1, positions[:, :, None].expand(-1, -1, grad.shape[-1]))
        return grad.to(size.dtype) * size[:, None, None]


def _unit_rows(cotangents: Tensor) -> tuple[Tensor, Tensor]:
    """Directions and lengths: a backward pass is linear, and half precision likes unit vectors."""
    size = cotangents.norm(dim=-1)
    return cotangents / size.clamp_min(1e-30)[:, None], size


def chunks(total: int, most: int) -> Sequence[slice]:
    """Slices of at most ``most`` that cover ``total``."""
    return [slice(at, min(at + most, total)) for at in range(0, total, max(1, most))]
