"""Both towers written out: one sequence, one head, one token rule at a time, nothing fused."""

from typing import Any

import torch
from torch import Tensor

from cliquetta.model.block import Block
from cliquetta.model.clip import CLIP


def norm(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    return centred / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def block_output(x: Tensor, block: Block, *, causal: bool) -> Tensor:
    """Hidden states (T, D) after one block."""
    T, D = x.shape
    wide = norm(x, block.ln_1) @ block.qkv.weight.T + block.qkv.bias
    size = D // block.heads
    heads = []
    for head in range(block.heads):
        part = slice(head * size, (head + 1) * size)
        q, k, v = (wide[:, i * D : (i + 1) * D][:, part] for i in range(3))
        scores = q @ k.T / size**0.5
        if causal:
            later = torch.arange(T)[None, :] > torch.arange(T)[:, None]
            scores = scores.masked_fill(later, -torch.inf)
        heads.append(scores.exp() / scores.exp().sum(dim=-1, keepdim=True) @ v)
    x = x + torch.cat(heads, dim=-1) @ block.out.weight.T + block.out.bias
    u = norm(x, block.ln_2) @ block.fc.weight.T + block.fc.bias
    return x + (u * torch.sigmoid(1.702 * u)) @ block.proj.weight.T + block.proj.bias


def text_feature(model: CLIP, embeddings: Tensor, deep: list[Tensor] | None = None) -> Tensor:
    """Unit feature (E,) of one sequence (L, D) that ends with its end token."""
    tower = model.text
    x = embeddings + tower.position[: len(embeddings)]
    for index, block in enumerate(tower.blocks):
        if deep is not None and 0 < index <= len(deep):
            prompt = deep[index - 1]
            x = torch.cat([x[:1], prompt, x[1 + len(prompt) :]])
        x = block_output(x, block, causal=True)
    feature = norm(x[-1], tower.ln_final) @ tower.projection
    return feature / feature.norm()


def image_feature(model: CLIP, pixels: Tensor, layers: list[Tensor]) -> Tensor:
    """Unit feature (E,) of one image (3, S, S) with tokens ``layers[j]`` at the end of block j."""
    tower: Any = model.visual
    p = tower.config.patch_size
    side = tower.config.image_size // p
    kernel = tower.patch.weight.flatten(1)
    patches = [
        kernel @ pixels[:, r * p : (r + 1) * p, c * p : (c + 1) * p].flatten()
        for r in range(side)
        for c in range(side)
    ]
    x = torch.stack([tower.class_token, *patches]) + tower.position
    x = norm(torch.cat([x, layers[0]]), tower.ln_pre)
    for index, block in enumerate(tower.blocks):
        if 0 < index < len(layers):
            x = torch.cat([x[: -len(layers[index])], layers[index]])
        x = block_output(x, block, causal=False)
    feature = norm(x[0], tower.ln_post) @ tower.projection
    return feature / feature.norm()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log softmax at the labels."""
    picked = torch.stack([row[label] for row, label in zip(logits, labels, strict=True)])
    return (logits.exp().sum(dim=-1).log() - picked).mean()
