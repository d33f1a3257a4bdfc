"""``predict`` where labels are known: they are read, scored, and reach no method."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from cliquetta.inference.rows import PredictionRun
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from tests._helpers.trees import table_rows
from tests.inference.conftest import NAMES, Predict

pytestmark = pytest.mark.filterwarnings("ignore:sub-folders are named after classes")


def check_scores(
    run: PredictionRun, column: str, method: str, labels: list[str]
) -> None:
    """Scores by hand, from the rows."""
    pairs = [
        (label, row[column], row["zero_shot_prediction"])
        for label, row in zip(labels, run.rows, strict=True)
        if label and not row["error"]
    ]
    scores = run.scores[method]
    assert scores.images == len(pairs)
    assert scores.confusion == Counter((label, after) for label, after, _ in pairs)
    assert scores.repaired == sum(
        before != label == after for label, after, before in pairs
    )
    assert scores.broken == sum(
        before == label != after for label, after, before in pairs
    )


@pytest.mark.parametrize("out", [None, "out.csv"])
def test_folders_name_classes(
    run: Predict, class_folders: Path, tiny_clip: CLIP, tmp_path: Path, out: str | None
) -> None:
    labels = [name for name in NAMES for _ in range(8)]
    target = tmp_path / out if out else None
    done = run(class_folders, method="tda", labels="folder", out=target, keep_rows=True)
    assert [row["label"] for row in done.rows] == labels
    check_scores(done, "prediction", "tda", labels)
    assert done.unlabelled == 0
    plain = create_method("zero_shot", tiny_clip, NAMES)
    for row in done.rows:
        if not row["error"]:
            assert plain.predict(row["path"]).labels == [row["zero_shot_prediction"]]
    if target is not None:
        assert [row["label"] for row in table_rows(target)] == labels


def test_no_method_sees_a_label(
    run: Predict, class_folders: Path, tmp_path: Path
) -> None:
    """Other labels, other scores, the same predictions."""
    paths = [class_folders / name / f"{n}.png" for n in range(8) for name in NAMES]
    right = [path.parent.name for path in paths]
    runs = []
    for labels in (right, right[::-1]):
        table = tmp_path / "table.csv"
        lines = [f"{path},{label}" for path, label in zip(paths, labels, strict=True)]
        table.write_text("\n".join(["path,label", *lines]))
        runs.append(run(table, method="tda", labels="label", out=None))
        check_scores(runs[-1], "prediction", "tda", labels)
    first, second = ([{**row, "label": ""} for row in one.rows] for one in runs)
    assert first == second
    assert runs[0].scores["tda"].confusion != runs[1].scores["tda"].confusion


def test_a_column_may_number_classes_and_leave_some_out(
    run: Predict, class_folders: Path, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    paths = [class_folders / "cat" / f"{n}.png" for n in range(5)]
    stated = ["1", "0", "", "1", "7"]  # the fourth image is damaged
    lines = [f"{path},{number}" for path, number in zip(paths, stated, strict=True)]
    table.write_text("\n".join(["path,kind", *lines]))
    done = run(
        table,
        method=["tda", "tent"],
        labels="kind",
        out=tmp_path / "x.csv",
        keep_rows=True,
    )
    assert [row["label"] for row in done.rows] == ["cat", "airplane", "", "cat", ""]
    assert [row["kind"] for row in table_rows(tmp_path / "x.csv")] == stated
    assert done.unlabelled == 2
    for method in ("tda", "tent"):
        check_scores(
            done, f"{method}_prediction", method, [row["label"] for row in done.rows]
        )


def test_an_image_in_memory_may_have_a_label(
    tiny_clip: CLIP, class_folders: Path
) -> None:
    images = [Image.open(class_folders / name / "0.png") for name in NAMES]
    for labels in (list(NAMES), [0, 1, 2]):
        done = predict(images, NAMES, model=tiny_clip, method="tda", labels=labels)
        assert [row["label"] for row in done.rows] == list(NAMES)
        check_scores(done, "prediction", "tda", list(NAMES))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ("folder", "kind", "no column 'kind' of labels"),
        ("folder", ["cat"], "labels='folder'"),
        ("cameras", "folder", r"no label names a class: the labels are 'camera'"),
        ("memory", "folder", "one per image"),
        ("memory", ["cat", "cat"], "2 labels for 1 images"),
    ],
)
def test_labels_that_cannot_be_read_are_refused_first(
    run: Predict,
    class_folders: Path,
    tmp_path: Path,
    images: str,
    labels: Any,
    message: str,
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "camera").symlink_to(class_folders / "cat")
    given = {
        "folder": class_folders,
        "cameras": tmp_path / "photos",
        "memory": [Image.new("RGB", (9, 9))],
    }
    for out in (None, tmp_path / "out.csv"):
        if out is not None and images == "memory":
            continue
        with pytest.raises(UserError, match=message):
            run(given[images], method="tda", labels=labels, out=out)
    assert not (tmp_path / "out.csv.parts").exists()


def test_zero_shot_stands_beside_a_method_on_request(
    run: Predict, photos: Path
) -> None:
    beside = run(method="tda", zero_shot=True, out=None).rows
    alone = run(method="tda", out=None).rows
    plain = run(method="zero_shot", out=None).rows
    for one, other, third in zip(beside, alone, plain, strict=True):
        assert one["zero_shot_prediction"] == third["prediction"]
        assert one["zero_shot_probability"] == third["probability"]
        assert {name: one[name] for name in other} == other
    among = run(method=["zero_shot", "tda"], zero_shot=True, out=None).rows
    assert list(among[0]).count("zero_shot_prediction") == 1
    assert (
        "zero_shot_prediction"
        not in run(method="zero_shot", zero_shot=True, out=None).rows[0]
    )


def test_a_method_with_views_has_zero_shot_beside_it(run: Predict) -> None:
    rows = run(method="zero", zero_shot=True, out=None).rows
    plain = run(method="zero_shot", out=None).rows
    assert [row["zero_shot_prediction"] for row in rows] == [
        row["prediction"] for row in plain
    ]
