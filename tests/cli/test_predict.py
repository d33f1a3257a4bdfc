"""``cliquetta predict`` end to end, on a tiny random model."""

from __future__ import annotations

import csv
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from cliquetta.methods.domain_norm.health import ADVICE
from cliquetta.methods.state import read_header
from cliquetta.methods.zero_shot import ZeroShot
from tests._helpers.malformed import bombs
from tests._helpers.running import Run
from tests._helpers.tolerance import SUM
from tests._helpers.trees import table_rows

NAMES = ("airplane", "cat", "frog")


@pytest.fixture
def predict(run: Run, tiny_file: Path, tmp_path: Path) -> Any:
    """``predict`` with the tiny model and three classes into ``out.csv``."""

    def call(*words: str | Path, classes: str = ",".join(NAMES), input: bytes | None = None) -> Any:
        out = tmp_path / "out.csv"
        if not {"--method", "--fitted"} & set(words):
            words = (*words, "--method", "zero_shot")
        words = (*words, "--classes", classes, "--model", tiny_file)
        words = (*words, *(() if "--out" in words else ("--out", out, "--overwrite")))
        return run("predict", *words, input=input), out

    return call


def test_table_holds_a_row_per_image_in_order(predict: Any, photos: Path) -> None:
    result, out = predict(photos, "--batch-size", "4", "--top-k", "2")
    assert result.code == 0
    rows = table_rows(out)
    paths = [photos / f"image{i}.png" for i in range(4)]
    paths += [photos / "more" / f"image{i}.png" for i in (4, 5)]
    assert [row["path"] for row in rows] == [path.as_posix() for path in paths]
    assert all({row["prediction"], row["prediction_2"]} <= set(NAMES) for row in rows)
    assert all(float(r["probability"]) >= float(r["probability_2"]) for r in rows)
    assert all(row["error"] == "" for row in rows)
    assert "6 images in" in result.text and "each once" in result.text


def test_json_is_all_of_stdout(predict: Any, photos: Path) -> None:
    result, out = predict(photos, "--json")
    document = json.loads(result.stdout)
    assert document["images"] == 6
    assert document["out"] == str(out)
    assert sum(document["predicted"]["zero_shot"].values()) == 6
    printed = [(row["path"], row["prediction"]) for row in document["predictions"]]
    assert printed == [(row["path"], row["prediction"]) for row in table_rows(out)]


def test_json_writes_no_table_that_was_not_asked_for(
    run: Run, photos: Path, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("predict", photos, "--classes", "cat,dog", "--method", "zero_shot")
    document = json.loads(run(*words, "--model", tiny_file, "--json").stdout)
    assert document["out"] is None and len(document["predictions"]) == 6
    assert not list(tmp_path.glob("*.csv"))
    assert run(*words, "--model", tiny_file).code == 0 and (tmp_path / "predictions.csv").exists()


def test_a_page_shows_every_image_with_its_prediction(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    page, odd = tmp_path / "page.html", "<b>&.png"
    (photos / "image0.png").rename(photos / odd)
    (photos / "damaged.png").write_bytes(b"no picture")
    result, out = predict(photos, "--page", page, classes="<i>cat,dog,frog")
    assert result.code == 3 and f"Page: {page}" in result.text
    html, rows = page.read_text(), [row for row in table_rows(out) if not row["error"]]
    assert html.count('<img src="data:image/webp;base64,') == len(rows) == 6
    for row in rows:
        assert escape(f"{row['prediction']} {100 * float(row['probability']):.0f} %") in html
        assert f'alt="{escape(row["path"])}"' in html
    assert f"{escape((photos / 'damaged.png').as_posix())}: not an image" in html
    assert escape(odd) in html and odd not in html and "<i>" not in html
    for row in rows:
        assert html.count(f"> {escape(row['prediction'])} (") == 1  # a choice for every class
    assert "<script" not in html and "default-src 'none'" in html
    refused, _ = predict(photos, "--page", page, "--out", "-")
    assert refused.code == 2 and "--page shows images" in refused.text


def test_quiet_leaves_errors_only(predict: Any, photos: Path, tmp_path: Path) -> None:
    (photos / "damaged.png").write_bytes(b"no picture")
    loud, _ = predict(photos, "--top-k", "2")
    assert (
        "damaged.png" in "".join(loud.stderr.split()) and "1 image could not be read" in loud.stderr
    )
    quiet, _ = predict(photos, "--top-k", "2", "--quiet")
    assert (quiet.code, quiet.stdout, quiet.stderr) == (3, "", "")
    wrong, _ = predict(tmp_path / "nowhere", "--quiet")
    assert wrong.code == 2 and "nowhere" in wrong.stderr


def test_a_stopped_run_names_no_parts_that_do_not_exist(
    predict: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any, out: str, **more: Any) -> None:
        Path(f"{out}.parts").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("cliquetta.inference.bulk.predict", stop)
    result, _ = predict(photos)
    assert result.code and "finished parts are in" not in result.text


@pytest.mark.parametrize("name", ["photo.jpg", "list.csv", "shard.tar"])
def test_an_address_that_cannot_be_reached_is_named(predict: Any, name: str) -> None:
    address = f"http://127.0.0.1:1/{name}"
    result, _ = predict(address)
    assert result.code in (1, 2) and address in result.stderr
    assert "parts" not in result.stderr


def test_images_of_no_class_are_named(predict: Any, photos: Path) -> None:
    plain, _ = predict(photos, "--json")
    assert "rejected" not in json.loads(plain.stdout)
    result, out = predict(photos, "--reject", "0.5", "--json")
    rows, document = table_rows(out), json.loads(result.stdout)
    assert list(rows[0])[-3:] == ["rejected", "rejection_score", "error"]
    rejected = [row["rejected"] == "true" for row in rows]
    assert document["rejected"] == {"zero_shot": sum(rejected)} and 0 < sum(rejected) < 6
    assert [row["rejected"] for row in document["predictions"]] == rejected
    result, _ = predict(photos, "--reject", "0.5")
    assert f"{sum(rejected)} of them look like none of the classes" in result.text


def test_calibration_changes_probabilities_and_no_prediction(predict: Any, photos: Path) -> None:
    words = (photos, "--method", "tda", "--probabilities")
    before = table_rows(predict(*words)[1])
    result, out = predict(*words, "--calibrate")
    after = table_rows(out)
    assert result.code == 0 and list(before[0]) == list(after[0])
    assert [row["prediction"] for row in before] == [row["prediction"] for row in after]
    assert all(a["probability"] != b["probability"] for a, b in zip(before, after, strict=True))
    for row in after:
        assert sum(float(row[f"p_{name}"]) for name in NAMES) == pytest.approx(1, abs=SUM)


def test_a_frozen_method_rejects_by_the_limit_that_it_learned(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    words = ("--method", "tent", "--state", tmp_path / "state", "--reject", "0.5")
    result, _ = predict(photos, *words[:-2])
    result, _ = predict(photos, *words, "--frozen")
    assert result.code == 2 and "the state was saved without --reject" in result.text
    predict(photos, *words)
    result, out = predict(photos, *words, "--frozen")
    assert result.code == 0 and {row["rejected"] for row in table_rows(out)} <= {"true", "false"}


@pytest.mark.parametrize(
    ("share", "classes", "sentence"),
    (
        ("1", "a,b,c", "above 0 and below 1, got 1.0: 0.9 is a good start"),
        ("0.5", "a,b", "one of them left out: give at least three, got 2"),
    ),
)
def test_rejections_that_cannot_be_had_write_nothing(
    predict: Any, photos: Path, share: str, classes: str, sentence: str
) -> None:
    result, out = predict(photos, "--reject", share, classes=classes)
    assert result.code == 2 and sentence in result.text
    assert not out.exists() and not out.with_name("out.csv.parts").exists()


def test_the_last_lines_tell_the_verdict_of_a_method_that_has_one(
    predict: Any, photos: Path
) -> None:
    result, _ = predict(photos, "--method", "domain_norm,tda")
    assert (
        "Verdict of domain_norm without labels: " in result.text
        and "50 labelled images" in result.text
    )
    assert "Verdict of tda" not in result.text
    result, _ = predict(photos, "--method", "domain_norm,tda", "--json")
    health = json.loads(result.stdout)["health"]
    assert list(health) == ["domain_norm"]
    assert health["domain_norm"]["verdict"] in ADVICE
    assert 0 < health["domain_norm"]["confidence"] <= 1


def test_files_lists_and_tables_are_read_together(predict: Any, photos: Path) -> None:
    table = photos / "list.csv"
    table.write_text("id,Path\n1,more/image4.png\n2,image0.png\n3,gone.png\n", encoding="utf-8")
    result, out = predict(photos / "image1.png", table, photos / "image1.png")
    rows = table_rows(out)
    names = ["image1.png", "more/image4.png", "image0.png", "gone.png"]
    assert [row["path"] for row in rows] == [(photos / name).as_posix() for name in names]
    assert rows[-1]["error"] == "no such file"
    assert result.code == 3 and "named twice" in result.text
    table.write_text("name,label\na,b\n", encoding="utf-8")
    result, _ = predict(table)
    assert result.code == 2 and "no column of paths" in result.text


def test_state_continues_a_stream(predict: Any, photos: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    first, _ = predict(photos / "image0.png", photos / "image1.png", "--state", state)
    assert first.code == 0 and f"pass --state {state} to continue" in first.text
    predict(photos / "image2.png", "--state", state)
    assert read_header(state)["notes"] == {"images": 3}


def test_state_of_other_classes_is_refused(predict: Any, photos: Path, tmp_path: Path) -> None:
    words = (photos / "image0.png", "--state", tmp_path / "state", "--method", "tda")
    predict(*words)
    result, _ = predict(*words, classes="cat,frog")
    assert result.code == 2
    assert "another class list" in result.text
    assert "tda learns about its classes only" in result.text


def test_domains_of_a_state_go_on_with_other_classes(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state.safetensors"
    predict(photos, "--state", state, "--method", "domain_norm")
    learned = load_file(state)["memory.domains.0.key.mean"]
    words = (photos / "image0.png", "--state", state, "--method", "domain_norm")
    result, out = predict(*words, classes="cat,frog")
    assert "another class list: what was learned about the images stays" in result.text
    assert "was of another class list: what was learned about the images was kept" in result.text
    assert result.code == 0 and table_rows(out)[0]["prediction"] in ("cat", "frog")
    after = load_file(state)
    assert learned.any() and after["memory.domains.0.counts.images"] == 1
    assert after["memory.domains.0.key.images"] == 1 + len(list(photos.rglob("*.png")))


def test_an_interrupted_run_says_how_to_continue(
    predict: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = ZeroShot._predict, []

    def fail_at_the_second(self: Any, batch: Any) -> Any:
        calls.append(len(batch))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return plain(self, batch)

    monkeypatch.setattr("cliquetta.inference.parts.PART_ROWS", 2)
    monkeypatch.setattr(ZeroShot, "_predict", fail_at_the_second)
    result, out = predict(photos, "--batch-size", "2")
    assert result.code == 1 and not out.exists()
    assert "No space left" in result.text and "finished parts are in" in result.text
    result, out = predict(photos, "--batch-size", "2")
    assert result.code == 0 and len(table_rows(out)) == 6
    assert "6 images in" in result.text and "2 of them before it was continued" in result.text


def test_standard_input_and_output(predict: Any, photos: Path) -> None:
    for separator in (b"\n", b"\0"):
        names = separator.join(str(photos / f"image{i}.png").encode() for i in (3, 1))
        result, _ = predict("-", "--out", "-", "--quiet", input=names)
        rows = list(csv.DictReader(result.stdout.splitlines()))
        assert [Path(row["path"]).name for row in rows] == ["image3.png", "image1.png"]
    result, _ = predict(photos, "--out", "-", "--format", "jsonl", "--shard", "1/2")
    assert result.stdout == ""  # one batch cannot be shared
    result, _ = predict(photos, "--out", "-", "--format", "jsonl", "--shard", "2/2")
    assert [json.loads(line)["error"] for line in result.stdout.splitlines()] == [None] * 6
    result, _ = predict(photos, "--out", "-", "--json")
    assert result.code == 2 and "leave out" in result.text


def test_methods_stand_side_by_side(predict: Any, photos: Path) -> None:
    result, out = predict(photos, "--method", "zero_shot,tda", "--probabilities")
    assert result.code == 0
    columns = set(table_rows(out)[0])
    assert {"zero_shot_prediction", "tda_probability", "tda_p_cat"} <= columns
    result, _ = predict(photos, "--method", "zero_shot,tda", "--set", "x=1")
    assert result.code == 2 and "for one method" in result.text


def test_files_that_are_not_images_are_counted(predict: Any, photos: Path) -> None:
    for name in ("notes.txt", "clip.mp4"):
        (photos / name).write_text("x")
    result, _ = predict(photos)
    assert "1 .txt" in result.text and "1 .mp4" in result.text


def test_unreadable_images_are_named_and_skipped(predict: Any, photos: Path) -> None:
    intact = (photos / "image0.png").read_bytes()
    (photos / "bad_corrupt.png").write_bytes(intact[:60] + b"\0" * 200 + intact[260:])
    (photos / "bad_truncated.png").write_bytes(intact[: len(intact) // 2])
    (photos / "bad_empty.jpg").write_bytes(b"")
    (photos / "bad_text.jpg").write_text("these are words, not pixels")
    (photos / "bad_large.png").write_bytes(bombs()["png claims 50,000 x 50,000"])
    Image.new("RGB", (1, 1), (200, 10, 10)).save(photos / "tiny_1x1.png")
    result, out = predict(photos, "--batch-size", "3")
    rows = {Path(row["path"]).name: row for row in table_rows(out)}
    bad = {name: row["error"] for name, row in rows.items() if row["error"]}
    reasons = {"empty.jpg": "empty", "large.png": "too large", "text.jpg": "not an image"}
    reasons |= {"truncated.png": "truncated", "corrupt.png": ""}
    assert bad.keys() == {f"bad_{name}" for name in reasons}
    assert all(reason in bad[f"bad_{name}"] for name, reason in reasons.items())
    assert all(not rows[name]["prediction"] for name in bad)
    assert rows["tiny_1x1.png"]["prediction"] in NAMES
    assert len(rows) == 12
    assert list(rows) == [Path(row["path"]).name for row in table_rows(out)]
    assert result.code == 3
    assert "5 images could not be read" in result.text


def test_nothing_readable_is_bad_input(predict: Any, tmp_path: Path) -> None:
    (tmp_path / "no.jpg").write_bytes(b"")
    result, out = predict(tmp_path / "no.jpg")
    assert result.code == 2
    assert table_rows(out)[0]["error"] == "an empty file"
    assert "nothing could be predicted" in result.text


def test_a_fitted_file_replaces_a_method(
    run: Run, predict: Any, photos: Path, tiny_file: Path, tmp_path: Path
) -> None:
    fitted = tmp_path / "tip.safetensors"
    made = run(
        *("fit", "--method", "tip_adapter", "--dataset", "bundled-fewshot", "--shots", "2"),
        *("--model", tiny_file, "--out", fitted, "--json"),
    )
    assert made.code == 0
    assert json.loads(made.stdout)["images"] == 20
    _, out = predict(photos)
    plain = [float(row["probability"]) for row in table_rows(out)]
    result, out = predict(photos, "--fitted", fitted)
    assert result.code == 0
    assert [float(row["probability"]) for row in table_rows(out)] != plain
    result, _ = predict(photos, "--fitted", fitted, "--set", "alpha=2")
    assert result.code == 2 and "leave out" in result.text
    result, _ = predict(photos, "--fitted", fitted, "--method", "coop")
    assert result.code == 2 and "fitted for tip_adapter" in result.text


def test_the_same_command_gives_the_same_table(predict: Any, photos: Path) -> None:
    tables = []
    for workers in ("0", "2"):
        _, out = predict(photos, "--method", "tent", "--workers", workers)
        tables.append(out.read_bytes())
    assert tables[0] == tables[1]
    assert np.isfinite([float(row["probability"]) for row in table_rows(out)]).all()
