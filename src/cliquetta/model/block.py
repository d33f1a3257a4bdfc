"""Transformer block of both towers, with room for prompts in its attention."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta.errors import UserError
from cliquetta.model.config import TransformerConfig


@dataclass(frozen=True)
class Prefix:
    """Key/value prompt tokens of one block, per row of the batch.

    ``tokens`` (R, P, 2, D), or (1, P, 2, D) for all rows, are inputs to the block's own
    key (0) and value projection (1). ``mask`` (R, P) is true where a token exists.
    """

    tokens: Tensor
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse shapes that do not fit."""
        shape = tuple(self.tokens.shape)
        if len(shape) != 4 or shape[2] != 2:
            raise UserError(f"prefix tokens are (R, P, 2, D), got {shape}")

        if self.mask is not None and self.mask.shape != shape[:2]:
            mask = tuple(self.mask.shape)
            raise UserError(f"prefix mask {mask} does not fit tokens {shape}")


# OpenAI's QuickGELU is u * sigmoid(1.702 u).
QUICK = 1.702


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.activation = config.activation

        self.ln_1 = nn.LayerNorm(width, eps=config.eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

        self.ln_2 = nn.LayerNorm(width, eps=config.eps)
        self.fc = nn.Linear(width, config.hidden)
        self.proj = nn.Linear(config.hidden, width)

    @property
    def approximation(self) -> Literal["tanh", "none"]:
        """Approximation of the GELU, as torch names it."""
        return "tanh" if self.activation == "gelu_tanh" else "none"

    def forward(
        self,
        x: Tensor,
        *,
        prefix: Prefix | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states (B, T, D), or those (B, 1, D) of positions ``rows`` (B,) only.

        ``mask`` is added to the attention scores or, if boolean, true where a token may
        be seen.
        """
        q, k, v = self.heads_of(self.ln_1(x), rows)
        if prefix is not None:
            k, v, mask = self.prepend(prefix, k, v, mask)

        # A mask, or a single query, says itself what may be seen.
        is_causal = causal and mask is None and rows is None
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal
        )
        return self._rest(self.residual(x, rows), attended)

    def packed(self, x: Tensor, slots: Tensor, tokens: Tensor, length: int) -> Tensor:
        """Run a causal block over tokens (T, D) packed one after the other.

        Attention has rows of ``length`` slots: ``slots`` (T,) are those of the tokens,
        ``tokens`` (R * length,) the tokens in the slots.
        """
        # Queries, keys and values of all slots: (R, heads, length, D / heads).
        size = x.shape[1] // self.heads
        projected = self.qkv(self.ln_1(x)).index_select(0, tokens)
        parts = projected.view(-1, length, 3, self.heads, size).unbind(dim=2)
        q, k, v = (part.transpose(1, 2) for part in parts)

        # Causal, so empty slots behind a text change nothing.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)

        # Back to the tokens: (T, D).
        flat = attended.transpose(1, 2).reshape(len(projected), -1)
        flat = flat.index_select(0, slots)
        return self.mlp((x + self.out(flat))[None])[0]

    def with_weights(
        self, x: Tensor, *, prefix: Prefix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states and attention weights (B, heads, T, P + T), prefix first."""
        q, k, v = self.heads_of(self.ln_1(x), None)
        mask = None
        if prefix is not None:
            k, v, mask = self.prepend(prefix, k, v, None)

        # Attention by hand: the fused one does not give its weights.
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)

        # Half precision is too coarse for the sum of a softmax.
        weights = scores.float().softmax(dim=-1)
        attended = weights.to(v.dtype) @ v
        return self._rest(self.residual(x, None), attended), weights

    def heads_of(
        self, normed: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project queries, keys and values (B, H, T, D/H) of the normed input.

        With ``rows`` there is one query for each sequence.
        """
        B, T, D = normed.shape
        size = D // self.heads

        query = self.single_query(normed, rows)
        if query is None:
            parts = self.qkv(normed).view(B, T, 3, self.heads, size)
            q, k, v = parts.unbind(dim=2)
        else:
            # A single query is projected alone, keys and values together.
            q = query.view(B, 1, self.heads, size)
            kv = F.linear(normed, self.qkv.weight[D:], self.qkv.bias[D:])
            k, v = kv.view(B, T, 2, self.heads, size).unbind(dim=2)

        # By heads, which attention wants before tokens.
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def single_query(self, normed: Tensor, rows: Tensor | None) -> Tensor | None:
        """Project the one query (B, 1, D) of a sequence; ``None`` if every position asks."""
        if rows is None:
            return None
        D = normed.shape[2]

        # The first third of the projection is that of the queries.
        weight = self.qkv.weight[:D]
        bias = self.qkv.bias[:D]
        return F.linear(take_positions(normed, rows), weight, bias)

    def residual(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Return the input that the attention's output is added to."""
        return x if rows is None else take_positions(x, rows)

    def prepend(
        self, prefix: Prefix, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put keys and values of the prefix in front; return them with the mask that fits."""
        # One row of tokens may serve the whole batch (R = 1).
        B, H, T, size = k.shape
        R, P, _, _ = prefix.tokens.shape
        if mask is not None:
            raise UserError("a prefix and an attention mask cannot be combined")
        keys, values = self.project_prefix(prefix, k.dtype)

        # By heads (R, H, P, D/H); one row stands for all.
        keys = keys.view(R, P, H, size).transpose(1, 2).expand(B, -1, -1, -1)
        values = values.view(R, P, H, size).transpose(1, 2).expand(B, -1, -1, -1)

        # Tokens of the sequence itself are always seen.
        if prefix.mask is not None:
            seen = torch.ones(B, P + T, dtype=torch.bool, device=k.device)
            seen[:, :P] = prefix.mask
            mask = seen[:, None, None, :]

        return torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2), mask

    def project_prefix(
        self, prefix: Prefix, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Project prefix tokens to keys and values (R, P, D), heads side by side."""
        tokens = prefix.tokens.to(dtype)

        # The parts of the projection for queries, keys and values.
        _, key_weight, value_weight = self.qkv.weight.chunk(3)
        _, key_bias, value_bias = self.qkv.bias.chunk(3)

        keys = F.linear(tokens[:, :, 0], key_weight, key_bias)
        values = F.linear(tokens[:, :, 1], value_weight, value_bias)
        return keys, values

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Apply output projection, residuals and MLP after the attention."""
        B, _, T, _ = attended.shape
        # Without names for the steps, whose values would fill memory during the MLP.
        return self.mlp(x + self.out(attended.transpose(1, 2).reshape(B, T, -1)))

    def mlp(self, x: Tensor) -> Tensor:
        """Add the MLP of its norm to ``x``."""
        return self.contract(x, self.expand(self.ln_2(x)))

    def expand(self, normed: Tensor) -> Tensor:
        """Compute the hidden layer u before its activation, (B, T, hidden); QuickGELU: 1.702 u."""
        weight = self.fc.weight
        bias = self.fc.bias
        if self.activation != "quick_gelu":
            return F.linear(normed, weight, bias)
        # QuickGELU(u) = silu(cu) / c with c = 1.702: the matrix products absorb both
        # factors.
        flat = normed.flatten(0, 1)
        scaled = torch.addmm(bias, flat, weight.t(), beta=QUICK, alpha=QUICK)
        return scaled.view(*normed.shape[:2], -1)

    def contract(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Activate the hidden layer, project it, and add ``x``."""
        weight = self.proj.weight
        bias = self.proj.bias
        if self.activation != "quick_gelu":
            active = F.gelu(hidden, approximate=self.approximation)
            return x + F.linear(active, weight, bias)

        # The factor 1 / c of QuickGELU, see `expand`.
        residual = (x + bias).flatten(0, 1)
        active = F.silu(hidden).flatten(0, 1)

        out = torch.addmm(residual, active, weight.t(), alpha=1 / QUICK)
        return out.view_as(x)


class AttentionPool(Block):
    """SigLIP's pooling head (B, 1, D): a block whose one query is learned, and added to nothing."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)  # ln_1 is the tower's final norm
        self.probe = nn.Parameter(torch.zeros(config.width))

    def single_query(self, normed: Tensor, rows: Tensor | None) -> Tensor:
        """Project the probe for every sequence."""
        B, _, D = normed.shape

        # The probe is one learned vector for all images.
        query = F.linear(self.probe, self.qkv.weight[:D], self.qkv.bias[:D])
        return query.expand(B, 1, D)

    def residual(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Return zero: the attention's output is added to nothing."""
        return x.new_zeros(())


def take_positions(x: Tensor, rows: Tensor) -> Tensor:
    """Take position ``rows[b]`` of sequence b, (B, 1, D)."""
    index = rows[:, None, None].expand(-1, 1, x.shape[-1])
    return x.gather(1, index)
