"""What SCAP did on a stream, in numbers and words: cliques, attention, what was retained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch

from cliquetta.evaluation.evidence_log import Evidence, MapEvidence
from cliquetta.model.attention import Kind, patch_grid
from cliquetta.report.markup import count
from cliquetta.version import REPOSITORY

OPEN_QUESTIONS = f"{REPOSITORY}/blob/main/docs/results/scap-open.md"
EXPECTATION = (
    "Expect little: one Adam step of 3e-3, as printed, moves a prompt by half a percent of its "
    "spread, and no reading of what the paper leaves open changed the accuracy by much more than "
    f"a point ({OPEN_QUESTIONS})."
)


@dataclass(frozen=True)
class ScapFindings:
    """Cliques of a run, what their prompts did to attention, and what was remembered."""

    images: int
    batches: int
    cliques: int
    distinct_sets: int  # cliques of several classes may have the same images
    mean_size: float
    max_size: int
    images_with_clique: int
    common_class: str
    """that most cliques are candidates for; empty where none is stored"""
    common_cliques: int
    mapped: int  # images with attention maps
    moved: float  # percent of their attention that all prompts moved, on average
    most_moved: float
    images_with_retained: int
    retained_used: int  # different retained prompts that stored images were scored with

    def plain(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """Say what was found, one sentence per subject."""
        cliques = count(self.cliques, "clique")
        sizes = (
            f"{self.mean_size:.1f} images on average, {self.max_size} in the largest"
        )
        lines = [
            f"scap found {cliques} among {count(self.images, 'image')} in "
            f"{count(self.batches, 'batch', 'batches')}, {self.distinct_sets:,} of them with "
            f"different members: {sizes}. {self.images_with_clique:,} images are in one."
        ]
        if self.common_class:
            lines[0] += (
                f" Most frequent are candidates for {self.common_class!r} "
                f"({count(self.common_cliques, 'clique')})."
            )
        if self.mapped:
            lines.append(
                "Their attribute prompts move "
                f"{self.moved:.2g} % of an image's attention, {self.most_moved:.2g} % at most "
                f"({count(self.mapped, 'image')} with maps)."
            )
        if self.images_with_retained:
            lines.append(
                f"{self.images_with_retained:,} images were also scored with a retained prompt; "
                f"{self.retained_used:,} different ones were used."
            )
        return lines


def find(evidence: Evidence, kind: Kind = "class") -> ScapFindings | None:
    """Summarise the evidence of a run of SCAP.

    Args:
        evidence: What the run stored.
        kind: Which attention maps are measured.

    Returns:
        The findings; ``None`` where a run of another method stored the evidence.

    """
    lines = [line for line in evidence.counts if "cliques" in line]
    images = _total(lines, "images")
    if not images:
        return None
    candidates: Counter[int] = Counter()
    retained_used = set()
    moved = []
    for batch in evidence.batches:
        moved += [_moved(entry, kind) for entry in batch.maps]
        if batch.description is None:
            continue
        candidates.update(clique["class"] for clique in batch.description["cliques"])
        for image in batch.description["images"]:
            for scored in image["passes"]:
                if scored["retained"] is not None:
                    retained_used.add((scored["class"], scored["retained"]))
    common = candidates.most_common(1)
    cliques = _total(lines, "cliques")

    # Lines have means of a batch: the mean over cliques weighs them by their number.
    members = sum(line["cliques"] * line["mean_size"] for line in lines)
    return ScapFindings(
        images=images,
        batches=len(lines),
        cliques=cliques,
        distinct_sets=_total(lines, "distinct_sets"),
        mean_size=members / max(1, cliques),
        max_size=max(int(line["max_size"]) for line in lines),
        images_with_clique=_total(lines, "images_with_clique"),
        common_class=evidence.names[common[0][0]] if common else "",
        common_cliques=common[0][1] if common else 0,
        mapped=len(moved),
        moved=mean(moved) if moved else 0.0,
        most_moved=max(moved, default=0.0),
        images_with_retained=_total(lines, "images_with_retained"),
        retained_used=len(retained_used),
    )


def _total(lines: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(line[name]) for line in lines)


def _moved(entry: MapEvidence, kind: Kind) -> float:
    """Return percent of the attention on patches that all prompts together moved elsewhere."""
    grids = patch_grid(torch.from_numpy(entry.maps[kind])).numpy()
    plain = grids[0]
    together = grids[-1]
    shift = np.abs(together - plain).sum()
    return float(50 * shift)  # what leaves one patch arrives at another
