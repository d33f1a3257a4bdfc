"""Cliques and changed images chosen to be shown."""

import pytest

from cliquetta.evaluation.evidence_log import Evidence
from cliquetta.report.gallery import changed_tiles, clique_cards


def test_gallery_shows_unlike_cliques_and_the_most_changed_images(
    evidence: Evidence,
) -> None:
    cards = clique_cards(evidence, 3)
    shown = [(card.clique["class"], card.clique["size"]) for card in cards]
    assert shown == [(1, 3), (3, 2), (1, 2)]
    first = cards[0]
    assert [tile.key for tile in first.tiles] == ["a", "c", "b"]
    assert [tile.change for tile in first.tiles] == ["repaired", "broken", "same"]
    similar = {tile.key: tile.similarity for tile in first.tiles}
    assert similar["a"] == pytest.approx(0.6) and similar["b"] == pytest.approx(0.8)
    assert len(clique_cards(evidence, 1)) == 1
    tiles = [(tile.key, tile.change) for tile in changed_tiles(evidence, 10)]
    assert tiles == [
        ("a", "repaired"),
        ("c", "broken"),
        ("e", "broken"),
        ("f", "moved"),
    ]
    assert len(changed_tiles(evidence, 2)) == 2
