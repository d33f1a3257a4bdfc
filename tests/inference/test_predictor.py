"""Batches through methods: the predictions of each alone, odd files, bounded memory."""

import gc
import json
import logging
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cliquetta.inference import parts
from cliquetta.inference.bulk import predict
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.predictor import ImageSource
from cliquetta.inference.rows import RowFormat
from cliquetta.methods.building.base import NonFiniteError
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.state import read_header
from cliquetta.methods.zero_shot import ZeroShot
from cliquetta.model.clip import CLIP
from cliquetta.types import Batch, Prediction
from tests._helpers.tolerance import SUM
from tests.inference.conftest import DAMAGED, IMAGES, NAMES, Predict


def test_several_methods_predict_as_each_alone(run: Predict) -> None:
    methods = ["zero_shot", "tda", "zero", "tent"]
    together = run(out=None, method=methods, top_k=2, all_probabilities=True).rows
    for method in methods:
        alone = run(out=None, method=method, top_k=2, all_probabilities=True).rows
        for one, many in zip(alone, together, strict=True):
            for column, value in one.items():
                shared = column in ("path", "error")
                assert many[column if shared else f"{method}_{column}"] == value


def test_rows_hold_what_the_method_predicts(photos: Path, tiny_clip: CLIP) -> None:
    """Probabilities and rejections; a damaged image would make other batches."""
    good = [photos / f"{number}.png" for number in range(IMAGES) if number != DAMAGED]
    direct, adapter = (create_method("tent", tiny_clip, NAMES) for _ in range(2))
    direct.enable_rejection(0.3)
    predictions = [direct.predict(good[i : i + 4]) for i in (0, 4, 8, 12)]
    settings: Any = {
        "top_k": 3,
        "all_probabilities": True,
        "batch_size": 4,
        "reject": 0.3,
    }
    rows = predict(good, method=adapter, **settings).rows
    assert [row["path"] for row in rows] == [path.as_posix() for path in good]
    expected = torch.cat([prediction.probabilities for prediction in predictions])
    probabilities = torch.tensor([[row[f"p_{name}"] for name in NAMES] for row in rows])
    torch.testing.assert_close(probabilities, expected, atol=SUM, rtol=0)
    assert [row["prediction"] for row in rows] == [
        NAMES[i] for i in expected.argmax(dim=1)
    ]
    assert all(
        row["probability"] >= row["probability_2"] >= row["probability_3"]
        for row in rows
    )
    scores, rejected = (
        [
            value
            for one in predictions
            if one.rejection
            for value in one.rejection[i].tolist()
        ]
        for i in (0, 1)
    )
    assert [row["rejected"] for row in rows] == rejected
    assert [row["rejection_score"] for row in rows] == pytest.approx(scores, abs=SUM)


@pytest.mark.parametrize("out", [None, "out.csv"])
def test_a_state_of_another_class_list_is_warned_of_and_counted_on(
    photos: Path, tiny_clip: CLIP, tmp_path: Path, out: str | None
) -> None:
    state = tmp_path / "state.safetensors"
    settings: Any = {
        "model": tiny_clip,
        "method": "domain_norm",
        "batch_size": 4,
        "state": state,
    }
    if out is not None:
        settings |= {"out": tmp_path / out, "overwrite": True}
    first = predict([photos], ["airplane", "cat", "frog"], **settings)
    assert not first.classes_changed
    with pytest.warns(
        UserWarning, match="state.safetensors was saved with another class list"
    ):
        other = predict([photos / "0.png"], ["cat", "frog"], **settings)
    assert other.classes_changed
    assert read_header(state)["notes"] == {
        "images": 13 + 1
    }  # one of fourteen is damaged


def test_images_are_counted_from_none_after_a_state_without_a_count(
    photos: Path, tiny_clip: CLIP, tmp_path: Path
) -> None:
    state = tmp_path / "state.safetensors"
    create_method("tda", tiny_clip, NAMES).save(state)
    two = [photos / "0.png", photos / "1.png"]
    predict(two, NAMES, model=tiny_clip, method="tda", state=state)
    assert read_header(state)["notes"] == {"images": 2}


def test_nothing_that_is_not_finite_is_written(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ZeroShot._predict

    def diverge(self: ZeroShot, batch: Batch) -> Prediction:
        prediction = plain(self, batch)
        spoilt = batch.keys[-1].endswith("/11.png")
        return Prediction(prediction.logits * float("nan")) if spoilt else prediction

    with monkeypatch.context() as patch:
        patch.setattr(ZeroShot, "_predict", diverge)
        patch.setattr(parts, "PART_ROWS", 4)
        with pytest.raises(NonFiniteError):
            run(method="zero_shot")
    assert not (tmp_path / "out.csv").exists()
    assert run(method="zero_shot").before == 8
    assert "nan" not in (tmp_path / "out.csv").read_text()


def test_names_that_are_not_utf8_and_odd_files(
    photos: Path, run: Predict, tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes((photos / "0.png").read_bytes())
    os.mkfifo(folder / "pipe.png")
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(20 * 2**30)
    (folder / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + b"\0" * 16)
    done = run(folder, method="zero_shot", out=tmp_path / "out.jsonl")
    rows = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    by_name = {Path(row["path"]).name: row for row in rows}
    assert by_name["caf\\xe9.png"]["prediction"] in NAMES
    assert "20.0 GB" in by_name["sparse.png"]["error"]
    assert by_name["photo.heic"]["error"]
    assert done.unused == {".png": 1}  # the pipe


def test_memory_does_not_grow_with_the_list(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 256)
    for name in ("cliquetta", "cliquetta.inference.predictor"):  # pytest keeps records
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    peaks = []
    table = tmp_path / "list.csv"
    gc.collect()
    # with what other tests left, collections are rare, and garbage is not needed
    gc.freeze()
    for count in (
        1_000,
        5_000,
        5_000,
    ):  # twice: Python's table of interned names may grow in one
        table.write_text(
            "path\n" + "".join(f"no/such/{n:08d}.png\n" for n in range(count))
        )
        tracemalloc.start()
        settings = {"batch_size": 64, "workers": None, "overwrite": True}
        done = run(
            table, method="zero_shot", **settings, on_progress=lambda *_: gc.collect()
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert done.skipped == done.images == count
    gc.unfreeze()
    assert min(peaks[1:]) < 1.3 * peaks[0]


def test_a_segment_of_images_in_memory_holds_those_images() -> None:
    images = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(5)]
    row_format = RowFormat(("tda",), NAMES, PredictOptions())
    segment = ImageSource(images, row_format).segment(1, 3)
    shades = [entry.image.getpixel((0, 0))[0] for entry in segment.images]
    assert shades == [1, 2]
    assert segment.columns == [{}, {}]
