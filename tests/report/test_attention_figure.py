"""Images chosen for the figure of attention maps, and pictures under a map."""

from dataclasses import replace

import numpy as np

from cliquetta.evaluation.evidence_log import Evidence, MapEvidence
from cliquetta.report.attention_figure import (
    ImageMaps,
    attention_figure,
    image_maps,
    overlay,
)


def test_images_come_from_the_batches_in_turn(evidence: Evidence) -> None:
    maps = {"class": np.arange(3 * 6, dtype=np.float32).reshape(3, 6)}
    (batch,) = evidence.batches
    first = replace(
        batch, maps=tuple(MapEvidence(index, (0,), maps) for index in (0, 2, 3))
    )
    second = replace(batch, maps=(MapEvidence(5, (3, 2), maps),))
    images = image_maps(replace(evidence, batches=(first, second)), "pqrs", 3)
    # label, then prediction before and after; the sixth image has no label
    assert [image.title for image in images] == ["p\nq → p", "s → r", "q\nq → p"]
    assert [image.cliques for image in images] == [
        (("q", 3),),
        (("s", 2), ("q", 2)),
        (("q", 3),),
    ]


def test_more_attention_is_brighter() -> None:
    grey = np.full((8, 8, 3), 100, np.uint8)
    heat = np.array([[0, 0, 1, 1]] * 4, np.float32)
    shown = overlay(grey, heat).astype(int).sum(axis=2)
    assert shown[:, -1].min() > shown[:, 0].max()


def test_titles_say_how_much_attention_moved_away_from_plain_clip() -> None:
    """Attention to the prompts, the class token and four patches."""
    maps = [
        [0, 0, 0.25, 0.25, 0.25, 0.25],  # plain CLIP
        [
            0,
            0,
            0.50,
            0.25,
            0.25,
            0.00,
        ],  # a clique: a quarter went from the last to the first
        [0, 0, 1.00, 0.00, 0.00, 0.00],  # all prompts: three quarters went to the first
    ]
    picture = np.zeros((8, 8, 3), np.uint8)
    image = ImageMaps(picture, "cat", np.array(maps, np.float32), (("cat", 3),))
    (axes,) = attention_figure([image]).axes
    shown = [text.get_text() for text in axes.texts]
    assert [text for text in shown if "moved" in text] == ["25 % moved", "75 % moved"]
    assert {"cat", "plain CLIP", "cat ×3", "all prompts"} < set(shown)
