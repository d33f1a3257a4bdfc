"""Explanations for reports: features with and without prompts, attention, caches."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cliquetta.model.attention import Kind


@dataclass(frozen=True)
class Explanation:
    """The explanation of the first images of a batch."""

    MAPS: ClassVar[str] = "maps."

    features: Tensor  # Unit features (n, E) of plain CLIP.
    before: Tensor  # Classes (n,) by plain CLIP.
    prompted: Tensor | None = None
    """Unit features (n, E) with prompts, mean over the passes."""
    description: dict[str, Any] | None = None
    """The method's own account, as plain values."""
    mapped: tuple[dict[str, Any], ...] = ()
    """Images with maps: ``index``, ids of ``cliques``, number of ``rows``."""
    maps: dict[Kind, Tensor] | None = None  # (rows of all images, 1 + T).

    def tensors(self) -> dict[str, Tensor]:
        """Name every tensor as stored: features in half precision, maps in full."""
        # Features need few digits; maps are shown as they are.
        stored = {"features": self.features.half()}
        if self.prompted is not None:
            stored["prompted"] = self.prompted.half()
        for kind, maps in (self.maps or {}).items():
            stored[f"{self.MAPS}{kind}"] = maps.float()
        return stored


@dataclass(frozen=True)
class CacheCount:
    """Entries that a cache holds of every class, and its capacity per class."""

    held: tuple[int, ...]
    capacity: int


@dataclass(frozen=True)
class PromptedPasses:
    """The passes over one image that were scored with visual prompts."""

    titles: tuple[str, ...]
    prompts: Tensor  # (S, B, P, 2, D).
    used: Tensor  # (passes, S) bool: the prompts of each pass.
    blocks: tuple[int, ...]  # The B blocks that take a prompt.
