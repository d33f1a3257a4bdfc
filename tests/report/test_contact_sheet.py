"""The page of thumbnails beside the rows it is made of; a browser uses it in tests/browser."""

import base64
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cliquetta.inference.options import PredictOptions
from cliquetta.inference.rows import PredictionRun, RowFormat
from cliquetta.inference.tables import Row
from cliquetta.report import contact_sheet
from tests._helpers.html_reader import Reader


def page_of(rows: list[Row], methods: tuple[str, ...] = ("",), **options: Any) -> str:
    """A page of rows that were counted as a run counts them."""
    row_format = RowFormat(methods, ("cat", "dog & co"), PredictOptions(**options))
    run = PredictionRun(rows=rows)
    for row in rows:
        run.count(row_format, row)
    return contact_sheet.contact_sheet(run, methods)


def data_of(html: str) -> dict[str, Any]:
    """What the page's script reads."""
    (text,) = re.findall(
        r'<script type="application/json" id="images">(.*?)</script>', html
    )
    data: dict[str, Any] = json.loads(text)
    return data


def pictures_of(html: str) -> list[str]:
    """All pictures, in their order."""
    blocks = re.findall(
        r'<script type="text/plain" id="pictures-\d+">(.*?)</script>', html, re.S
    )
    return [line for block in blocks for line in block.split("\n")]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A red photograph in a folder."""
    (tmp_path / "a" / "cat").mkdir(parents=True)
    path = tmp_path / "a" / "cat" / "red.png"
    Image.fromarray(np.full((300, 200, 3), [200, 0, 0], np.uint8)).save(path)
    return path


def row(path: Path | str, predicted: str, probability: float, **more: Any) -> Row:
    return {
        "path": str(path),
        "prediction": predicted,
        "probability": probability,
        "error": "",
        **more,
    }


def test_every_image_has_its_class_and_its_picture(
    picture: Path, tmp_path: Path
) -> None:
    rows = [
        row(picture, "cat", 0.75),
        row(tmp_path / "a/shard.tar/b.png", "dog & co", 0.5),
    ]
    html = page_of(rows)
    data = data_of(html)
    assert [data["classes"][number] for number in data["predictions"][0]] == [
        "cat",
        "dog & co",
    ]
    assert data["probabilities"] == [[0.75, 0.5]]
    assert data["paths"] == [one["path"] for one in rows]
    first, second = pictures_of(html)
    opened = Image.open(io.BytesIO(base64.b64decode(first)))
    assert opened.format == "WEBP" and opened.size == (85, 128)
    assert np.asarray(opened.convert("RGB")).mean(axis=(0, 1))[0] > 150
    assert second == "-"  # inside of a tar file
    assert "2 images, 0 of them unreadable." in Reader(html).text


def test_labels_zero_shot_and_folders_are_there_to_choose_by(
    picture: Path, tmp_path: Path
) -> None:
    plain = {"zero_shot_prediction": "dog & co", "zero_shot_probability": 0.6}
    rows = [
        row(picture, "cat", 0.75, label="cat", **plain),
        row(tmp_path / "a/dog/x.png", "cat", 0.5, label="", **plain),
    ]
    html = page_of(rows, labels="folder")
    data = data_of(html)
    reader = Reader(html)
    names = [select["name"] for select in reader.all("select")]
    assert names == ["sort", "predicted", "folder", "label", "truth", "changed"]
    assert data["labels"] == [data["classes"].index("cat"), -1]
    assert data["zero_shot"] == [data["classes"].index("dog & co")] * 2
    assert data["folders"] == [0, 1] and {"cat", "dog"} <= set(
        re.findall(r"\w+", reader.text)
    )
    assert "100.0 %" in reader.text and "repaired by adapting" in reader.text
    names = [
        select["name"]
        for select in Reader(page_of([row(picture, "cat", 0.7)])).all("select")
    ]
    assert names == ["sort", "predicted"]


def test_plain_clip_among_the_methods_is_what_others_are_compared_with(
    picture: Path,
) -> None:
    both = {"zero_shot_prediction": "dog & co", "zero_shot_probability": 0.6}
    both |= {"tda_prediction": "cat", "tda_probability": 0.7}
    html = page_of([{"path": str(picture), **both, "error": ""}], ("zero_shot", "tda"))
    data = data_of(html)
    assert data["methods"] == [""] and data["probabilities"] == [[0.7]]
    assert data["zero_shot_probabilities"] == [0.6]


def test_rows_beyond_the_limit_are_counted_and_damaged_ones_listed(
    picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {"one_prediction": "cat", "one_probability": 0.756, "error": ""}
    best |= {"two_prediction": "dog & co", "two_probability": "0.5"}
    rows = [best | {"path": str(picture)} for _ in range(3)]
    none = dict.fromkeys(("one_prediction", "one_probability", "two_prediction"))
    rows += [
        {**none, "two_probability": None, "path": p, "error": "no <image>"}
        for p in "xyz"
    ]
    monkeypatch.setattr(contact_sheet, "MOST", 2)
    monkeypatch.setattr(contact_sheet, "BLOCK", 1)
    monkeypatch.setattr(contact_sheet, "LISTED", 2)
    html = page_of(rows, ("one", "two"))
    text = Reader(html).text
    assert len(pictures_of(html)) == len(data_of(html)["paths"]) == 2
    assert data_of(html)["methods"] == ["one", "two"]
    assert "The first 2 of 3 images are shown." in text
    assert "6 images, 3 of them unreadable." in text
    assert "y: no <image>" in text and "and 1 more" in text and "z: no" not in text


def test_names_cannot_become_markup_and_one_script_may_run(picture: Path) -> None:
    odd = f"{picture.parent}/</script><b>&.png"
    html = page_of([row(odd, "<i>cat", 0.75)])
    assert data_of(html)["paths"] == [odd]
    assert "</script><b>" not in html and "<i>" not in html
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)[0]
    (code,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "innerHTML" not in code
