"""What a prediction of SCAP rests on, as plain values for reports, the app and the service."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.scap.cliques import Cliques
from cliquetta.methods.scap.composition import Passes
from cliquetta.methods.scap.learning import Learned
from cliquetta.methods.scap.losses import CliqueLosses
from cliquetta.types import Prediction

KEYS = ("cliques", "learned", "passes", "retained", "top", "text_gradient", "visual_prompts")
"""What the adapter leaves in ``Prediction.evidence``."""


def describe(prediction: Prediction) -> dict[str, Any]:
    """Cliques, and what each image was scored with, in types that JSON knows.

    * ``cliques``: in mining order, each with its ``id`` (place in this list), ``class``,
      ``members`` (places in the batch), ``size``, ``set`` (equal for equal member sets, which
      share their prompts) and the losses ``before`` and ``after`` learning (``None`` unless the
      adapter's ``collect_evidence`` was on or the config evaluates them anyway).
    * ``images``: in batch order, each with its ``top`` classes, best first, and the ``passes``
      that were scored: ``class``, the ``cliques`` whose prompts were in it and the ``retained``
      place of that class's cache, or ``None``. Empty where visual prompts were not scored with.
    * ``visual_prompts``: ``composed``, ``discarded`` (learned, but not scored with) or ``none``;
      ``text_gradient``: ``vjp`` or ``jacobian``.
    """
    if len(prediction.logits) == 0:
        return {"cliques": [], "images": [], "visual_prompts": None, "text_gradient": None}
    _check(prediction)
    evidence = prediction.evidence
    scored = evidence["visual_prompts"] == "composed"
    return {
        "cliques": _cliques(evidence["cliques"], evidence["learned"]),
        "images": _images(
            evidence["cliques"], evidence["passes"], evidence["retained"], evidence["top"], scored
        ),
        "visual_prompts": evidence["visual_prompts"],
        "text_gradient": evidence["text_gradient"],
    }


def summary(prediction: Prediction) -> dict[str, int | float | str]:
    """Counts over the batch.

    ``memberships`` are those of the distinct sets, which is what learning costs; ``mean_size`` is
    over all cliques. Images count as ``with_clique`` if they are a member of any clique of the
    batch, and as ``with_retained`` if they were scored with a retained prompt.
    """
    counts: dict[str, int | float | str] = {
        "images": len(prediction.logits),
        "cliques": 0,
        "distinct_sets": 0,
        "memberships": 0,
        "mean_size": 0.0,
        "max_size": 0,
        "images_with_clique": 0,
        "images_with_retained": 0,
    }
    if len(prediction.logits) == 0:
        return counts
    _check(prediction)
    cliques: Cliques = prediction.evidence["cliques"]
    if len(cliques):
        counts["cliques"] = len(cliques)
        counts["distinct_sets"] = len(cliques.sets)
        counts["memberships"] = int(cliques.sets.sum())
        counts["mean_size"] = float(cliques.members.sum(dim=1).double().mean())
        counts["max_size"] = int(cliques.sets.sum(dim=1).max())
        counts["images_with_clique"] = int(cliques.sets.any(dim=0).sum())
    if prediction.evidence["visual_prompts"] == "composed":
        retained: Tensor = prediction.evidence["retained"]
        by_image = retained.reshape(len(prediction.logits), -1)
        counts["images_with_retained"] = int((by_image >= 0).any(dim=1).sum())
    return counts


def _check(prediction: Prediction) -> None:
    """Refuse the evidence of another method."""
    missing = [key for key in KEYS if key not in prediction.evidence]
    if missing:
        raise UserError(
            f"evidence without {', '.join(missing)} is not that of scap; describe predictions of "
            "an adapter of method 'scap'"
        )


def _cliques(cliques: Cliques, learned: Learned | None) -> list[dict[str, Any]]:
    if learned is None:
        return []
    before, after = _losses(learned.before), _losses(learned.after)
    found = []
    for g, (label, u) in enumerate(
        zip(cliques.classes.tolist(), cliques.set_of.tolist(), strict=True)
    ):
        members = cliques.sets[u].nonzero()[:, 0].tolist()
        found.append(
            {
                "id": g,
                "class": label,
                "members": members,
                "size": len(members),
                "set": u,
                "before": None if before is None else before[u],
                "after": None if after is None else after[u],
            }
        )
    return found


def _losses(losses: CliqueLosses | None) -> list[dict[str, float]] | None:
    """The losses of every distinct set."""
    if losses is None:
        return None
    names = ("entropy", "concentration", "total")
    rows = zip(*(getattr(losses, name).tolist() for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _images(
    cliques: Cliques, passes: Passes, retained: Tensor, top: Tensor, scored: bool
) -> list[dict[str, Any]]:
    b = len(top)
    # Rows of passes are images times candidate sets, or images with all of their sets at once.
    labels = passes.labels.reshape(b, -1).tolist()
    places = retained.reshape(b, -1).tolist()
    owned: list[dict[int, list[int]]] = [{} for _ in range(b)]
    if scored and len(cliques):
        for g, j in cliques.members.nonzero().tolist():
            owned[j].setdefault(int(cliques.classes[g]), []).append(g)
    return [
        {
            "top": top[j].tolist(),
            "passes": [
                {
                    "class": label,
                    "cliques": owned[j].get(label, []),
                    "retained": place if scored and place >= 0 else None,
                }
                for label, place in zip(labels[j], places[j], strict=True)
            ],
        }
        for j in range(b)
    ]
