"""What lies behind the answers to one batch: features with and without prompts, attention maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.methods.scap.adapter import SCAP
from cliquetta.methods.scap.evidence import describe, summary
from cliquetta.methods.scap_domain.health import health
from cliquetta.model.attention import Kind, prompted_maps
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize
from cliquetta.model.vision import VisionTower
from cliquetta.types import Batch, Prediction

_CLIQUES = 4
"""Cliques of one image whose attention is shown."""


@dataclass(frozen=True)
class Explanation:
    """Of the first images of a batch."""

    MAPS: ClassVar[str] = "maps."

    features: Tensor
    """Unit features (n, E) of plain CLIP."""
    before: Tensor
    """Classes (n,) by plain CLIP."""
    prompted: Tensor | None = None
    """Unit features (n, E) with prompts: mean over the passes that were scored."""
    description: dict[str, Any] | None = None
    places: tuple[dict[str, Any], ...] = ()
    """Images with attention maps: ``place``, ids of ``cliques``, and how many ``rows`` of maps."""
    maps: dict[Kind, Tensor] | None = None
    """(rows of all images, 1 + T)."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is a tensor, by name, as it is stored.

        Features in half precision; maps whole, since prompts move attention by little.
        """
        found = {"features": self.features.half()}
        if self.prompted is not None:
            found["prompted"] = self.prompted.half()
        for kind, maps in (self.maps or {}).items():
            found[f"{self.MAPS}{kind}"] = maps.float()
        return {name: value.cpu().contiguous() for name, value in found.items()}


def count_batch(prediction: Prediction) -> dict[str, int | float | str]:
    """What one line can say of a batch: its images and, for some methods, more.

    Of SCAP counts of cliques, with the size of the largest; of domain prompts the domain and the
    figures of :func:`~cliquetta.methods.scap_domain.health.health`.
    """
    evidence = prediction.evidence
    if "domain" in evidence:
        return {"images": len(prediction.logits), **health(evidence)}
    if "cliques" not in evidence:
        return {"images": len(prediction.logits)}
    cliques = prediction.evidence["cliques"]
    largest = int(cliques.sets.sum(dim=1).max()) if len(cliques) else 0
    return {**summary(prediction), "max_size": largest}


@torch.no_grad()
def explain(
    adapter: Adapter, batch: Batch, prediction: Prediction, classifier: Tensor, maps: int
) -> Explanation:
    """What can be said about ``batch``, the first images of the batch that was predicted.

    ``maps`` is for how many images attention is read.
    """
    images = batch.images.to(adapter.model.device)
    features = prediction.evidence.get("plain")
    features = (
        adapter.model.encode_image(images, normalize=True)
        if features is None
        else features[: len(batch)]
    )
    before = (features @ classifier.T).argmax(dim=-1)
    if not isinstance(adapter, SCAP):
        return Explanation(features, before)
    description = describe(prediction)
    if adapter.tower is None or not adapter.config.learns_visual:
        return Explanation(features, before, description=description)
    prompted = _prompted_features(adapter, images, features, prediction)
    changed = before != prediction.logits[: len(batch)].argmax(dim=-1)
    chosen = _worth_a_map(description, changed.tolist(), maps)
    places, rows = [], []
    for place in chosen:
        ids, found = _maps(adapter, adapter.tower, images[place], place, description, prediction)
        places.append({"place": place, "cliques": ids, "rows": len(found["class"])})
        rows.append(found)
    joined: dict[Kind, Tensor] | None = None
    if rows:
        joined = {kind: torch.cat([found[kind] for found in rows]) for kind in rows[0]}
    return Explanation(features, before, prompted, description, tuple(places), joined)


def _prompted_features(
    adapter: SCAP, images: Tensor, plain: Tensor, prediction: Prediction
) -> Tensor:
    """Unit mean (n, E) of the features of each image's passes; a pass without prompts is plain."""
    tower = adapter.tower
    prompts, mask = prediction.evidence["prompts"], prediction.evidence["prompt_mask"]
    assert tower is not None
    B, P, _, D = adapter.memory["start_prompt"].shape
    width = prediction.evidence["passes"].width
    first = adapter.config.blocks[0]
    hidden = tower.run(tower.embed(images), 0, first)
    total = torch.zeros_like(plain)
    for turn in range(width):
        rows = torch.arange(len(images), device=images.device) * width + turn
        own = mask[rows].any(dim=1)
        features = plain.clone()
        if own.any():
            tokens = prompts[rows[own]].reshape(int(own.sum()), -1, B, P, 2, D)
            seen = mask[rows[own]].repeat_interleave(P, dim=1)
            prefix = {
                block: Prefix(tokens[:, :, at].flatten(1, 2), seen)
                for at, block in enumerate(adapter.config.blocks)
            }
            features[own] = l2_normalize(tower.pool(tower.run(hidden[own], first, prefix=prefix)))
        total += features
    return l2_normalize(total)


def _cliques_of(description: dict[str, Any], place: int) -> list[int]:
    """Ids of the cliques that an image belongs to, of equal sets the first.

    Largest first, but those that share most members with one before them last: a few of them are
    shown, and near copies say nothing new.
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


def _worth_a_map(description: dict[str, Any], changed: list[bool], count: int) -> list[int]:
    """Images with several cliques whose answer changed first."""
    cliques = [min(_CLIQUES, len(_cliques_of(description, place))) for place in range(len(changed))]
    order = sorted(
        (place for place in range(len(changed)) if cliques[place]),
        key=lambda place: (-int(changed[place] and cliques[place] > 1), -cliques[place], place),
    )
    return sorted(order[:count])


def _maps(
    adapter: SCAP,
    tower: VisionTower,
    pixels: Tensor,
    place: int,
    description: dict[str, Any],
    prediction: Prediction,
) -> tuple[list[int], dict[Kind, Tensor]]:
    """Clique ids and maps of one image: plain, with each clique's prompt, with all of them."""
    ids = _cliques_of(description, place)
    sets = [description["cliques"][id]["set"] for id in ids]
    prompts = prediction.evidence["learned"].visual[sets]
    shown = min(_CLIQUES, len(ids))
    chosen = torch.zeros(shown + 2, len(ids), dtype=torch.bool)
    chosen[torch.arange(1, shown + 1), torch.arange(shown)] = True
    chosen[-1] = True
    found = prompted_maps(tower, pixels, prompts, adapter.config.blocks, chosen)
    return ids[:shown], found
