"""Columns of the table, its file formats, and independent scores of several labels."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet

from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.rows import PredictionRun, RowFormat
from cliquetta.methods.building.frozen import FrozenAdapter
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.model.in_memory import from_model
from cliquetta.model.preprocess import Preprocess
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tolerance import SUM
from tests._helpers.transformers_models import tiny_siglip
from tests._helpers.trees import random_pixels, table_rows
from tests.inference.conftest import IMAGES, NAMES, Predict


def test_an_unknown_suffix_is_no_csv(run: Predict, tmp_path: Path) -> None:
    for shard in ((1, 1), (1, 2)):
        with pytest.raises(UserError, match="xlsx"):
            run(out=tmp_path / "out.xlsx", shard=shard)
    assert not list(tmp_path.glob("out*"))
    run(out=tmp_path / "out.xlsx", file_format="csv")
    run(out=tmp_path / "table", shard=(1, 2))
    assert (tmp_path / "table.1-of-2").read_text().startswith("path,")


def test_columns_of_a_table_are_copied_and_formulas_defused(
    photos: Path, run: Predict, tmp_path: Path
) -> None:
    table = tmp_path / "list.csv"
    table.write_text(
        "camera,filepath,error,shift,prediction,input_prediction\n"
        f"=1+1,{photos / '0.png'},none,-3.5,mine,too\n@x,gone\0.png,,+y,mine,too\n",
        encoding="utf-8",
    )
    done = run(table, method="zero_shot")
    assert done.images == 2 and done.skipped == 1
    rows = table_rows(tmp_path / "out.csv")
    assert [row["camera"] for row in rows] == ["'=1+1", "'@x"]
    assert [row["shift"] for row in rows] == ["-3.5", "'+y"]
    assert [row["input_error"] for row in rows] == ["none", ""]
    assert (
        rows[0]["filepath"] == str(photos / "0.png") and rows[0]["prediction"] in NAMES
    )
    assert rows[1]["error"] == "no such file" and rows[1]["prediction"] == ""
    assert (
        rows[1]["input_prediction"] == "mine"
        and rows[1]["input_input_prediction"] == "too"
    )


def test_rejection_adds_columns_and_changes_no_other(run: Predict) -> None:
    plain = run(out=None)
    rejecting = run(out=None, reject=0.5)
    assert plain.rejected == {}
    names = ("rejected", "rejection_score")
    added = {f"{method}_{name}" for method in ("tda", "tent") for name in names}
    for before, after in zip(plain.rows, rejecting.rows, strict=True):
        assert {name: v for name, v in after.items() if name not in added} == before
        assert added <= after.keys()
    for method, count in rejecting.rejected.items():
        assert count == sum(row[f"{method}_rejected"] or 0 for row in rejecting.rows)
        assert 0 < count < IMAGES


@pytest.mark.parametrize("reject", (None, 0.5))
def test_json_lines_and_parquet_hold_the_same(
    run: Predict, tmp_path: Path, reject: float | None
) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        run(method="zero_shot", reject=reject, out=tmp_path / f"out.{suffix}")
    rows = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    shown = {
        bool: lambda flag: str(flag).lower(),
        float: "{:.6f}".format,
        type(None): lambda _: "",
    }
    for row, wanted in zip(rows, table_rows(tmp_path / "out.csv"), strict=True):
        assert {name: shown.get(type(v), str)(v) for name, v in row.items()} == wanted
    same = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [{**row, "error": row["error"] or None} for row in same] == rows


# Several labels, against the sigmoids of transformers' SigLIP


@pytest.fixture(scope="module")
def siglip() -> tuple[CLIP, Any]:
    pytest.importorskip("transformers", minversion="5")  # SigLIP with a projection
    original = tiny_siglip()
    return from_model(original, preprocess=Preprocess.openai(32)), original


@pytest.fixture
def images() -> list[NDArray[np.uint8]]:
    return list(random_pixels(4, 32, 32, 3))


def test_probabilities_are_sigmoids_of_the_original(
    siglip: tuple[CLIP, Any], images: Any
) -> None:
    model, original = siglip
    ids = torch.tensor([[5, 6, 7, 1], [8, 9, 10, 1], [11, 12, 4, 1]])
    pixels = model.preprocess.pixels(np.stack(images))
    with torch.no_grad():
        output = original(input_ids=ids, pixel_values=pixels)
    expected = output.logits_per_image.sigmoid()
    adapter = create_method(
        "zero_shot", model, ClassPrompts(NAMES, features=output.text_embeds)
    )
    middle = expected.flatten().sort().values
    least = float(
        middle[3:5].mean()
    )  # between two probabilities: rounding decides nothing
    for method in (adapter, FrozenAdapter(adapter)):
        rows = predict(
            images, method=method, all_probabilities=True, multi_label=least
        ).rows
        for row, probabilities in zip(rows, expected, strict=True):
            by_name = {name: row[f"p_{name}"] for name in NAMES}
            np.testing.assert_allclose([*by_name.values()], probabilities, atol=SUM)
            reached = [name for name in NAMES if by_name[name] >= least - 1e-6]
            assert row["labels"] == ";".join(
                sorted(reached, key=lambda name: -by_name[name])
            )
            assert row["probability"] == max(by_name.values())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("zero_shot", {"reject": 0.5}, "leave out"),
        ("zero_shot", {"calibrate": True}, "leave out"),
        ("domain_norm", {}, "weighs"),
        ("tda", {}, "weighs"),
    ],
)
def test_several_labels_are_refused_where_classes_compete(
    method: str, options: Any, message: str, siglip: tuple[CLIP, Any], images: Any
) -> None:
    adapter = create_method(
        method, siglip[0], ClassPrompts(NAMES, features=torch.eye(3, 64))
    )
    with pytest.raises(UserError, match=message):
        predict(images, method=adapter, multi_label=0.5, **options)


def test_softmax_models_refuse_several_labels(run: Predict) -> None:
    with pytest.raises(UserError, match="sigmoid"):
        run(method="zero_shot", multi_label=0.5)


def test_an_image_that_could_not_be_read_is_of_no_class() -> None:
    row_format = RowFormat(("tda",), NAMES, PredictOptions())
    run = PredictionRun()
    run.count(row_format, {"prediction": "cat", "error": ""})
    run.count(row_format, {"prediction": None, "error": "damaged"})
    assert (run.images, run.skipped) == (2, 1)
    assert run.classes == {"tda": {"cat": 1}}


def test_rows_become_a_table_of_pandas() -> None:
    rows: list[Any] = [
        {"path": "a.png", "prediction": "cat"},
        {"path": "b.png", "prediction": None},
    ]
    table = PredictionRun(images=2, rows=rows).to_pandas()
    assert list(table.columns) == ["path", "prediction"]
    assert table["path"].tolist() == ["a.png", "b.png"]
    assert table["prediction"].isna().tolist() == [False, True]


def test_without_pandas_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        PredictionRun().to_pandas()
