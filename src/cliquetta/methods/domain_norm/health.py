"""What a stream's adaptation rests on, in figures: no verdict, since labels are not known."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cliquetta.methods.domain_norm.state import Network, State
from cliquetta.methods.domain_norm.step import Output

SHARES = {
    "confidence": "zero-shot confidence",
    "belief": "weight of the class prior",
    "burst": "weight of recent classes",
    "changed": "predictions changed in the last batch",
}
"""Figures between 0 and 1, in words."""
OTHERS = ("temperature", "distance")
COUNTS = ("domain", "domains")


def describe(state: State, output: Output, network: Network) -> dict[str, Any]:
    """Describe the domain in use and what the last batch's predictions rest on.

    Args:
        state: The state after the batch.
        output: What the batch gave.
        network: The tower, whose loaded LayerNorms the distance is measured from.

    Returns:
        Figures by name; tensors stay on their device.

    """
    if output.prior is None:
        return {}
    domain = state.in_use()
    moved = domain.norms.values - network.theta
    figures: dict[str, Any] = {
        "confidence": domain.counts.confidence / domain.counts.images.clamp_min(1),
        "belief": output.prior.belief,
        "burst": output.prior.burst,
        "temperature": domain.temperature,
        "distance": moved.square().mean().sqrt(),
        "domain": int(state.current),
        "domains": sum(int(one.images) > 0 for one in state.domains),
    }
    if output.zero_shot is not None:
        changed = output.log_probabilities.argmax(dim=1) != output.zero_shot.argmax(
            dim=1
        )
        figures["changed"] = changed.float().mean()
    return figures


def health(evidence: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Convert the figures of one batch to JSON types, as far as its evidence has them."""
    line: dict[str, int | float | str] = {}
    for name in COUNTS:
        if name in evidence:
            line[name] = int(evidence[name])
    for name in (*SHARES, *OTHERS):
        value: Tensor | None = evidence.get(name)
        if value is not None:
            line[name] = round(float(value), 4)
    return line


def in_words(method: str, figures: Mapping[str, int | float | str]) -> str:
    """Write the figures of a stream as a sentence."""
    parts = [
        f"{words} {100 * float(figures[name]):.0f} %"
        for name, words in SHARES.items()
        if name in figures
    ]
    number = int(figures.get("domains", 1))
    domains = f"{number} domain" + ("s" if number != 1 else "")
    return (
        f"{method} without labels: {domains}, {', '.join(parts)}. Whether it gains on your images "
        "only labels can tell: 50 are enough for a first check."
    )
