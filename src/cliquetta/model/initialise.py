"""Random weights for a CLIP: the start of a training run, or a stand-in of the right shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cliquetta.model.block import Block
from cliquetta.model.clip import CLIP
from cliquetta.model.text import TextTower
from cliquetta.model.vision import VisionTower

Normal = Callable[[Tensor, float], None]


@torch.no_grad()
def initialise(model: CLIP, seed: int = 0) -> CLIP:
    """Draw all weights of ``model`` in place, scaled by width and depth as CLIP's training does."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, std: float) -> None:
        draw = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
        tensor.copy_(draw.to(tensor.device, tensor.dtype))

    if isinstance(model.visual, VisionTower):
        _initialise_vision(model.visual, normal)
    else:
        for parameter in model.visual.parameters():
            if parameter.ndim > 1:
                normal(parameter, parameter[0].numel() ** -0.5)
    if model.text is not None:
        _initialise_text(model.text, normal)
    return model


def _initialise_vision(tower: VisionTower, normal: Normal) -> None:
    width, layers = tower.config.width, tower.config.layers
    for index in range(layers):
        _initialise_block(tower.block(index), width, layers, normal)
    if tower.head is None:
        normal(tower.projection, width**-0.5)
        normal(tower.class_token, width**-0.5)
    else:
        _initialise_block(tower.head, width, layers, normal)
        normal(tower.head.probe, width**-0.5)
    normal(tower.position, 0.02)
    normal(tower.patch.weight, tower.patch.weight[0].numel() ** -0.5)


def _initialise_text(tower: TextTower, normal: Normal) -> None:
    width, layers = tower.config.width, tower.config.layers
    for index in range(layers):
        _initialise_block(tower.block(index), width, layers, normal)
    normal(tower.projection, width**-0.5)
    normal(tower.position, 0.01)
    normal(tower.tokens.weight, 0.02)


def _initialise_block(block: Block, width: int, layers: int, normal: Normal) -> None:
    """Residual branches shrink with depth, so that their sum does not grow with it."""
    normal(block.qkv.weight, width**-0.5)
    normal(block.out.weight, width**-0.5 * (2 * layers) ** -0.5)
    normal(block.fc.weight, (2 * width) ** -0.5)
    normal(block.proj.weight, width**-0.5 * (2 * layers) ** -0.5)
    for linear in (block.qkv, block.out, block.fc, block.proj):
        linear.bias.zero_()
