"""What a method leaves behind for the eye: cliques, attention under its prompts, its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.methods.scap.adapter import SCAP
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.attention import Kind, difference, patch_grid, prompted_maps
from cliquetta.model.vision import VisionTower
from cliquetta.types import Prediction

_ENTROPY = "entropy"
"""Memories of this name hold a class's entries by row, infinite where there is none."""


@dataclass(frozen=True)
class Count:
    """Entries that a cache holds of every class, and how many it may hold."""

    held: tuple[int, ...]
    capacity: int


def cache_counts(adapter: Adapter) -> dict[str, Count]:
    """The caches that a method fills class by class, by name; none for methods without one."""
    if isinstance(adapter, SCAP):
        if not (adapter.config.retention and adapter.config.learns_visual):
            return {}
        held = tuple(adapter.memory["count"].tolist())
        return {"retained prompts": Count(held, adapter.config.capacity)}
    found = {}
    for name in adapter.memory:
        owner, _, last = name.rpartition(".")
        if last == _ENTROPY and adapter.memory[name].ndim == 2:
            held = tuple(adapter.memory[name].isfinite().sum(dim=1).tolist())
            capacity = adapter.memory[name].shape[1]
            found[f"{owner} entries".strip()] = Count(held, capacity)
    return found


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
    """Share of the attention that lies elsewhere than in plain CLIP."""


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
    description = clique_description(prediction)
    scored = description is not None and description["visual_prompts"] == "composed"
    if isinstance(adapter, SCAP) and scored and "prompts" in prediction.evidence:
        assert description is not None
        prompts, used, rows = _prompts_of(adapter, prediction, place)
        passes = description["images"][place]["passes"]
        titles += _titles(passes, rows, len(used), adapter.prompts.names)
        chosen = torch.cat([torch.zeros(1, used.shape[1]), used[rows].cpu()])
        blocks = adapter.config.blocks
    shown = prompted_maps(tower, image, prompts, blocks, chosen.bool())[kind].float().cpu()
    columns = patch_grid(shown).numpy(), shown[:, 0].tolist(), difference(shown, shown[:1]).tolist()
    return [AttentionMap(*values) for values in zip(titles, *columns, strict=True)]


def _no_prompts(tower: VisionTower) -> Tensor:
    return torch.zeros(0, 1, 1, 2, tower.config.width, device=tower.position.device)


def _prompts_of(
    adapter: SCAP, prediction: Prediction, place: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Prompts (S, B, P, 2, D) of an image, who takes them (passes, S), and passes that take any."""
    evidence = prediction.evidence
    width = evidence["passes"].width
    own = slice(place * width, (place + 1) * width)
    prompts, mask = evidence["prompts"][own], evidence["prompt_mask"][own]
    slots = prompts.shape[1]
    used = torch.zeros(width, width, slots, dtype=torch.bool, device=mask.device)
    turns = torch.arange(width, device=mask.device)
    used[turns, turns] = mask
    rows = mask.any(dim=1).nonzero()[:, 0].tolist()
    shape = adapter.memory["start_prompt"].shape
    return prompts.reshape(width * slots, *shape), used.flatten(1), rows


def _titles(
    passes: Sequence[dict[str, Any]], rows: Sequence[int], width: int, names: Sequence[str]
) -> list[str]:
    """What each prompted pass asked, and with whose prompts."""
    each = [[entry] for entry in passes] if len(passes) == width else [list(passes)]
    return [_title(each[row], names) for row in rows]


def _title(entries: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    classes = " or ".join(names[entry["class"]] for entry in entries)
    cliques = len({clique for entry in entries for clique in entry["cliques"]})
    kept = sum(entry["retained"] is not None for entry in entries)
    sources = [f"{cliques} clique{'' if cliques == 1 else 's'}"] if cliques else []
    sources += [f"{kept} retained prompt{'' if kept == 1 else 's'}"] if kept else []
    return f"as {classes}: {' + '.join(sources)}"
