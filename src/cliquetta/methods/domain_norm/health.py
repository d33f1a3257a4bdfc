"""How adaptation is doing, and whether it is likely to help, without labels.

On the development streams figures showed how much there was to gain and where zero-shot CLIP makes
nothing of the images, but not where it is sure and wrong (docs/research/domain-norm.md): the
verdict is no promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.prior import Figures, step_size
from cliquetta.methods.domain_norm.state import Network, State

LITTLE_TO_GAIN, FEW_CLASSES = 0.9, 0.25
"""Mean zero-shot confidence from which adaptation hardly changes answers, unless classes are taken
to be missing with at least this belief: where few occur, sure answers gain as well."""
NEAR_CHANCE = 0.25
"""Share of neighbours with the same zero-shot answer below which that answer says little."""
FIGURES = ("belief", "confidence", "step_size", "agreement", "information", "changed", "distance")
COUNTS = ("domain", "domains_in_batch", "restarts", "abstained")


def describe(
    state: State, figures: Figures, network: Network, config: DomainNormConfig
) -> dict[str, Any]:
    """How the domain in use is doing, and a verdict."""
    moved = state.domains[int(state.current)].norms.values - network.theta
    restarts = sum(int(one.restarts) for one in state.domains)
    agreement, known = (
        None if math.isnan(value) else value for value in (figures.agreement, figures.information)
    )
    abstain = figures.information < config.abstain_below
    return {
        "domain": int(state.current),
        "belief": figures.belief,
        "confidence": figures.confidence,
        "step_size": step_size(figures.confidence, config),
        "agreement": agreement,
        "distance": moved.square().mean().sqrt(),
        "information": known,
        "restarts": restarts,
        "abstained": sum(int(one.abstained) for one in state.domains),
        "verdict": verdict(
            figures.confidence, figures.belief, agreement, restarts, abstain=abstain
        ),
    }


def verdict(
    confidence: float,
    belief: float,
    agreement: float | None,
    restarts: int,
    *,
    abstain: bool = False,
) -> str:
    """``adapt``, ``careful`` (check with labelled images), ``little to gain`` or ``abstain``.

    Args:
        confidence: Mean zero-shot confidence in the domain.
        belief: How far an uneven zero-shot marginal is believed, 0 to 1.
        agreement: Share of similar images with the same zero-shot answer, if there were any.
        restarts: How often collapsed LayerNorms had to be restarted.
        abstain: Whether zero-shot answers hardly depend on the image, so that they are left alone.

    """
    if abstain:
        return "abstain"
    if restarts > 0 or (agreement is not None and agreement < NEAR_CHANCE):
        return "careful"
    sure = confidence >= LITTLE_TO_GAIN and belief < FEW_CLASSES
    return "little to gain" if sure else "adapt"


def health(evidence: Mapping[str, Any]) -> dict[str, int | float | str]:
    """The figures of one batch as JSON types, as far as its evidence has them."""
    rounded: dict[str, int | float | str] = {
        name: round(float(evidence[name]), 4) for name in FIGURES if evidence.get(name) is not None
    }
    counts = {name: int(evidence[name]) for name in COUNTS if name in evidence}
    known = {"verdict": str(evidence["verdict"])} if "verdict" in evidence else {}
    return {**counts, **rounded, **known}


ADVICE = {
    "adapt": "zero-shot is unsure enough for adaptation to change answers",
    "careful": "zero-shot says little here, and adaptation may do harm",
    "abstain": "zero-shot answers hardly depend on the image, so they are left as they are",
    "little to gain": "zero-shot is sure, and adaptation will hardly change answers",
}


def in_words(method: str, figures: Mapping[str, int | float | str]) -> str:
    """The verdict of a stream as a sentence, with the figures that it rests on."""
    verdict = str(figures["verdict"])
    shown = [
        f"{words} {100 * float(figures[name]):.0f} %"
        for name, words in (
            ("confidence", "zero-shot confidence"),
            ("agreement", "similar images with the same answer"),
            ("information", "entropy of the answers explained by the images"),
            ("changed", "answers changed in the last batch"),
        )
        if name in figures
    ]
    if figures.get("abstained"):
        shown.append(f"{int(figures['abstained']):,} images answered by zero-shot CLIP")
    return (
        f"Verdict of {method} without labels: {verdict}: {ADVICE.get(verdict, verdict)} "
        f"({', '.join(shown)}). It is no promise: check with 50 labelled images."
    )
