"""Explanations of SCAP: prompted features, and attention under its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cliquetta.methods.building.explanation import Explanation, PromptedPasses
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.attention import Kind, prompted_maps
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Batch, Prediction

if TYPE_CHECKING:
    from cliquetta.methods.scap.adapter import SCAP

_CLIQUES = 4
"""Cliques of one image whose attention is shown."""


def explain(
    adapter: SCAP, batch: Batch, prediction: Prediction, plain: Explanation, maps: int
) -> Explanation:
    """The ``plain`` explanation with cliques, prompted features and attention maps."""
    description = describe(prediction)
    if adapter.visual is None or not adapter.config.learns_visual:
        return replace(plain, description=description)
    images = batch.images.to(adapter.model.device)
    changed = plain.before != prediction.logits[: len(batch)].argmax(dim=-1)
    places, rows = [], []
    for place in _worth_a_map(description, changed.tolist(), maps):
        ids = _cliques_of(description, place)
        sets = [description["cliques"][i]["set"] for i in ids]
        learned = prediction.evidence["learned"].visual[sets]
        retained = prediction.evidence["retained_prompts"]
        used = learned[:0] if retained is None else _used(retained, description, place)
        found = _maps(adapter, images[place], learned, used.view(-1, *learned.shape[1:]))
        places.append({"place": place, "cliques": ids[:_CLIQUES], "rows": len(found["class"])})
        rows.append(found)
    joined: dict[Kind, Tensor] | None = None
    if rows:
        joined = {kind: torch.cat([found[kind] for found in rows]) for kind in rows[0]}
    prompted = _prompted_features(adapter, images, plain.features, prediction)
    return Explanation(plain.features, plain.before, prompted, description, tuple(places), joined)


def _prompted_features(
    adapter: SCAP, images: Tensor, plain: Tensor, prediction: Prediction
) -> Tensor:
    """Unit mean (n, E) of the features of each image's passes; a pass without prompts is plain."""
    assert adapter.visual is not None
    prompts, mask = prediction.evidence["prompts"], prediction.evidence["prompt_mask"]
    width = prediction.evidence["passes"].width
    hidden = adapter.visual.hidden(images)
    total = torch.zeros_like(plain)
    for turn in range(width):
        rows = torch.arange(len(images), device=images.device) * width + turn
        own = mask[rows].any(dim=1)
        features = plain.clone()
        if own.any():
            chosen = rows[own]
            features[own] = adapter.visual.encode(hidden[own], prompts[chosen], mask[chosen])
        total += features
    return l2_normalize(total)


def _cliques_of(description: Mapping[str, Any], place: int) -> list[int]:
    """Ids of the cliques that an image belongs to, of equal sets the first.

    Largest first, but those that share most members with one before them last: a few of them are
    shown, and near copies add nothing.
    """
    own = [clique for clique in description["cliques"] if place in clique["members"]]
    distinct = {clique["set"]: clique for clique in reversed(own)}
    ordered = sorted(distinct.values(), key=lambda clique: (-clique["size"], clique["id"]))
    fresh: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    for clique in ordered:
        members = set(clique["members"])
        known = (set(other["members"]) for other in fresh)
        alike = any(2 * len(members & other) > len(members | other) for other in known)
        (copies if alike else fresh).append(clique)
    return [clique["id"] for clique in fresh + copies]


def _worth_a_map(description: Mapping[str, Any], changed: Sequence[bool], count: int) -> list[int]:
    """Images with several cliques whose predicted class changed come first."""
    cliques = [min(_CLIQUES, len(_cliques_of(description, place))) for place in range(len(changed))]
    order = sorted(
        (place for place in range(len(changed)) if cliques[place]),
        key=lambda place: (-int(changed[place] and cliques[place] > 1), -cliques[place], place),
    )
    return sorted(order[:count])


def _used(retained: Tensor, description: Mapping[str, Any], index: int) -> Tensor:
    """The retained prompts (Q, V) an image was scored with, of those (N, L, V) of the cache."""
    passes = description["images"][index]["passes"]
    used = [(p["class"], p["retained"]) for p in passes if p["retained"] is not None]
    labels, slots = torch.tensor(used, dtype=torch.long).view(-1, 2).unbind(dim=1)
    return retained[labels, slots]


def _maps(adapter: SCAP, pixels: Tensor, learned: Tensor, retained: Tensor) -> dict[Kind, Tensor]:
    """Maps of one image: plain, with the prompt of each of its first cliques, with everything.

    ``learned`` (G, B, P, 2, D) are the prompts of its cliques; the last map adds the ``retained``.
    """
    assert adapter.visual is not None
    prompts = torch.cat([learned, retained.to(learned)])
    shown = min(_CLIQUES, len(learned))
    chosen = torch.zeros(shown + 2, len(prompts), dtype=torch.bool)
    chosen[torch.arange(1, shown + 1), torch.arange(shown)] = True
    chosen[-1] = True
    return prompted_maps(adapter.visual.tower, pixels, prompts, adapter.config.blocks, chosen)


def prompted_passes(adapter: SCAP, prediction: Prediction, place: int) -> PromptedPasses | None:
    """The passes over image ``place`` that were scored with prompts."""
    evidence = prediction.evidence
    if "prompts" not in evidence or evidence["visual_prompts"] != "composed":
        return None
    width = evidence["passes"].width
    own = slice(place * width, (place + 1) * width)
    prompts, mask = evidence["prompts"][own], evidence["prompt_mask"][own]
    slots = prompts.shape[1]
    used = torch.zeros(width, width, slots, dtype=torch.bool, device=mask.device)
    turns = torch.arange(width, device=mask.device)
    used[turns, turns] = mask
    rows = mask.any(dim=1).nonzero()[:, 0].tolist()
    passes = describe(prediction)["images"][place]["passes"]
    each = [[entry] for entry in passes] if len(passes) == width else [list(passes)]
    return PromptedPasses(
        titles=tuple(_title(each[row], adapter.prompts.names) for row in rows),
        prompts=prompts.reshape(width * slots, *adapter.memory["start_prompt"].shape),
        used=used.flatten(1)[rows],
        blocks=adapter.config.blocks,
    )


def _title(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The classes that a pass was scored for, and where its prompts came from."""
    classes = " or ".join(names[entry["class"]] for entry in entries)
    cliques = len({clique for entry in entries for clique in entry["cliques"]})
    kept = sum(entry["retained"] is not None for entry in entries)
    sources = [f"{cliques} clique{'' if cliques == 1 else 's'}"] if cliques else []
    sources += [f"{kept} retained prompt{'' if kept == 1 else 's'}"] if kept else []
    return f"as {classes}: {' + '.join(sources)}"
