"""Image towers: a ViT, plain or prompted by key/value prefixes or tokens, and a ResNet."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta.errors import UserError
from cliquetta.model.block import AttentionPool, Block, Prefix
from cliquetta.model.config import ResNetConfig, VisionConfig


@dataclass(frozen=True)
class TokenPrompts:
    """Learnable tokens in the visual sequence: shallow (one entry) or deep (one per block).

    ``layers[0]`` (p, D) or (B, p, D) enters before ``ln_pre``; ``layers[j]`` replaces
    those tokens at the input of block j. ``position`` is that of VPT (after the class
    token) or MaPLe's (end).
    """

    layers: Sequence[Tensor]
    position: Literal["after-class", "end"] = "after-class"

    def span(self, config: VisionConfig) -> slice:
        """Return the positions of the prompt tokens in the sequence of a tower."""
        first = config.class_tokens
        if self.position == "end":
            first += config.patches
        return slice(first, first + self.layers[0].shape[-2])


class VisionTower(nn.Module):
    """Pixels to features. ``embed``, ``run`` and ``pool`` are the pieces of ``forward``."""

    def __init__(self, config: VisionConfig, embed_dim: int) -> None:
        super().__init__()
        self.config = config

        # Without a class token, a pooling head ends the tower (SigLIP).
        width = config.width
        patch = config.patch_size
        has_class = config.pooling == "class"
        self.patch = nn.Conv2d(
            3, width, kernel_size=patch, stride=patch, bias=not has_class
        )

        if has_class:
            self.class_token = nn.Parameter(torch.zeros(width))
            self.ln_pre = nn.LayerNorm(width, eps=config.eps)
        tokens = config.patches + config.class_tokens

        self.position = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

        self.head = None if has_class else AttentionPool(config)
        if has_class:
            self.ln_post = nn.LayerNorm(width, eps=config.eps)
            self.projection = nn.Parameter(torch.zeros(width, embed_dim))

    def block(self, index: int) -> Block:
        """Return block ``index``, typed."""
        return cast(Block, self.blocks[index])

    def embed(self, pixels: Tensor, tokens: TokenPrompts | None = None) -> Tensor:
        """Compute hidden states (B, T, D) at the input of block 0."""
        # One token for each patch, the class token in front.
        x: Tensor = self.patch(pixels.to(self.patch.weight.dtype))
        x = x.flatten(2).transpose(1, 2)
        if self.head is None:
            first = self.class_token.to(x.dtype).expand(x.shape[0], 1, -1)
            x = torch.cat([first, x], dim=1)
        x = x + self.position

        if tokens is not None:
            # Inserted, in place of nothing.
            start = tokens.span(self.config).start
            x = _with_prompt(x, tokens.layers[0], slice(start, start))
        return self.ln_pre(x) if self.head is None else x

    def run(
        self,
        hidden: Tensor,
        start: int = 0,
        stop: int | None = None,
        *,
        prefix: Mapping[int, Prefix] | None = None,
        tokens: TokenPrompts | None = None,
    ) -> Tensor:
        """Run hidden states at the input of block ``start`` up to the input of block ``stop``.

        At the end (``stop=None``) only the class token is computed, (B, 1, D), unless a
        pooling head reads all tokens.
        """
        self._check(prefix, start, stop)
        count = len(self.blocks)
        for index in range(start, count if stop is None else stop):
            if tokens is not None and 0 < index < len(tokens.layers):
                # Deep prompts: those of the block before are replaced.
                span = tokens.span(self.config)
                hidden = _with_prompt(hidden, tokens.layers[index], span)
            entry = None if prefix is None else prefix.get(index)

            # Of the last block only the class token is read.
            rows = None
            if stop is None and index == count - 1 and self.head is None:
                batch = hidden.shape[0]
                rows = torch.zeros(batch, dtype=torch.long, device=hidden.device)
            hidden = self.blocks[index](hidden, prefix=entry, rows=rows)
        return hidden

    def pool(self, hidden: Tensor) -> Tensor:
        """Compute features (B, E) of what :meth:`run` leaves at the end; not normalised."""
        if self.head is not None:
            pooled: Tensor = self.head(hidden)
            return pooled[:, 0]
        normed: Tensor = self.ln_post(hidden[:, 0])
        return normed @ self.projection

    def forward(
        self,
        pixels: Tensor,
        *,
        prefix: Mapping[int, Prefix] | None = None,
        tokens: TokenPrompts | None = None,
    ) -> Tensor:
        """Compute features (B, E), not normalised."""
        # Nested, so that no state outlives the block that reads it.
        return self.pool(
            self.run(self.embed(pixels, tokens), prefix=prefix, tokens=tokens)
        )

    def attention(
        self,
        pixels: Tensor,
        blocks: Sequence[int],
        *,
        prefix: Mapping[int, Prefix] | None = None,
    ) -> dict[int, Tensor]:
        """Return attention (B, heads, T, P + T) of blocks, prefix first; a pooling head is last."""
        self._check(prefix, 0, None)
        modules: list[Block] = [self.block(index) for index in range(len(self.blocks))]
        if self.head is not None:
            modules.append(self.head)

        weights = {}
        hidden = self.embed(pixels)
        for index, block in enumerate(modules[: max(blocks) + 1]):
            entry = None if prefix is None else prefix.get(index)
            if index in blocks:
                hidden, weights[index] = block.with_weights(hidden, prefix=entry)
            else:
                hidden = block(hidden, prefix=entry)
        return weights

    def _check(
        self, prefix: Mapping[int, Prefix] | None, start: int, stop: int | None
    ) -> None:
        """Refuse a prefix outside the blocks that run: it would be dropped in silence."""
        end = len(self.blocks) if stop is None else stop
        outside = [index for index in prefix or {} if not start <= index < end]

        if outside:
            raise UserError(
                f"prefix at block {outside[0]}, but blocks {start} to {end - 1} run"
            )


def _with_prompt(hidden: Tensor, prompt: Tensor, span: slice) -> Tensor:
    """Put a prompt (p, D) or (B, p, D) in place of positions ``span`` of states (B, T, D)."""
    # Not len(hidden), which would fix the batch size of an exported model.
    rows = prompt.to(hidden.dtype).expand(hidden.shape[0], -1, -1)
    before = hidden[:, : span.start]
    after = hidden[:, span.stop :]
    return torch.cat([before, rows, after], dim=1)


# --- RN50 ... RN50x64: plain encoding only --------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions; strides are average pools, on the shortcut too."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.avgpool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)

        # A shortcut of another shape is pooled and projected.
        self.downsample: nn.Sequential | None = None
        if stride > 1 or inputs != outputs:
            parts = {
                "-1": nn.AvgPool2d(stride),
                "0": nn.Conv2d(inputs, outputs, 1, bias=False),
                "1": nn.BatchNorm2d(outputs),
            }
            self.downsample = nn.Sequential(OrderedDict(parts))

    def forward(self, x: Tensor) -> Tensor:
        """Run one residual block."""
        shortcut = x if self.downsample is None else self.downsample(x)

        # Fewer channels, a look at the neighbours, all channels again.
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))

        x = self.bn3(self.conv3(self.avgpool(x)))
        return F.relu(x + shortcut)


class ResNetPool(nn.Module):
    """One attention layer whose only query is the mean of all positions."""

    def __init__(self, side: int, width: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.heads = heads

        # One position more, for the mean.
        self.positional_embedding = nn.Parameter(torch.zeros(side**2 + 1, width))

        self.k_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.c_proj = nn.Linear(width, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features (B, E) of a map (B, C, S, S)."""
        # Positions as a sequence, their mean in front: (B, 1 + S * S, C).
        x = x.flatten(2).transpose(1, 2)
        mean = x.mean(dim=1, keepdim=True)
        x = torch.cat([mean, x], dim=1) + self.positional_embedding

        # The mean is the one query; all positions are keys.
        q = self._by_heads(self.q_proj(x[:, :1]))
        k = self._by_heads(self.k_proj(x))
        v = self._by_heads(self.v_proj(x))

        # (B, heads, 1, C / heads)
        attended = F.scaled_dot_product_attention(q, k, v)
        pooled = attended.transpose(1, 2).flatten(1)
        return cast(Tensor, self.c_proj(pooled))

    def _by_heads(self, x: Tensor) -> Tensor:
        """Split channels (B, T, D) into heads (B, heads, T, D / heads)."""
        B, T, D = x.shape
        return x.view(B, T, self.heads, D // self.heads).transpose(1, 2)


class ModifiedResNet(nn.Module):
    """Three-convolution stem, four stages of bottlenecks, attention pooling."""

    def __init__(self, config: ResNetConfig, embed_dim: int) -> None:
        super().__init__()
        self.config = config
        width = config.width

        # The stem.
        self.conv1 = nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width // 2)
        self.conv2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width // 2)
        self.conv3 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.avgpool = nn.AvgPool2d(2)

        # The four stages.
        inputs = width
        for stage, blocks in enumerate(config.layers):
            planes = width * 2**stage
            layers = nn.Sequential()
            for index in range(blocks):
                # Each stage but the first halves the map.
                stride = 2 if stage and index == 0 else 1
                layers.append(Bottleneck(inputs, planes, stride))
                inputs = planes * Bottleneck.expansion
            setattr(self, f"layer{stage + 1}", layers)

        side = config.image_size // 32
        self.attnpool = ResNetPool(side, inputs, config.heads, embed_dim)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute features (B, E), not normalised."""
        x = pixels.to(self.conv1.weight.dtype)

        # The stem: (B, 3, S, S) to (B, width, S / 4, S / 4).
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.avgpool(F.relu(self.bn3(self.conv3(x))))

        # Each stage but the first halves the map again.
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return cast(Tensor, self.attnpool(x))
