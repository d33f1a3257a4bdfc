"""Pictures worth showing: members of cliques, and images whose prediction changed."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cliquetta.evaluation.evidence_log import BatchEvidence, Evidence

MEMBERS = 10  # members of a clique that are shown


@dataclass(frozen=True, eq=False)
class Tile:
    """One image: what it is, its predictions by plain CLIP and by the method."""

    picture: npt.NDArray[np.uint8]
    key: str
    label: int  # -1 where unknown
    before: int
    after: int
    similarity: float | None = None  # mean cosine to the other members of the clique

    @property
    def change(self) -> str:
        """``same``, ``repaired``, ``broken``, or ``moved`` for anything else."""
        if self.before == self.after:
            return "same"
        if self.label >= 0 and self.after == self.label:
            return "repaired"
        return "broken" if self.label >= 0 and self.before == self.label else "moved"


@dataclass(frozen=True, eq=False)
class CliqueCard:
    """A clique with its members, those that changed first."""

    batch: int
    label: int  # class of the candidate set that it was mined from
    size: int
    before: Mapping[str, float] | None  # losses before learning: entropy, concentration, total
    after: Mapping[str, float] | None
    tiles: tuple[Tile, ...]


def clique_cards(evidence: Evidence, limit: int) -> list[CliqueCard]:
    """Up to ``limit`` cliques, those with most changed images first, none like one before it."""
    ranked: list[tuple[tuple[int, ...], BatchEvidence, Mapping[str, Any], frozenset[int]]] = []
    for batch in evidence.batches:
        if batch.description is None:
            continue
        for clique in batch.description["cliques"]:
            members = frozenset(index for index in clique["members"] if index < len(batch.keys))
            changed = sum(batch.before[index] != batch.after[index] for index in members)
            rank = (-min(changed, 3), -min(len(members), 6), batch.number, clique["id"])
            ranked.append((rank, batch, clique, members))
    chosen: list[CliqueCard] = []
    shown: list[tuple[int, frozenset[int]]] = []
    for _, batch, clique, members in sorted(ranked, key=lambda entry: entry[0]):
        if len(chosen) == limit:
            break
        known = [other for number, other in shown if number == batch.number]
        if any(2 * len(members & other) > min(len(members), len(other)) for other in known):
            continue
        shown.append((batch.number, members))
        chosen.append(_card(batch, clique, sorted(members)))
    return chosen


def _card(batch: BatchEvidence, clique: Mapping[str, Any], members: list[int]) -> CliqueCard:
    cosines = batch.features[members] @ batch.features[members].T
    others = max(1, len(members) - 1)
    mean = (cosines.sum(axis=1) - cosines.diagonal()) / others
    tiles = [_tile(batch, index, float(value)) for index, value in zip(members, mean, strict=True)]
    order = {"repaired": 0, "broken": 1, "moved": 2, "same": 3}
    tiles.sort(key=lambda tile: (order[tile.change], -(tile.similarity or 0)))
    return CliqueCard(
        batch.number,
        clique["class"],
        clique["size"],
        clique["before"],
        clique["after"],
        tuple(tiles[:MEMBERS]),
    )


def changed_tiles(evidence: Evidence, limit: int) -> list[Tile]:
    """The first images whose prediction changed: repaired ones, then broken ones, then the rest."""
    order = {"repaired": 0, "broken": 1, "moved": 2}
    tiles = [
        _tile(batch, index)
        for batch in evidence.batches
        for index in range(len(batch.keys))
        if batch.before[index] != batch.after[index]
    ]
    return sorted(tiles[:limit], key=lambda tile: order[tile.change])


def _tile(batch: BatchEvidence, index: int, similarity: float | None = None) -> Tile:
    return Tile(
        batch.pictures[index],
        batch.keys[index],
        batch.labels[index],
        batch.before[index],
        batch.after[index],
        similarity,
    )


def data_uri(picture: npt.NDArray[np.uint8]) -> str:
    """A small picture (s, s, 3) as text that a page can hold."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "WEBP", quality=82, method=6)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
