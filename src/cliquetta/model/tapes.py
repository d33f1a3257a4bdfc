"""Forward passes of a whole tower that many backward passes are taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.model.block import Prefix
from cliquetta.model.cuda import Recording, Replayed, record
from cliquetta.model.text import TextTower
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import BlockTape, block_vjp, norm_vjp, record_block, record_norm


class VisualTape:
    """A prompted image forward pass from one block on, ready for many backward passes.

    ``hidden`` (b, T, D) are the states at the input of the first prompted block; nothing before
    depends on the prompts. ``prefix`` maps blocks to what all images start from. Backward passes
    may be ``replayed`` if the tape stays where it is in memory.
    """

    @torch.no_grad()
    def __init__(
        self,
        tower: VisionTower,
        hidden: Tensor,
        start: int,
        prefix: Mapping[int, Prefix],
        replayed: Replayed | None = None,
    ) -> None:
        if min(prefix) != start:
            raise UserError(f"the tape starts at block {start}, the first prefix at {min(prefix)}")
        self.tower, self.start, self.blocks = tower, start, sorted(prefix)
        self.replayed = replayed or Replayed(shapes=0)
        self.tapes: list[BlockTape] = []
        last = len(tower.blocks) - 1
        for number in range(start, last + 1):
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

        ``cotangents`` (R, E) are gradients of the loss in the features; row r is of image
        ``index[r]``, or of image r without an index.
        """
        if index is None:
            return dict(zip(self.blocks, self._pull(cotangents, index), strict=True))
        order = index.argsort()  # rows of one image, one behind the other, are read from a cache
        sorted_rows = self.replayed.by_rows(self._pull, cotangents[order], index[order])
        back = [torch.empty_like(rows).index_copy(0, order, rows) for rows in sorted_rows]
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
            grad, _ = block_vjp(tower.head, self.pooling, direction[:, None], index, through=True)
        gradients: list[Tensor] = []
        for number in range(len(tower.blocks) - 1, self.start - 1, -1):
            assert grad is not None
            block, tape, through = (
                tower.block(number),
                self.tapes[number - self.start],
                number > self.start,
            )
            grad, prefix = block_vjp(block, tape, grad, index, through=through)
            if prefix is not None:
                gradients.insert(0, prefix.to(size.dtype) * size[:, None, None, None])
        return tuple(gradients)


class VisualTapes:
    """Makes visual tapes of prompts in some blocks; on CUDA, those of one shape are replayed.

    A recorded pass writes to the same memory every time, so that backward passes over it can be
    recorded as well: such a tape is good until the next one is made. Batches of more than ``most``
    images are not recorded, because their memory is held.
    """

    def __init__(
        self, tower: VisionTower, blocks: Sequence[int], replayed: Replayed, most: int
    ) -> None:
        self.tower, self.blocks, self.replayed, self.most = tower, tuple(blocks), replayed, most
        self._forward: Recording | None = None
        self._tape: VisualTape | None = None

    def __call__(self, hidden: Tensor, prompts: Tensor) -> VisualTape:
        """The tape of images with these hidden states (b, T, D) under prompts (B, P, 2, D)."""
        if not hidden.is_cuda:
            return self._make(hidden, prompts, self.replayed)
        if self._forward is None and len(hidden) <= self.most and self.replayed.shapes:
            made: list[VisualTape] = []

            def run(hidden: Tensor, prompts: Tensor) -> tuple[()]:
                made[:] = [self._make(hidden, prompts, self.replayed)]
                return ()

            with torch.cuda.device(hidden.device):
                self._forward = record(run, (hidden, prompts))
            self._tape = made[0]
        if self._tape is None or self._forward is None or not self._forward.fits(hidden, prompts):
            return self._make(hidden, prompts)
        self._forward.replay((hidden, prompts))
        return self._tape

    def _make(
        self, hidden: Tensor, prompts: Tensor, replayed: Replayed | None = None
    ) -> VisualTape:
        prefix = {block: Prefix(own[None]) for block, own in zip(self.blocks, prompts, strict=True)}
        return VisualTape(self.tower, hidden, self.blocks[0], prefix, replayed)


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
            back, _ = block_vjp(tower.block(number), self.tapes[number], grad, index, through=True)
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
