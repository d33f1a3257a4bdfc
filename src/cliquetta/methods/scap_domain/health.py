"""How adaptation is doing, and whether it is likely to help: figures without labels.

On the development streams no such figure told streams that gained from the few that lost
(docs/research/domain-prompt.md): the verdict says how much there is to gain and when to look
twice, and is no promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LITTLE_TO_GAIN = 0.85
"""Mean zero-shot confidence from which adaptation hardly changes answers."""
NEAR_CHANCE = 0.25
"""Share of neighbours with the same zero-shot answer below which that answer says little."""
FIGURES = ("belief", "confidence", "step_size", "agreement", "changed", "distance")


def verdict(confidence: float, agreement: float | None, restarts: int) -> str:
    """``adapt``, ``careful`` (check with some labelled images) or ``little to gain``.

    Args:
        confidence: Mean zero-shot confidence in the domain.
        agreement: Share of similar images with the same zero-shot answer, if there were any.
        restarts: How often collapsed LayerNorms had to be restarted.

    """
    if restarts > 0 or (agreement is not None and agreement < NEAR_CHANCE):
        return "careful"
    return "little to gain" if confidence >= LITTLE_TO_GAIN else "adapt"


def health(evidence: Mapping[str, Any]) -> dict[str, int | float | str]:
    """The figures of one batch as JSON types, from the evidence of its prediction."""
    found: dict[str, int | float | str] = {
        name: round(float(evidence[name]), 4) for name in FIGURES if evidence.get(name) is not None
    }
    counts = {name: int(evidence[name]) for name in ("domain", "domains_in_batch", "restarts")}
    return {**counts, **found, "verdict": str(evidence["verdict"])}
