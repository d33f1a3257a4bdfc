"""What the benchmark of shapes and textures counts, by hand."""

from __future__ import annotations

import pytest

from benchmarks.shape_bias import cues, shares


def test_shape_and_texture_are_in_the_file_name() -> None:
    assert cues("bear/bear1-clock12.png") == ("bear", "clock")
    with pytest.raises(ValueError, match="SHAPE1-TEXTURE2"):
        cues("bear/photo.png")


def test_shares_count_both_cues_and_the_bias_only_where_they_differ() -> None:
    found = [
        ("bear", "clock", "bear"),
        ("bear", "clock", "clock"),
        ("bear", "clock", "clock"),
        ("bear", "clock", "oven"),
        ("bear", "bear", "bear"),
    ]
    assert shares(found) == pytest.approx((40, 60, 80, 100 / 3))
