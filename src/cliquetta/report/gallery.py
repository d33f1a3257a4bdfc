"""Pictures worth showing: members of cliques, and images whose prediction changed."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cliquetta.evaluation.evidence_log import BatchEvidence, Evidence
from cliquetta.report.markup import count, esc, number
from cliquetta.report.runs import ReportedRun

MEMBERS = 10  # members of a clique that are shown
_SMALL_PIXELS = 64  # side up to which a picture is enlarged
_SIGNS = {"repaired": "✓ ", "broken": "✗ ", "moved": "", "same": "prediction "}
"""Signs of the ways in which a prediction changed, in the order in which tiles are shown."""


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
        if self.label < 0:
            return "moved"
        if self.after == self.label:
            return "repaired"
        return "broken" if self.before == self.label else "moved"


@dataclass(frozen=True, eq=False)
class CliqueCard:
    """A clique as its batch describes it, with its members, those that changed first."""

    batch: int
    clique: Mapping[str, Any]
    tiles: Sequence[Tile]


def clique_cards(evidence: Evidence, limit: int) -> list[CliqueCard]:
    """Choose up to ``limit`` cliques, most changed images first, none like one before it."""
    found = []
    for batch in evidence.batches:
        for clique in () if batch.description is None else batch.description["cliques"]:
            stored = [index for index in clique["members"] if index < len(batch.keys)]
            found.append(_Stored(batch, clique, frozenset(stored)))
    found.sort(key=lambda each: each.rank)

    # Cliques of several classes may have the same images: one of them is enough.
    chosen: list[_Stored] = []
    for candidate in found:
        if len(chosen) == limit:
            break
        if not any(candidate.resembles(other) for other in chosen):
            chosen.append(candidate)
    return [CliqueCard(each.batch.number, each.clique, each.tiles()) for each in chosen]


@dataclass(frozen=True, eq=False)
class _Stored:
    """A clique and those of its members whose pictures were stored."""

    batch: BatchEvidence
    clique: Mapping[str, Any]
    members: frozenset[int]

    @property
    def rank(self) -> tuple[int, ...]:
        """Order of cliques: with changed images first, then with many members."""
        before = self.batch.before
        after = self.batch.after
        changed = sum(before[index] != after[index] for index in self.members)

        # Three changes tell as much as thirty, six members as much as sixty.
        fewest_first = min(changed, 3)
        smallest_first = min(len(self.members), 6)
        return -fewest_first, -smallest_first, self.batch.number, self.clique["id"]

    def resembles(self, other: "_Stored") -> bool:
        """Return whether more than half of the smaller clique is in both."""
        if self.batch.number != other.batch.number:
            return False
        shared = len(self.members & other.members)
        return 2 * shared > min(len(self.members), len(other.members))

    def tiles(self) -> list[Tile]:
        """Return the members with their mean cosine to the others, those that changed first."""
        members = sorted(self.members)
        features = self.batch.features[members]

        # Features are of unit length: products are cosines, the diagonal is 1.
        cosines = features @ features.T
        to_others = cosines.sum(axis=1) - cosines.diagonal()
        mean = to_others / max(1, len(members) - 1)
        tiles = [
            _tile(self.batch, index, float(value))
            for index, value in zip(members, mean, strict=True)
        ]
        tiles.sort(key=lambda tile: (_order(tile), -(tile.similarity or 0)))
        return tiles[:MEMBERS]


def changed_tiles(evidence: Evidence, limit: int) -> list[Tile]:
    """Choose the first images whose prediction changed: repaired, then broken, then the rest."""
    tiles = [
        _tile(batch, index)
        for batch in evidence.batches
        for index in range(len(batch.keys))
        if batch.before[index] != batch.after[index]
    ]
    return sorted(tiles[:limit], key=_order)


def _order(tile: Tile) -> int:
    return list(_SIGNS).index(tile.change)


def _tile(batch: BatchEvidence, index: int, similarity: float | None = None) -> Tile:
    return Tile(
        picture=batch.pictures[index],
        key=batch.keys[index],
        label=batch.labels[index],
        before=batch.before[index],
        after=batch.after[index],
        similarity=similarity,
    )


def data_uri(picture: npt.NDArray[np.uint8]) -> str:
    """Write a small picture (s, s, 3) as text that a page can hold."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "WEBP", quality=82, method=6)
    text = base64.b64encode(file.getvalue()).decode()
    return f"data:image/webp;base64,{text}"


def changed_section(run: ReportedRun, evidence: Evidence, limit: int) -> str:
    """Render images whose prediction changed."""
    tiles = changed_tiles(evidence, limit)
    if not tiles:
        return ""
    shown = sum(len(batch.keys) for batch in evidence.batches)
    return (
        f"<h3>Images whose prediction changed</h3>{_tile_list(run, tiles)}"
        f'<p class="note">Out of {count(shown, "image")} that the run stored, against plain '
        "CLIP on the same image. ✓ and a full frame: now right; ✗ and a dashed frame: now "
        "wrong.</p>"
    )


def cliques_section(run: ReportedRun, evidence: Evidence, limit: int) -> str:
    """Render cliques with their members."""
    cards = clique_cards(evidence, limit)
    if not cards:
        return ""
    return (
        "<h3>Cliques</h3>"
        '<p class="note">Images that resemble one another among those with the same '
        "class in their best predictions. Under each: its label, its mean cosine to the other "
        "members, and its prediction before and after.</p>"
        + "".join(_card(run, card) for card in cards)
    )


def _card(run: ReportedRun, card: CliqueCard) -> str:
    """Write a clique: its class, its size, its loss before and after learning, its members."""
    size = card.clique["size"]
    facts = [f"batch {card.batch}", count(size, "image")]
    before = card.clique["before"]
    after = card.clique["after"]
    if before is not None:
        loss = f"loss {number(before['total'], 3)}"
        if after is not None:
            loss += f" → {number(after['total'], 3)}"
        facts.append(loss)
    if size > len(card.tiles):
        facts.append(f"{size - len(card.tiles)} not shown")
    name = esc(run.class_name(card.clique["class"]))
    small = esc(" · ".join(facts))
    return (
        f'<div class="clique"><h4>candidates for “{name}” '
        f"<small>{small}</small></h4>{_tile_list(run, card.tiles)}</div>"
    )


def _tile_list(run: ReportedRun, tiles: Sequence[Tile]) -> str:
    items = "".join(_tile_item(run, tile) for tile in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _tile_item(run: ReportedRun, tile: Tile) -> str:
    """Write an image with its label and its predictions."""
    prediction = run.class_name(tile.after)
    if tile.change != "same":
        prediction = f"{run.class_name(tile.before)} → {prediction}"
    label = "" if tile.label < 0 else run.class_name(tile.label)

    lines = f"<span>is {esc(label)}</span>" if label else ""
    if tile.similarity is not None:
        lines += f"<span>cosine {tile.similarity:.2f}</span>"
    lines += f'<span class="prediction">{_SIGNS[tile.change]}{esc(prediction)}</span>'

    looks = f"tile {tile.change}"
    if len(tile.picture) <= _SMALL_PIXELS:
        looks += " small-pictures"
    alt = esc(f"{label or 'image'}, predicted {prediction}")
    return (
        f'<li class="{looks}" title="{esc(tile.key)}">'
        f'<img src="{data_uri(tile.picture)}" alt="{alt}">{lines}</li>'
    )
