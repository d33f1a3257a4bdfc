"""Random weights for a CLIP: the start of a training run, or a stand-in of the right shape."""

from __future__ import annotations

import torch
from torch import nn

from cliquetta.model.block import Block
from cliquetta.model.clip import CLIP
from cliquetta.model.vision import VisionTower


@torch.no_grad()
def initialise(model: CLIP, seed: int = 0) -> CLIP:
    """Draw all weights of ``model`` in place, scaled by width and depth as CLIP's training does."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float) -> None:
        draw = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
        tensor.copy_(draw.to(tensor.device, tensor.dtype))

    for tower in (model.visual, model.text):
        if tower is None:
            continue
        if not hasattr(tower, "blocks"):
            for parameter in tower.parameters():
                if parameter.ndim > 1:
                    normal(parameter, parameter[0].numel() ** -0.5)
            continue
        width, layers = tower.config.width, tower.config.layers
        for block in tower.blocks:
            _initialise_block(block, width, layers, normal)
        normal(tower.projection, width**-0.5)
        normal(tower.position, 0.02 if isinstance(tower, VisionTower) else 0.01)
        if isinstance(tower, VisionTower):
            normal(tower.class_token, width**-0.5)
            normal(tower.patch.weight, tower.patch.weight[0].numel() ** -0.5)
        else:
            normal(tower.tokens.weight, 0.02)
    return model


def _initialise_block(block: nn.Module, width: int, layers: int, normal: object) -> None:
    """Residual branches shrink with depth, so that their sum does not grow with it."""
    assert isinstance(block, Block) and callable(normal)
    normal(block.qkv.weight, width**-0.5)
    normal(block.out.weight, width**-0.5 * (2 * layers) ** -0.5)
    normal(block.fc.weight, (2 * width) ** -0.5)
    normal(block.proj.weight, width**-0.5 * (2 * layers) ** -0.5)
    for linear in (block.qkv, block.out, block.fc, block.proj):
        linear.bias.zero_()
