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
        if self.label >= 0 and self.after == self.label:
            return "repaired"
        return "broken" if self.label >= 0 and self.before == self.label else "moved"


@dataclass(frozen=True, eq=False)
class CliqueCard:
    """A clique as its batch describes it, with its members, those that changed first."""

    batch: int
    clique: Mapping[str, Any]
    tiles: Sequence[Tile]


def clique_cards(evidence: Evidence, limit: int) -> list[CliqueCard]:
    """Up to ``limit`` cliques, those with most changed images first, none like one before it."""
    ranked: list[
        tuple[tuple[int, ...], BatchEvidence, Mapping[str, Any], frozenset[int]]
    ] = []
    for batch in evidence.batches:
        for clique in () if batch.description is None else batch.description["cliques"]:
            members = frozenset(
                index for index in clique["members"] if index < len(batch.keys)
            )
            changed = sum(
                batch.before[index] != batch.after[index] for index in members
            )
            rank = (-min(changed, 3), -min(len(members), 6), batch.number, clique["id"])
            ranked.append((rank, batch, clique, members))
    chosen: list[CliqueCard] = []
    shown: list[tuple[int, frozenset[int]]] = []
    for _, batch, clique, members in sorted(ranked, key=lambda entry: entry[0]):
        if len(chosen) == limit:
            break
        known = [other for number, other in shown if number == batch.number]
        if any(
            2 * len(members & other) > min(len(members), len(other)) for other in known
        ):
            continue
        shown.append((batch.number, members))
        chosen.append(
            CliqueCard(batch.number, clique, _members(batch, sorted(members)))
        )
    return chosen


def _members(batch: BatchEvidence, members: list[int]) -> list[Tile]:
    cosines = batch.features[members] @ batch.features[members].T
    others = max(1, len(members) - 1)
    mean = (cosines.sum(axis=1) - cosines.diagonal()) / others
    tiles = [
        _tile(batch, index, float(value))
        for index, value in zip(members, mean, strict=True)
    ]
    tiles.sort(key=lambda tile: (_order(tile), -(tile.similarity or 0)))
    return tiles[:MEMBERS]


def changed_tiles(evidence: Evidence, limit: int) -> list[Tile]:
    """The first images whose prediction changed: repaired ones, then broken ones, then the rest."""
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
    label, before, after = batch.labels[index], batch.before[index], batch.after[index]
    return Tile(
        batch.pictures[index], batch.keys[index], label, before, after, similarity
    )


def data_uri(picture: npt.NDArray[np.uint8]) -> str:
    """A small picture (s, s, 3) as text that a page can hold."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "WEBP", quality=82, method=6)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def changed_section(run: ReportedRun, evidence: Evidence, limit: int) -> str:
    """Images whose prediction changed."""
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
    """Cliques with their members."""
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
    size, before, after = (card.clique[key] for key in ("size", "before", "after"))
    facts = [f"batch {card.batch}", count(size, "image")]
    if before is not None:  # losses: entropy, concentration, total
        learned = "" if after is None else f" → {number(after['total'], 3)}"
        facts.append(f"loss {number(before['total'], 3)}{learned}")
    if size > len(card.tiles):
        facts.append(f"{size - len(card.tiles)} not shown")
    return (
        f'<div class="clique"><h4>candidates for “{esc(run.class_name(card.clique["class"]))}” '
        f"<small>{esc(' · '.join(facts))}</small></h4>{_tile_list(run, card.tiles)}</div>"
    )


def _tile_list(run: ReportedRun, tiles: Sequence[Tile]) -> str:
    return f'<ul class="tiles">{"".join(_tile_item(run, tile) for tile in tiles)}</ul>'


def _tile_item(run: ReportedRun, tile: Tile) -> str:
    before, after = run.class_name(tile.before), run.class_name(tile.after)
    prediction = after if tile.change == "same" else f"{before} → {after}"
    label = "" if tile.label < 0 else run.class_name(tile.label)
    lines = f"<span>is {esc(label)}</span>" if label else ""
    if tile.similarity is not None:
        lines += f"<span>cosine {tile.similarity:.2f}</span>"
    lines += f'<span class="prediction">{_SIGNS[tile.change]}{esc(prediction)}</span>'
    small = " small-pictures" if len(tile.picture) <= 64 else ""
    alt = f"{label or 'image'}, predicted {prediction}"
    return (
        f'<li class="tile {tile.change}{small}" title="{esc(tile.key)}">'
        f'<img src="{data_uri(tile.picture)}" alt="{esc(alt)}">{lines}</li>'
    )
