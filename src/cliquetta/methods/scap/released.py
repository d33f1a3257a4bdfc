"""Rules of the released ImageNet-A script where it differs from the paper.

It is that of commit 5057c96. docs/methods/scap.md lists what it does beyond these rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Decisions in which paper and code differ; the defaults are the paper's."""

    full_sets: bool = False
    """Each candidate set is a clique as well, even of one image."""
    repeated_cliques: bool = False
    """Equal cliques of one class count as often as they occur."""
    prompted_mining: bool = False
    """Images are compared by their features under the start prompt."""
    text_per_class: bool = False
    """A clique learns a context for each class (Eq. 6: one for all)."""
    member_entropy: bool = False
    """The loss has the members' mean entropy (Eq. 9: that of their mean feature)."""
    mean_concentration: bool = False  # Squared distances are averaged (Eq. 10: summed).
    weight_decay: float = 0.0  # Decay of AdamW; 0 is Adam.
    isolated_keys: bool = False  # Every key is its only neighbour: keys / (1 - alpha).
    raw_keys: bool = False
    """Propagated keys only choose the pair (Eq. 13: "update all pairs")."""
    best_class_only: bool = False
    """Images are scored with the prompts of their best class alone."""
    discarded_prompts: bool = False
    """Images are scored without the visual prompts that are learned (Eq. 19)."""


RULES: Mapping[str, Rules] = {
    "paper": Rules(),
    "released": Rules(
        full_sets=True,
        repeated_cliques=True,
        prompted_mining=True,
        text_per_class=True,
        member_entropy=True,
        mean_concentration=True,
        weight_decay=0.01,
        isolated_keys=True,
        raw_keys=True,
        best_class_only=True,
        discarded_prompts=True,
    ),
}
