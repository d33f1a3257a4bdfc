"""The page of thumbnails beside the rows it is made of; the command's page is in tests/cli."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cliquetta.report import contact_sheet
from tests._helpers.html_reader import Reader


def test_rows_beyond_the_limit_are_counted_and_damaged_ones_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(np.zeros((300, 200, 3), np.uint8)).save(tmp_path / "a.png")
    best = {"one_prediction": "cat", "one_probability": 0.756, "error": ""}
    best |= {"two_prediction": "dog & co", "two_probability": "0.5"}
    rows = [best | {"path": str(tmp_path / "a.png")} for _ in range(3)]
    rows[1]["path"] = "shard.tar/c.png"  # inside of a tar file
    rows.append({"path": "b.png", "error": "no <image>"})
    monkeypatch.setattr(contact_sheet, "MOST", 2)
    page = Reader(contact_sheet.contact_sheet(rows, ["one", "two"]))
    assert len(page.all("img")) == 1 and len(page.all("input")) == 2  # all, and the class cat
    assert "no picture" in page.text and "c.png" in page.text
    assert "The first 2 of 3 images are shown." in page.text
    assert "4 images, 1 of them unreadable." in page.text
    assert "one: cat 76 %" in page.text and "two: dog & co 50 %" in page.text
    assert "b.png: no <image>" in page.text
