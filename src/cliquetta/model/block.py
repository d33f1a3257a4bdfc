"""The transformer block of both towers, with room for prompts in its attention."""

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
        if self.tokens.ndim != 4 or self.tokens.shape[2] != 2:
            raise UserError(
                f"prefix tokens are (R, P, 2, D), got {tuple(self.tokens.shape)}"
            )
        if self.mask is not None and self.mask.shape != self.tokens.shape[:2]:
            mask, tokens = tuple(self.mask.shape), tuple(self.tokens.shape)
            raise UserError(f"prefix mask {mask} does not fit tokens {tokens}")


QUICK = 1.702  # OpenAI's QuickGELU is u * sigmoid(1.702 u)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, self.heads, self.activation = (
            config.width,
            config.heads,
            config.activation,
        )
        self.ln_1 = nn.LayerNorm(width, eps=config.eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width, eps=config.eps)
        self.fc = nn.Linear(width, config.hidden)
        self.proj = nn.Linear(config.hidden, width)

    @property
    def approximation(self) -> Literal["tanh", "none"]:
        """The GELU's approximation, as torch names it."""
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
        """Hidden states (B, T, D) after the block, or (B, 1, D) of positions ``rows`` (B,) only.

        ``mask`` is added to the attention scores or, if boolean, true where a token may
        be seen.
        """
        q, k, v = self.heads_of(self.ln_1(x), rows)
        if prefix is not None:
            k, v, mask = self.prepend(prefix, k, v, mask)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None and rows is None
        )
        return self._rest(self.residual(x, rows), attended)

    def packed(self, x: Tensor, slots: Tensor, tokens: Tensor, length: int) -> Tensor:
        """Causal block over tokens (T, D) packed one after the other.

        Attention has rows of ``length`` slots: ``slots`` (T,) are those of the tokens,
        ``tokens`` (R * length,) the tokens in the slots.
        """
        rows = self.qkv(self.ln_1(x)).index_select(0, tokens)
        parts = rows.view(-1, length, 3, self.heads, x.shape[1] // self.heads).unbind(
            dim=2
        )
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        flat = attended.transpose(1, 2).reshape(len(rows), -1).index_select(0, slots)
        return self.mlp((x + self.out(flat))[None])[0]

    def with_weights(
        self, x: Tensor, *, prefix: Prefix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and attention weights (B, heads, T, P + T); prefix columns come first."""
        q, k, v = self.heads_of(self.ln_1(x), None)
        mask = None
        if prefix is not None:
            k, v, mask = self.prepend(prefix, k, v, None)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.float().softmax(dim=-1)
        return self._rest(self.residual(x, None), weights.to(v.dtype) @ v), weights

    def heads_of(
        self, normed: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, D/H) of the normed input; queries of ``rows`` only."""
        B, T, D = normed.shape
        query = self.single_query(normed, rows)
        if query is None:
            q, k, v = (
                self.qkv(normed)
                .view(B, T, 3, self.heads, D // self.heads)
                .unbind(dim=2)
            )
        else:
            q = query.view(B, 1, self.heads, -1)
            kv = F.linear(normed, self.qkv.weight[D:], self.qkv.bias[D:])
            k, v = kv.view(B, T, 2, self.heads, -1).unbind(dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def single_query(self, normed: Tensor, rows: Tensor | None) -> Tensor | None:
        """The projected query (B, 1, D) of a sequence; ``None`` if every position asks."""
        if rows is None:
            return None
        D = normed.shape[2]
        return F.linear(
            take_positions(normed, rows), self.qkv.weight[:D], self.qkv.bias[:D]
        )

    def residual(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Input that the attention's output is added to."""
        return x if rows is None else take_positions(x, rows)

    def prepend(
        self, prefix: Prefix, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values with those of the prefix in front, and the mask that goes with them."""
        B, H, T, _ = k.shape
        R, P, _, D = prefix.tokens.shape
        if mask is not None:
            raise UserError("a prefix and an attention mask cannot be combined")
        pk, pv = (
            part.view(R, P, H, D // H).transpose(1, 2).expand(B, -1, -1, -1)
            for part in self.project_prefix(prefix, k.dtype)
        )
        if prefix.mask is not None:
            seen = torch.ones(B, P + T, dtype=torch.bool, device=k.device)
            seen[:, :P] = prefix.mask
            mask = seen[:, None, None, :]
        return torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2), mask

    def project_prefix(
        self, prefix: Prefix, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (R, P, D) of prefix tokens, heads side by side."""
        D, tokens = prefix.tokens.shape[-1], prefix.tokens.to(dtype)
        weight, bias = self.qkv.weight, self.qkv.bias
        keys = F.linear(tokens[:, :, 0], weight[D : 2 * D], bias[D : 2 * D])
        return keys, F.linear(tokens[:, :, 1], weight[2 * D :], bias[2 * D :])

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and MLP after the attention."""
        B, _, T, _ = attended.shape
        return self.mlp(x + self.out(attended.transpose(1, 2).reshape(B, T, -1)))

    def mlp(self, x: Tensor) -> Tensor:
        """``x`` plus the MLP of its norm."""
        return self.contract(x, self.expand(self.ln_2(x)))

    def expand(self, normed: Tensor) -> Tensor:
        """The hidden layer u before its activation, (B, T, hidden); for QuickGELU 1.702 u."""
        if self.activation != "quick_gelu":
            return F.linear(normed, self.fc.weight, self.fc.bias)
        # QuickGELU(u) = silu(cu) / c with c = 1.702: the matrix products absorb both
        # factors
        flat = normed.flatten(0, 1)
        scaled = torch.addmm(
            self.fc.bias, flat, self.fc.weight.t(), beta=QUICK, alpha=QUICK
        )
        return scaled.view(*normed.shape[:2], -1)

    def contract(self, x: Tensor, hidden: Tensor) -> Tensor:
        """``x`` plus what the activated hidden layer projects to."""
        if self.activation != "quick_gelu":
            active = F.gelu(hidden, approximate=self.approximation)
            return x + F.linear(active, self.proj.weight, self.proj.bias)
        residual = (x + self.proj.bias).flatten(0, 1)
        active = F.silu(hidden).flatten(0, 1)
        out = torch.addmm(residual, active, self.proj.weight.t(), alpha=1 / QUICK)
        return out.view_as(x)


class AttentionPool(Block):
    """SigLIP's pooling head (B, 1, D): a block whose one query is learned, and added to nothing."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)  # ln_1 is the tower's final norm
        self.probe = nn.Parameter(torch.zeros(config.width))

    def single_query(self, normed: Tensor, rows: Tensor | None) -> Tensor:
        """The projected probe for every sequence."""
        B, _, D = normed.shape
        query = F.linear(self.probe, self.qkv.weight[:D], self.qkv.bias[:D])
        return query.expand(B, 1, D)

    def residual(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Nothing."""
        return x.new_zeros(())


def take_positions(x: Tensor, rows: Tensor) -> Tensor:
    """Position ``rows[b]`` of sequence b, (B, 1, D)."""
    return x.gather(1, rows[:, None, None].expand(-1, 1, x.shape[-1]))
