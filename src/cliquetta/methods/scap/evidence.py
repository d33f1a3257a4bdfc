"""Evidence of a prediction for reports, app and service: cliques, passes, maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.explanation import Explanation, PromptedPasses
from cliquetta.methods.scap.cliques import Cliques
from cliquetta.methods.scap.learning import Learned
from cliquetta.methods.scap.losses import CliqueLosses
from cliquetta.model.attention import Kind, prompted_maps
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Batch, Prediction

if TYPE_CHECKING:
    from cliquetta.methods.scap.adapter import SCAP

KEYS = (
    "cliques",
    "learned",
    "passes",
    "retained",
    "top",
    "text_gradient",
    "visual_prompts",
)
"""Entries of ``Prediction.evidence`` that the adapter makes."""
COUNTS = (
    "images",
    "cliques",
    "distinct_sets",
    "memberships",
    "mean_size",
    "max_size",
    "images_with_clique",
    "images_with_retained",
)
"""Entries of :func:`summary`."""
MAPPED_CLIQUES = 4  # Cliques of one image whose attention is mapped.


def describe(prediction: Prediction) -> dict[str, Any]:
    """List the cliques, and what each image was scored with, in types that JSON knows.

    * ``cliques``: in mining order, each with its ``id`` (index in this list),
      ``class``, ``members`` (indices in the batch), ``size``, ``set`` (equal for equal
      member sets, which share their prompts) and the losses ``before`` and ``after``
      learning (``None`` unless the adapter's ``collect_evidence`` was on or the config
      evaluates them anyway).
    * ``images``: in batch order, each with its ``top`` classes, best first, and the
      ``passes`` that were scored: ``class``, the ``cliques`` whose prompts were in it
      and the ``retained`` slot of that class's cache, or ``None``. Empty where visual
      prompts were not scored with.
    * ``visual_prompts``: ``composed``, ``discarded`` (learned, but not scored with) or
      ``none``; ``text_gradient``: ``vjp`` or ``jacobian``.
    """
    if len(prediction.logits) == 0:
        return {
            "cliques": [],
            "images": [],
            "visual_prompts": None,
            "text_gradient": None,
        }
    evidence = _of_scap(prediction)
    return {
        "cliques": _describe_cliques(evidence),
        "images": _describe_images(evidence),
        "visual_prompts": evidence["visual_prompts"],
        "text_gradient": evidence["text_gradient"],
    }


def summary(prediction: Prediction) -> dict[str, int | float | str]:
    """Count over the batch; ``memberships`` are those of the distinct sets."""
    images = len(prediction.logits)
    if images == 0:
        return dict.fromkeys(COUNTS, 0)
    evidence = _of_scap(prediction)
    cliques: Cliques = evidence["cliques"]
    sizes = cliques.members.sum(dim=1).tolist()
    with_retained = 0
    if evidence["visual_prompts"] == "composed":
        has_retained = evidence["retained"].reshape(images, -1) >= 0
        with_retained = int(has_retained.any(dim=1).sum())
    return {
        "images": images,
        "cliques": len(cliques),
        "distinct_sets": len(cliques.sets),
        "memberships": int(cliques.sets.sum()),
        "mean_size": sum(sizes) / max(1, len(sizes)),
        "max_size": max(sizes, default=0),
        "images_with_clique": int(cliques.sets.any(dim=0).sum()),
        "images_with_retained": with_retained,
    }


def _of_scap(prediction: Prediction) -> Mapping[str, Any]:
    """Return the evidence; that of another method is refused."""
    missing = [key for key in KEYS if key not in prediction.evidence]
    if missing:
        raise UserError(
            f"evidence without {', '.join(missing)} is not that of scap; describe predictions of "
            "an adapter of method 'scap'"
        )
    return prediction.evidence


def _describe_cliques(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the cliques, in mining order."""
    learned: Learned | None = evidence["learned"]
    if learned is None:
        return []
    cliques: Cliques = evidence["cliques"]
    before = _losses_by_set(learned.before, len(cliques.sets))
    after = _losses_by_set(learned.after, len(cliques.sets))
    members = [row.nonzero()[:, 0].tolist() for row in cliques.sets]
    described = []
    set_of = cliques.set_of.tolist()
    for g, label in enumerate(cliques.classes.tolist()):
        u = set_of[g]
        clique = {
            "id": g,
            "class": label,
            "members": members[u],
            "size": len(members[u]),
            "set": u,
            "before": before[u],
            "after": after[u],
        }
        described.append(clique)
    return described


def _losses_by_set(
    losses: CliqueLosses | None, count: int
) -> Sequence[dict[str, float] | None]:
    """List the losses of every distinct set, ``None`` where they were not evaluated."""
    if losses is None:
        return [None] * count
    rows = zip(
        losses.entropy.tolist(),
        losses.concentration.tolist(),
        losses.total.tolist(),
        strict=True,
    )
    names = ("entropy", "concentration", "total")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _describe_images(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the images, in batch order, with the passes that were scored."""
    cliques: Cliques = evidence["cliques"]
    members = cliques.members
    classes = cliques.classes.tolist()
    top = evidence["top"]
    is_composed = evidence["visual_prompts"] == "composed"
    labels = evidence["passes"].labels.reshape(len(top), -1).tolist()
    slots = evidence["retained"].reshape(len(top), -1).tolist()
    described: list[dict[str, Any]] = []
    for j, best in enumerate(top.tolist()):
        # The image's cliques by their class, in mining order.
        by_class = defaultdict(list)
        for g in members[:, j].nonzero()[:, 0].tolist():
            by_class[classes[g]].append(g)

        passes = []
        for label, slot in zip(labels[j], slots[j], strict=True):
            scored = {
                "class": label,
                "cliques": by_class[label] if is_composed else [],
                "retained": slot if is_composed and slot >= 0 else None,
            }
            passes.append(scored)
        described.append({"top": best, "passes": passes})
    return described


# --- explanations: prompted features, attention under prompts -------------------------


def explain(
    adapter: SCAP, batch: Batch, prediction: Prediction, plain: Explanation, maps: int
) -> Explanation:
    """Add cliques, prompted features and attention maps to an explanation."""
    description = describe(prediction)
    if adapter.visual is None or not adapter.config.learns_visual:
        return replace(plain, description=description)
    images = batch.images.to(adapter.model.device)
    changed = plain.before != prediction.logits[: len(batch)].argmax(dim=-1)

    mapped = []
    parts = []
    for index in _worth_a_map(description, changed.tolist(), maps):
        ids = _cliques_of(description, index)
        of_image = _maps(adapter, images[index], prediction, description, index)
        rows = len(of_image["class"])
        mapped.append({"index": index, "cliques": ids[:MAPPED_CLIQUES], "rows": rows})
        parts.append(of_image)

    # The maps of all images, one below the other.
    joined = None
    if parts:
        joined = {kind: torch.cat([part[kind] for part in parts]) for kind in parts[0]}
    return replace(
        plain,
        prompted=_prompted_features(adapter, images, plain.features, prediction),
        description=description,
        mapped=tuple(mapped),
        maps=joined,
    )


def _prompted_features(
    adapter: SCAP, images: Tensor, plain: Tensor, prediction: Prediction
) -> Tensor:
    """Average the features of each image's passes: unit vectors (n, E)."""
    assert adapter.visual is not None
    prompts = prediction.evidence["prompts"]
    mask = prediction.evidence["prompt_mask"]
    width = prediction.evidence["passes"].width
    hidden = adapter.visual.hidden(images)
    total = torch.zeros_like(plain)
    for turn in range(width):
        rows = torch.arange(len(images), device=images.device) * width + turn
        is_prompted = mask[rows].any(dim=1)
        features = plain.clone()
        if is_prompted.any():
            prompted = rows[is_prompted]
            features[is_prompted] = adapter.visual.encode(
                hidden[is_prompted], prompts[prompted], mask[prompted]
            )
        total += features
    return l2_normalize(total)


def _cliques_of(description: Mapping[str, Any], index: int) -> list[int]:
    """List the ids of an image's cliques, large ones first.

    Of equal member sets only the first is listed; those much like a larger one are
    last.
    """
    distinct: dict[int, dict[str, Any]] = {}
    for clique in description["cliques"]:
        if index in clique["members"]:
            distinct.setdefault(clique["set"], clique)
    by_size = sorted(distinct.values(), key=lambda one: (-one["size"], one["id"]))

    unlike: list[set[int]] = []
    first_ids = []
    last_ids = []
    for clique in by_size:
        members = set(clique["members"])

        # More than half of what two of them hold, both hold.
        if any(2 * len(members & other) > len(members | other) for other in unlike):
            last_ids.append(clique["id"])
        else:
            unlike.append(members)
            first_ids.append(clique["id"])
    return first_ids + last_ids


def _worth_a_map(
    description: Mapping[str, Any], changed: Sequence[bool], count: int
) -> list[int]:
    """Choose images: first those with several cliques and another class now."""
    sizes = {}
    for index in range(len(changed)):
        cliques = len(_cliques_of(description, index))
        if cliques:
            sizes[index] = min(MAPPED_CLIQUES, cliques)

    def rank(index: int) -> tuple[bool, int]:
        is_telling = changed[index] and sizes[index] > 1
        return not is_telling, -sizes[index]

    by_worth = sorted(sizes, key=rank)
    return sorted(by_worth[:count])


def _maps(
    adapter: SCAP,
    pixels: Tensor,
    prediction: Prediction,
    description: Mapping[str, Any],
    index: int,
) -> dict[Kind, Tensor]:
    """Map one image: plain, with each of its first cliques' prompts, with all."""
    assert adapter.visual is not None
    ids = _cliques_of(description, index)
    sets = [description["cliques"][id]["set"] for id in ids]
    of_cliques = prediction.evidence["learned"].visual[sets]
    prompts = of_cliques
    cache = prediction.evidence["retained_prompts"]
    if cache is not None:
        passes = description["images"][index]["passes"]
        retained = _retained_prompts(cache, passes)
        retained = retained.view(-1, *of_cliques.shape[1:])
        prompts = torch.cat([of_cliques, retained.to(of_cliques)])

    # Rows of maps: without any, with one each, with all.
    mapped = min(MAPPED_CLIQUES, len(of_cliques))
    chosen = torch.zeros(mapped + 2, len(prompts), dtype=torch.bool)
    for number in range(mapped):
        chosen[number + 1, number] = True
    chosen[-1] = True

    blocks = adapter.config.blocks
    return prompted_maps(adapter.visual.tower, pixels, prompts, blocks, chosen)


def _retained_prompts(cache: Tensor, passes: Sequence[Mapping[str, Any]]) -> Tensor:
    """Gather the prompts (Q, V) that passes took from those (N, L, V) of the cache."""
    labels = []
    slots = []
    for scored in passes:
        if scored["retained"] is not None:
            labels.append(scored["class"])
            slots.append(scored["retained"])
    return cache[labels, slots]


def prompted_passes(
    adapter: SCAP, prediction: Prediction, index: int
) -> PromptedPasses | None:
    """Return the passes over image ``index`` that were scored with prompts."""
    evidence = prediction.evidence
    if "prompts" not in evidence or evidence["visual_prompts"] != "composed":
        return None
    width = evidence["passes"].width
    of_image = slice(index * width, (index + 1) * width)
    prompts = evidence["prompts"][of_image]
    mask = evidence["prompt_mask"][of_image]

    # Every pass uses its own S of the width S prompts of the image.
    slots = prompts.shape[1]
    uses = torch.zeros(width, width, slots, dtype=torch.bool, device=mask.device)
    turns = torch.arange(width, device=mask.device)
    uses[turns, turns] = mask

    has_prompt = mask.any(dim=1)
    prompted = has_prompt.nonzero()[:, 0].tolist()
    images = describe(prediction)["images"]
    passes = images[index]["passes"]
    names = adapter.prompts.names
    length = adapter.config.prompt_length
    blocks = len(adapter.config.blocks)
    return PromptedPasses(
        titles=tuple(_title(passes[turn], names) for turn in prompted),
        prompts=prompts.reshape(width * slots, blocks, length, 2, -1),
        used=uses.flatten(1)[prompted],
        blocks=adapter.config.blocks,
    )


def _title(scored: Mapping[str, Any], names: Sequence[str]) -> str:
    """Name the class that a pass was scored for, and where its prompts came from."""
    sources = []
    cliques = len(scored["cliques"])
    if cliques:
        sources.append(f"{cliques} clique{'' if cliques == 1 else 's'}")
    if scored["retained"] is not None:
        sources.append("1 retained prompt")
    return f"as {names[scored['class']]}: {' + '.join(sources)}"
