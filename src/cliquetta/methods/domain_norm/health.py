"""Health of the adaptation: figures and a verdict, without labels.

On the development streams figures showed how much there was to gain and where zero-shot CLIP makes
nothing of the images, not where it is sure and wrong (docs/research/domain-norm.md): no promise.
"""

import math
from collections.abc import Mapping
from typing import Any

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.prior import Figures, step_size
from cliquetta.methods.domain_norm.state import Network, State

LITTLE_TO_GAIN, FEW_CLASSES = 0.9, 0.25
"""Mean zero-shot confidence from which adaptation hardly changes predictions, unless classes are
believed to be missing at least this much: where few occur, sure predictions gain as well."""
NEAR_CHANCE = 0.25  # Share of neighbours of the same zero-shot class below which it says little.
FIGURES = ("belief", "confidence", "step_size", "agreement", "information", "changed", "distance")
COUNTS = ("domain", "domains_in_batch", "restarts", "abstained")


def describe(
    state: State, figures: Figures, network: Network, config: DomainNormConfig
) -> dict[str, Any]:
    """Describe the health of the domain in use, with a verdict."""
    moved = state.domains[int(state.current)].norms.values - network.theta
    restarts = sum(int(one.restarts) for one in state.domains)
    known = {name: None if math.isnan(x) else x for name, x in figures._asdict().items()}
    del known["collapsed"]
    return {
        **known,
        "domain": int(state.current),
        "step_size": step_size(figures.confidence, config),
        "distance": moved.square().mean().sqrt(),
        "restarts": restarts,
        "abstained": sum(int(one.abstained) for one in state.domains),
        "verdict": verdict(figures, restarts, config.abstain_below),
    }


def verdict(figures: Figures, restarts: int, abstain_below: float) -> str:
    """``adapt``, ``careful`` (check with labelled images), ``little to gain`` or ``abstain``."""
    if figures.information < abstain_below:
        return "abstain"
    if restarts > 0 or figures.agreement < NEAR_CHANCE:
        return "careful"
    sure = figures.confidence >= LITTLE_TO_GAIN and figures.belief < FEW_CLASSES
    return "little to gain" if sure else "adapt"


def health(evidence: Mapping[str, Any]) -> dict[str, int | float | str]:
    """The figures of one batch as JSON types, as far as its evidence has them."""
    rounded: dict[str, int | float | str] = {
        name: round(float(evidence[name]), 4) for name in FIGURES if evidence.get(name) is not None
    }
    counts = {name: int(evidence[name]) for name in COUNTS if name in evidence}
    known = {"verdict": str(evidence["verdict"])} if "verdict" in evidence else {}
    return {**counts, **rounded, **known}


SHARES = {
    "confidence": "zero-shot confidence",
    "agreement": "similar images with the same prediction",
    "information": "entropy of the predictions explained by the images",
    "changed": "predictions changed in the last batch",
}
ADVICE = {
    "adapt": "zero-shot is unsure enough for adaptation to change predictions",
    "careful": "zero-shot says little here, and adaptation may do harm",
    "abstain": "zero-shot predictions hardly depend on the image, so they are left as they are",
    "little to gain": "zero-shot is sure, and adaptation will hardly change predictions",
}


def in_words(method: str, figures: Mapping[str, int | float | str]) -> str:
    """The verdict of a stream as a sentence, with the figures that it rests on."""
    verdict = str(figures["verdict"])
    known = ((words, float(figures[name])) for name, words in SHARES.items() if name in figures)
    shown = [f"{words} {100 * share:.0f} %" for words, share in known]
    if figures.get("abstained"):
        shown.append(f"{int(figures['abstained']):,} images predicted by zero-shot CLIP")
    return (
        f"Verdict of {method} without labels: {verdict}: {ADVICE.get(verdict, verdict)} "
        f"({', '.join(shown)}). It is no promise: check with 50 labelled images."
    )
