"""What a prediction shows: the cliques of its batch, and attention under the prompts of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.methods.building.explanation import VisuallyPrompted
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.attention import Kind, difference, patch_grid, prompted_maps
from cliquetta.model.vision import VisionTower
from cliquetta.types import Prediction


def clique_description(prediction: Prediction) -> dict[str, Any] | None:
    """Cliques and passes as plain values; ``None`` for a method that forms no cliques."""
    if "cliques" not in prediction.evidence:
        return None
    return describe(prediction)


@dataclass(frozen=True)
class AttentionMap:
    """Where the class token looks in one pass over an image."""

    title: str
    grid: npt.NDArray[np.float32]
    """(g, g), what goes to each patch."""
    to_prompts: float
    """What goes to prompts."""
    moved: float
    """Share of the attention that differs from plain CLIP's."""


def attention_maps(
    adapter: Adapter, pixels: Tensor, prediction: Prediction, place: int, kind: Kind
) -> list[AttentionMap]:
    """Maps of image ``place`` of a batch: plain CLIP, then every pass that was scored with prompts.

    Empty for a model whose attention cannot be read.
    """
    tower = adapter.model.visual
    if not isinstance(tower, VisionTower):
        return []
    image = pixels[place].to(adapter.model.device)
    titles, prompts, chosen = ["plain CLIP"], _no_prompts(tower), torch.zeros(1, 0)
    blocks: Sequence[int] = (len(tower.blocks) - 1,)
    passes = None
    if isinstance(adapter, VisuallyPrompted):
        passes = adapter.prompted_passes(prediction, place)
    if passes is not None:
        titles, prompts, blocks = titles + list(passes.titles), passes.prompts, passes.blocks
        chosen = torch.cat([torch.zeros(1, passes.used.shape[1]), passes.used.cpu()])
    shown = prompted_maps(tower, image, prompts, blocks, chosen.bool())[kind].float().cpu()
    columns = patch_grid(shown).numpy(), shown[:, 0].tolist(), difference(shown, shown[:1]).tolist()
    return [AttentionMap(*values) for values in zip(titles, *columns, strict=True)]


def _no_prompts(tower: VisionTower) -> Tensor:
    return torch.zeros(0, 1, 1, 2, tower.config.width, device=tower.position.device)
