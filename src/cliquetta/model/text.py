"""Text tower, with learnable context instead of template words.

A causal tower reads only the end token, so sequences are cut there, in chunks sorted by
length; SigLIP's reads the last position. On CUDA, without gradients, padding is not
computed either.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from cliquetta.model.block import Block
from cliquetta.model.config import TextConfig
from cliquetta.model.cuda import send

# GPUs want few launches, CPUs little padding.
CHUNK_TOKENS = {"cuda": 32768, "cpu": 4096}
# Where leaving out the padding pays: on a CPU, sorted chunks have little of it.
PACKED = "cuda"


class TextTower(nn.Module):
    """Token ids to features."""

    def __init__(self, config: TextConfig, embed_dim: int) -> None:
        super().__init__()
        self.config = config
        # The random weight of nn.Embedding would import torch._dynamo on the meta
        # device.
        unset = torch.zeros(config.vocab_size, config.width)
        self.tokens = nn.Embedding(config.vocab_size, config.width, _weight=unset)
        self.position = nn.Parameter(torch.zeros(config.context_length, config.width))

        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_final = nn.LayerNorm(config.width, eps=config.eps)
        self.projection = nn.Parameter(torch.zeros(config.width, embed_dim))

        # Only SigLIP's projection has a bias.
        bias = nn.Parameter(torch.zeros(embed_dim)) if config.projection_bias else None
        self.projection_bias = bias

    def block(self, index: int) -> Block:
        """Return block ``index``, typed."""
        return cast(Block, self.blocks[index])

    def forward(
        self,
        ids: Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        deep: Sequence[Tensor] = (),
        chunk: int | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Compute features (N, E) of token ids (N, L), not normalised.

        ``context`` (M, D), or (N, M, D) per row, replaces the token embeddings at
        ``positions`` (N, M), by default the first M words; ``deep[j - 1]`` (M', D) the
        first M' hidden words at the input of block j (MaPLe). ``chunk`` rows run at a
        time, by default as many as ``CHUNK_TOKENS`` allows. ``ends`` (N,) on the CPU
        are those of :meth:`ends`, if known.
        """
        # Nothing behind the longest text is computed.
        ends = (self.ends(ids) if ends is None else ends).cpu()
        N = len(ids)
        longest = int(ends.max()) + 1
        if context is not None and positions is None:
            positions = self.word_positions(context.shape[-2]).expand(N, -1)
        if chunk is None:
            most = CHUNK_TOKENS.get(ids.device.type, 4096)
            chunk = max(1, most // longest)
        if chunk >= N:
            return self._run_rows(ids[:, :longest], ends, context, positions, deep)

        # Texts of like length run together, each chunk cut at its longest.
        order = ends.argsort(stable=True)
        sorted_ends = torch.split(ends[order], chunk)
        sorted_rows = torch.split(send(order, ids.device), chunk)
        parts = []
        for chunk_ends, rows in zip(sorted_ends, sorted_rows, strict=True):
            length = int(chunk_ends[-1]) + 1
            words = context
            if context is not None and context.ndim == 3:
                words = context[rows]
            part = self._run_rows(
                ids[rows, :length],
                chunk_ends,
                words,
                None if positions is None else positions[rows],
                deep,
            )
            parts.append(part)
        return torch.cat(parts)[send(order.argsort(), ids.device)]

    def ends(self, ids: Tensor) -> Tensor:
        """Return the position (N,) at which each text (N, L) is read."""
        if not self.config.causal:
            rows, length = ids.shape
            return ids.new_full((rows,), length - 1)

        if self.config.end is None:
            return ids.argmax(dim=-1)
        return (ids == self.config.end).int().argmax(dim=-1)

    def word_positions(self, count: int) -> Tensor:
        """Return the positions (count,) of the first words of a text."""
        first = self.config.start_tokens
        return torch.arange(first, first + count, device=self.position.device)

    def _run_rows(
        self,
        ids: Tensor,
        ends: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        deep: Sequence[Tensor],
    ) -> Tensor:
        """Compute features (R, E) of cut token ids (R, L) at once; ``ends`` (R,) on the CPU."""
        # (R, L, D)
        x = self.tokens(ids)
        if context is not None and positions is not None:
            x = with_context(x, context, positions)
        # Gathering has a slow backward pass, so gradients take the padded way.
        can_pack = self.config.causal and not deep and not x.requires_grad
        if can_pack and x.device.type == PACKED:
            return self.encode_packed(x, ends)
        return self.encode(x, send(ends, x.device), deep=deep)

    def encode(
        self, embeddings: Tensor, ends: Tensor, *, deep: Sequence[Tensor] = ()
    ) -> Tensor:
        """Compute features (R, E) of embedded sequences (R, L, D) that end at ``ends`` (R,)."""
        R, L, _ = embeddings.shape
        x = embeddings + self.position[:L]
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            if 0 < index <= len(deep):
                # Hidden words give way to prompts.
                prompt = deep[index - 1].to(x.dtype)
                prompt = prompt.expand(R, *prompt.shape[-2:])

                start = self.config.start_tokens
                stop = start + prompt.shape[1]
                x = torch.cat([x[:, :start], prompt, x[:, stop:]], dim=1)

            # The last block runs at the ends only.
            if index < last:
                x = block(x, causal=self.config.causal)
        return self._read_ends(x, ends)

    def encode_packed(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        """Compute what :meth:`encode` does, but nothing behind the ends."""
        R, L, D = embeddings.shape
        device = embeddings.device

        # Tokens up to the end of each text, and their slots in rows of L.
        real = (torch.arange(L) <= ends.cpu()[:, None]).flatten()
        slots = send(real.nonzero()[:, 0], device)

        # The empty slots of a row repeat a token: what stands behind the end is never
        # seen.
        tokens = send(real.cumsum(dim=0) - 1, device)
        x = (embeddings + self.position[:L]).flatten(0, 1)
        x = x.index_select(0, slots)

        for index in range(len(self.blocks) - 1):
            x = self.block(index).packed(x, slots, tokens, L)
        padded = x.index_select(0, tokens).view(R, L, D)
        return self._read_ends(padded, send(ends, device))

    def _read_ends(self, x: Tensor, ends: Tensor) -> Tensor:
        """Run the last block on its input (R, L, D) at ``ends`` only; give features (R, E)."""
        last = self.block(len(self.blocks) - 1)
        mask = self.seen(ends, x.shape[1])
        x = last(x, mask=mask, rows=ends)
        return self.project(self.ln_final(x[:, 0]))

    def seen(self, ends: Tensor, length: int) -> Tensor | None:
        """Mask (R, 1, 1, L) of the tokens that the read position sees; ``None``: all."""
        if not self.config.causal:
            return None
        positions = torch.arange(length, device=ends.device)
        return (positions <= ends[:, None])[:, None, None]

    def project(self, normed: Tensor) -> Tensor:
        """Project read tokens after the final norm to features (R, E)."""
        features = normed @ self.projection
        if self.projection_bias is None:
            return features
        return features + self.projection_bias


def with_context(embeddings: Tensor, context: Tensor, positions: Tensor) -> Tensor:
    """Put ``context`` (M, D) or (R, M, D) at ``positions`` (R, M) of embeddings (R, L, D)."""
    R, _, D = embeddings.shape
    context = context.to(embeddings.dtype).expand(R, -1, D)
    index = positions[:, :, None].expand(-1, -1, D)
    return embeddings.scatter(1, index, context)
