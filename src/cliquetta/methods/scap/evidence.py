"""Evidence of a prediction of SCAP, for reports, the app and the service: cliques, passes, maps."""

from __future__ import annotations

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
    *("images", "cliques", "distinct_sets", "memberships", "mean_size", "max_size"),
    *("images_with_clique", "images_with_retained"),
)
_CLIQUES = 4  # Cliques of one image whose attention is shown.


def describe(prediction: Prediction) -> dict[str, Any]:
    """Cliques, and what each image was scored with, in types that JSON knows.

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
    how = {name: evidence[name] for name in ("visual_prompts", "text_gradient")}
    return {"cliques": _cliques(evidence), "images": _images(evidence), **how}


def summary(prediction: Prediction) -> dict[str, int | float | str]:
    """Counts over the batch; ``memberships`` are those of the distinct sets, which are learned."""
    images = len(prediction.logits)
    if not images:
        return dict.fromkeys(COUNTS, 0)
    evidence = _of_scap(prediction)
    cliques: Cliques = evidence["cliques"]
    sizes = cliques.members.sum(dim=1).tolist()
    scored = evidence["visual_prompts"] == "composed"
    retained = (evidence["retained"].reshape(images, -1) >= 0).any(dim=1)
    learned = len(cliques), len(cliques.sets), int(cliques.sets.sum())
    spread = sum(sizes) / max(1, len(sizes)), max(sizes, default=0)
    counted = int(cliques.sets.any(dim=0).sum()), int(retained.sum()) if scored else 0
    return dict(zip(COUNTS, (images, *learned, *spread, *counted), strict=True))


def _of_scap(prediction: Prediction) -> Mapping[str, Any]:
    missing = [key for key in KEYS if key not in prediction.evidence]
    if missing:
        raise UserError(
            f"evidence without {', '.join(missing)} is not that of scap; describe predictions of "
            "an adapter of method 'scap'"
        )
    return prediction.evidence


def _cliques(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    learned: Learned | None = evidence["learned"]
    if learned is None:
        return []
    cliques: Cliques = evidence["cliques"]
    before, after = (
        _losses(one, len(cliques.sets)) for one in (learned.before, learned.after)
    )
    members = [row.nonzero()[:, 0].tolist() for row in cliques.sets]
    described = []
    owners = zip(cliques.classes.tolist(), cliques.set_of.tolist(), strict=True)
    for g, (label, u) in enumerate(owners):
        own = {"members": members[u], "size": len(members[u]), "set": u}
        losses = {"before": before[u], "after": after[u]}
        described.append({"id": g, "class": label, **own, **losses})
    return described


def _losses(
    losses: CliqueLosses | None, count: int
) -> Sequence[dict[str, float] | None]:
    """The losses of every distinct set, ``None`` where they were not evaluated."""
    if losses is None:
        return [None] * count
    names = ("entropy", "concentration", "total")
    rows = zip(*(getattr(losses, name).tolist() for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _images(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    cliques: Cliques = evidence["cliques"]
    top, scored = evidence["top"], evidence["visual_prompts"] == "composed"
    labels = evidence["passes"].labels.reshape(len(top), -1).tolist()
    slots = evidence["retained"].reshape(len(top), -1).tolist()
    described: list[dict[str, Any]] = []
    for j, classes in enumerate(top.tolist()):
        owned: dict[int, list[int]] = {}
        for g in cliques.members[:, j].nonzero()[:, 0].tolist() if scored else ():
            owned.setdefault(int(cliques.classes[g]), []).append(g)
        passes = [
            {
                "class": c,
                "cliques": owned.get(c, []),
                "retained": s if scored and s >= 0 else None,
            }
            for c, s in zip(labels[j], slots[j], strict=True)
        ]
        described.append({"top": classes, "passes": passes})
    return described


# --- explanations: prompted features, attention under prompts -----------------------------------


def explain(
    adapter: SCAP, batch: Batch, prediction: Prediction, plain: Explanation, maps: int
) -> Explanation:
    """The ``plain`` explanation with cliques, prompted features and attention maps."""
    description = describe(prediction)
    if adapter.visual is None or not adapter.config.learns_visual:
        return replace(plain, description=description)
    images = batch.images.to(adapter.model.device)
    changed = plain.before != prediction.logits[: len(batch)].argmax(dim=-1)
    images_shown, rows = [], []
    for index in _worth_a_map(description, changed.tolist(), maps):
        ids = _cliques_of(description, index)
        sets = [description["cliques"][i]["set"] for i in ids]
        learned = prediction.evidence["learned"].visual[sets]
        retained = prediction.evidence["retained_prompts"]
        used = learned[:0] if retained is None else _used(retained, description, index)
        own = _maps(adapter, images[index], learned, used.view(-1, *learned.shape[1:]))
        images_shown.append(
            {"index": index, "cliques": ids[:_CLIQUES], "rows": len(own["class"])}
        )
        rows.append(own)
    joined = (
        {kind: torch.cat([own[kind] for own in rows]) for kind in rows[0]}
        if rows
        else None
    )
    prompted = _prompted_features(adapter, images, plain.features, prediction)
    shown = tuple(images_shown)
    return Explanation(
        plain.features, plain.before, prompted, description, shown, joined
    )


def _prompted_features(
    adapter: SCAP, images: Tensor, plain: Tensor, prediction: Prediction
) -> Tensor:
    """Unit mean (n, E) of the features of each image's passes; a pass without prompts is plain."""
    assert adapter.visual is not None
    prompts, mask = prediction.evidence["prompts"], prediction.evidence["prompt_mask"]
    width = prediction.evidence["passes"].width
    hidden, total = adapter.visual.hidden(images), torch.zeros_like(plain)
    for turn in range(width):
        rows = torch.arange(len(images), device=images.device) * width + turn
        own, features = mask[rows].any(dim=1), plain.clone()
        if own.any():
            chosen = rows[own]
            features[own] = adapter.visual.encode(
                hidden[own], prompts[chosen], mask[chosen]
            )
        total += features
    return l2_normalize(total)


def _cliques_of(description: Mapping[str, Any], index: int) -> list[int]:
    """Ids of an image's cliques, of equal sets the first; those much like a larger one last."""
    own = [clique for clique in description["cliques"] if index in clique["members"]]
    distinct = {clique["set"]: clique for clique in reversed(own)}
    fresh: list[set[int]] = []
    ids: dict[bool, list[int]] = {False: [], True: []}
    for clique in sorted(
        distinct.values(), key=lambda clique: (-clique["size"], clique["id"])
    ):
        members = set(clique["members"])
        alike = any(2 * len(members & other) > len(members | other) for other in fresh)
        fresh += [] if alike else [members]
        ids[alike].append(clique["id"])
    return ids[False] + ids[True]


def _worth_a_map(
    description: Mapping[str, Any], changed: Sequence[bool], count: int
) -> list[int]:
    """Images with several cliques whose predicted class changed come first."""
    cliques = [
        min(_CLIQUES, len(_cliques_of(description, index)))
        for index in range(len(changed))
    ]
    some = [index for index in range(len(changed)) if cliques[index]]
    some.sort(
        key=lambda index: (-int(changed[index] and cliques[index] > 1), -cliques[index])
    )
    return sorted(some[:count])


def _used(retained: Tensor, description: Mapping[str, Any], index: int) -> Tensor:
    """The retained prompts (Q, V) an image was scored with, of those (N, L, V) of the cache."""
    passes = description["images"][index]["passes"]
    used = [(p["class"], p["retained"]) for p in passes if p["retained"] is not None]
    labels, slots = torch.tensor(used, dtype=torch.long).view(-1, 2).unbind(dim=1)
    return retained[labels, slots]


def _maps(
    adapter: SCAP, pixels: Tensor, learned: Tensor, retained: Tensor
) -> dict[Kind, Tensor]:
    """Maps of one image: plain, with the prompt of each of its first cliques, with everything."""
    assert adapter.visual is not None
    prompts = torch.cat([learned, retained.to(learned)])
    shown = min(_CLIQUES, len(learned))
    chosen = torch.zeros(shown + 2, len(prompts), dtype=torch.bool)
    chosen[torch.arange(1, shown + 1), torch.arange(shown)] = True
    chosen[-1] = True
    return prompted_maps(
        adapter.visual.tower, pixels, prompts, adapter.config.blocks, chosen
    )


def prompted_passes(
    adapter: SCAP, prediction: Prediction, index: int
) -> PromptedPasses | None:
    """The passes over image ``index`` that were scored with prompts."""
    evidence = prediction.evidence
    if "prompts" not in evidence or evidence["visual_prompts"] != "composed":
        return None
    width = evidence["passes"].width
    own = slice(index * width, (index + 1) * width)
    prompts, mask = evidence["prompts"][own], evidence["prompt_mask"][own]
    slots = prompts.shape[1]
    used = torch.zeros(width, width, slots, dtype=torch.bool, device=mask.device)
    turns = torch.arange(width, device=mask.device)
    used[turns, turns] = mask
    rows = mask.any(dim=1).nonzero()[:, 0].tolist()
    passes = describe(prediction)["images"][index]["passes"]
    return PromptedPasses(
        titles=tuple(_title(passes[row], adapter.prompts.names) for row in rows),
        prompts=prompts.reshape(width * slots, *adapter.memory["start_prompt"].shape),
        used=used.flatten(1)[rows],
        blocks=adapter.config.blocks,
    )


def _title(scored: Mapping[str, Any], names: Sequence[str]) -> str:
    """The class that a pass was scored for, and where its prompts came from."""
    cliques = len(scored["cliques"])
    sources = [f"{cliques} clique{'' if cliques == 1 else 's'}"] if cliques else []
    sources += ["1 retained prompt"] if scored["retained"] is not None else []
    return f"as {names[scored['class']]}: {' + '.join(sources)}"
