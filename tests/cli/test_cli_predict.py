"""``cliquetta predict`` end to end, on a tiny random model."""

from __future__ import annotations

import csv
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cliquetta.data.catalogue import get_dataset
from cliquetta.methods.building.support_set import FewShot
from cliquetta.methods.domain_norm.health import ADVICE
from cliquetta.methods.fit import fit_method
from cliquetta.methods.registry import method_config
from cliquetta.methods.state import read_header
from cliquetta.model.factory import create_model
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
    answer, out = predict(photos, "--batch-size", "4", "--top-k", "2")
    assert answer.code == 0
    rows = table_rows(out)
    paths = [photos / f"image{i}.png" for i in range(4)]
    paths += [photos / "more" / f"image{i}.png" for i in (4, 5)]
    assert [row["path"] for row in rows] == [path.as_posix() for path in paths]
    assert all({row["prediction"], row["prediction_2"]} <= set(NAMES) for row in rows)
    assert all(float(r["probability"]) >= float(r["probability_2"]) for r in rows)
    assert all(row["error"] == "" for row in rows)
    assert "6 images in" in answer.text and "each once" in answer.text


def test_json_is_all_of_stdout(predict: Any, photos: Path) -> None:
    answer, out = predict(photos, "--json")
    document = json.loads(answer.stdout)
    assert document["images"] == 6
    assert document["out"] == str(out)
    assert sum(document["predicted"]["zero_shot"].values()) == 6
    found = [(row["path"], row["prediction"]) for row in document["predictions"]]
    assert found == [(row["path"], row["prediction"]) for row in table_rows(out)]


def test_json_writes_no_table_that_was_not_asked_for(
    run: Run, photos: Path, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    ask = ("predict", photos, "--classes", "cat,dog", "--method", "zero_shot", "--model", tiny_file)
    document = json.loads(run(*ask, "--json").stdout)
    assert document["out"] is None and len(document["predictions"]) == 6
    assert set(tmp_path.rglob("*")) == before
    assert run(*ask).code == 0 and (tmp_path / "predictions.csv").exists()


def test_a_page_shows_every_image_with_its_prediction(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    page, odd = tmp_path / "page.html", "<b>&.png"
    (photos / "image0.png").rename(photos / odd)
    (photos / "damaged.png").write_bytes(b"no picture")
    answer, out = predict(photos, "--page", page, classes="<i>cat,dog,frog")
    assert answer.code == 3 and f"Page: {page}" in answer.text
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


@pytest.mark.parametrize("finished", [False, True])
def test_a_stopped_run_names_parts_that_exist(
    predict: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    def stop(*given: Any, out: str, **more: Any) -> None:
        Path(f"{out}.parts").mkdir()
        if finished:
            Path(f"{out}.parts/0-4.jsonl").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("cliquetta.inference.bulk.predict", stop)
    answer, _ = predict(photos)
    assert answer.code and ("finished parts are in" in answer.text) == finished


@pytest.mark.parametrize("name", ["photo.jpg", "list.csv", "shard.tar"])
def test_an_address_that_cannot_be_reached_is_named(predict: Any, name: str) -> None:
    address = f"http://127.0.0.1:1/{name}"
    answer, _ = predict(address)
    assert answer.code in (1, 2) and address in answer.stderr
    assert "parts" not in answer.stderr


def test_images_of_no_class_are_named(predict: Any, photos: Path) -> None:
    plain, out = predict(photos, "--json")
    before = out.read_bytes()
    answer, out = predict(photos, "--reject", "0.5", "--json")
    rows, document = table_rows(out), json.loads(answer.stdout)
    assert list(rows[0])[-3:] == ["rejected", "rejection_score", "error"]
    assert {row["rejected"] for row in rows} == {"true", "false"}
    count = sum(row["rejected"] == "true" for row in rows)
    assert document["rejected"] == {"zero_shot": count}
    assert [row["rejected"] for row in document["predictions"]] == [
        row["rejected"] == "true" for row in rows
    ]
    assert "rejected" not in json.loads(plain.stdout)
    answer, _ = predict(photos, "--reject", "0.5")
    assert f"{count} of them look like none of the classes (column `rejected`)" in answer.text
    predict(photos)
    assert out.read_bytes() == before


def test_calibrated_probabilities_are_others_of_the_same_answers(
    predict: Any, photos: Path
) -> None:
    words = (photos, "--method", "tda", "--probabilities")
    before = table_rows(predict(*words)[1])
    answer, out = predict(*words, "--calibrate")
    after = table_rows(out)
    assert answer.code == 0 and list(before[0]) == list(after[0])
    assert [row["prediction"] for row in before] == [row["prediction"] for row in after]
    assert all(a["probability"] != b["probability"] for a, b in zip(before, after, strict=True))
    for row in after:
        assert sum(float(row[f"p_{name}"]) for name in NAMES) == pytest.approx(1, abs=SUM)


def test_a_frozen_method_rejects_by_the_limit_that_it_learned(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    words = ("--method", "tent", "--state", tmp_path / "state", "--reject", "0.5")
    answer, _ = predict(photos, *words[:-2])
    answer, _ = predict(photos, *words, "--frozen")
    assert answer.code == 2 and "the state was saved without --reject" in " ".join(
        answer.stderr.split()
    )
    predict(photos, *words)
    answer, out = predict(photos, *words, "--frozen")
    assert answer.code == 0 and {row["rejected"] for row in table_rows(out)} <= {"true", "false"}


@pytest.mark.parametrize(
    ("words", "classes", "sentence"),
    (
        (("--reject", "1"), "a,b,c", "above 0 and below 1, got 1.0: 0.9 is a good start"),
        (("--reject", "-0.5"), "a,b,c", "above 0 and below 1, got -0.5"),
        (("--reject", "0.5"), "a,b", "one of them left out: give at least three, got 2"),
    ),
)
def test_rejections_that_cannot_be_had_write_nothing(
    predict: Any, photos: Path, words: tuple[str, str], classes: str, sentence: str
) -> None:
    answer, out = predict(photos, *words, classes=classes)
    assert answer.code == 2 and sentence in " ".join(answer.stderr.split())
    assert not out.exists() and not out.with_name("out.csv.parts").exists()


def test_the_last_lines_tell_the_verdict_of_a_method_that_has_one(
    predict: Any, photos: Path
) -> None:
    answer, _ = predict(photos, "--method", "domain_norm,tda")
    said = " ".join(answer.stdout.split())
    assert "Verdict of domain_norm without labels: " in said and "50 labelled images" in said
    assert "Verdict of tda" not in said
    answer, _ = predict(photos, "--method", "domain_norm,tda", "--json")
    health = json.loads(answer.stdout)["health"]
    assert list(health) == ["domain_norm"]
    assert health["domain_norm"]["verdict"] in ADVICE
    assert 0 < health["domain_norm"]["confidence"] <= 1


def test_files_lists_and_tables_are_taken_together(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    table = photos / "list.csv"
    table.write_text("id,Path\n1,more/image4.png\n2,image0.png\n3,gone.png\n", encoding="utf-8")
    answer, out = predict(photos / "image1.png", table, photos / "image1.png")
    rows = table_rows(out)
    names = ["image1.png", "more/image4.png", "image0.png", "gone.png"]
    assert [row["path"] for row in rows] == [(photos / name).as_posix() for name in names]
    assert rows[-1]["error"] == "no such file"
    assert answer.code == 3
    assert "named twice" in answer.text


def test_table_without_a_column_of_paths_is_refused(predict: Any, tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    table.write_text("name,label\na,b\n", encoding="utf-8")
    answer, _ = predict(table)
    assert answer.code == 2
    assert "no column of paths" in answer.text and "path" in answer.text


def test_state_continues_a_stream(predict: Any, photos: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    first, _ = predict(photos / "image0.png", photos / "image1.png", "--state", state)
    assert first.code == 0 and f"pass --state {state} to continue" in first.text
    predict(photos / "image2.png", "--state", state)
    assert read_header(state)["notes"] == {"images": 3}


def test_state_of_other_classes_is_refused(predict: Any, photos: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    words = (photos / "image0.png", "--state", state, "--method", "tda")
    predict(*words)
    answer, _ = predict(*words, classes="cat,frog")
    assert answer.code == 2
    assert "another class list" in answer.text
    assert "tda learns about its classes only" in answer.text


def test_domains_of_a_state_are_kept_for_other_classes(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state.safetensors"
    predict(photos, "--state", state, "--method", "domain_norm")
    learned = load_file(state)["memory.domains.0.key.mean"]
    words = (photos / "image0.png", "--state", state, "--method", "domain_norm")
    answer, out = predict(*words, classes="cat,frog")
    assert "saved with another class list: what was learned about the images is kept" in answer.text
    assert "was of another class list: what was learned about the images was kept" in answer.text
    assert answer.code == 0 and table_rows(out)[0]["prediction"] in ("cat", "frog")
    after = load_file(state)
    assert learned.any() and after["memory.domains.0.counts.images"] == 1
    assert after["memory.domains.0.key.images"] == 1 + len(list(photos.rglob("*.png")))


def test_an_interrupted_run_says_how_to_continue(
    predict: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cliquetta.methods.zero_shot import ZeroShot

    plain, calls = ZeroShot._predict, []

    def fail_at_the_second(self: Any, batch: Any) -> Any:
        calls.append(len(batch))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return plain(self, batch)

    monkeypatch.setattr("cliquetta.inference.parts.PART_ROWS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(ZeroShot, "_predict", fail_at_the_second)
        answer, out = predict(photos, "--batch-size", "2")
    assert answer.code == 1 and not out.exists()
    assert "No space left" in answer.text and "run the same command again" in answer.text
    answer, out = predict(photos, "--batch-size", "2")
    assert answer.code == 0 and len(table_rows(out)) == 6
    assert "6 images in" in answer.text and "2 of them before it was continued" in answer.text


def test_standard_input_and_output(predict: Any, photos: Path) -> None:
    for separator in (b"\n", b"\0"):
        names = separator.join(str(photos / f"image{i}.png").encode() for i in (3, 1))
        answer, _ = predict("-", "--out", "-", "--quiet", input=names)
        rows = list(csv.DictReader(answer.stdout.splitlines()))
        assert [Path(row["path"]).name for row in rows] == ["image3.png", "image1.png"]
    answer, _ = predict(photos, "--out", "-", "--format", "jsonl", "--shard", "1/2")
    assert answer.stdout == ""  # one batch cannot be shared
    answer, _ = predict(photos, "--out", "-", "--format", "jsonl", "--shard", "2/2")
    assert [json.loads(line)["error"] for line in answer.stdout.splitlines()] == [None] * 6
    answer, _ = predict(photos, "--out", "-", "--json")
    assert answer.code == 2 and "leave out" in answer.text


def test_methods_stand_side_by_side(predict: Any, photos: Path) -> None:
    answer, out = predict(photos, "--method", "zero_shot,tda", "--probabilities")
    assert answer.code == 0
    columns = set(table_rows(out)[0])
    assert {"zero_shot_prediction", "tda_probability", "tda_p_cat"} <= columns
    answer, _ = predict(photos, "--method", "zero_shot,tda", "--set", "x=1")
    assert answer.code == 2 and "for one method" in answer.text


def test_files_that_are_not_images_are_counted(predict: Any, photos: Path) -> None:
    (photos / "notes.txt").write_text("x")
    (photos / "clip.mp4").write_text("x")
    answer, _ = predict(photos)
    assert "1 .txt" in answer.text and "1 .mp4" in answer.text


def test_unreadable_images_are_named_and_skipped(predict: Any, photos: Path) -> None:
    whole = (photos / "image0.png").read_bytes()
    (photos / "bad_corrupt.png").write_bytes(whole[:60] + b"\0" * 200 + whole[260:])
    (photos / "bad_truncated.png").write_bytes(whole[: len(whole) // 2])
    (photos / "bad_empty.jpg").write_bytes(b"")
    (photos / "bad_text.jpg").write_text("these are words, not pixels")
    (photos / "bad_large.png").write_bytes(bombs()["png claims 50,000 x 50,000"])
    Image.new("RGB", (1, 1), (200, 10, 10)).save(photos / "tiny_1x1.png")
    answer, out = predict(photos, "--batch-size", "3")
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
    assert answer.code == 3
    assert "5 images could not be read" in answer.text


def test_nothing_readable_is_bad_input(predict: Any, tmp_path: Path) -> None:
    (tmp_path / "no.jpg").write_bytes(b"")
    answer, out = predict(tmp_path / "no.jpg")
    assert answer.code == 2
    assert table_rows(out)[0]["error"] == "an empty file"
    assert "nothing could be predicted" in answer.text


def test_fitted_file_takes_the_place_of_a_method(
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
    answer, out = predict(photos, "--fitted", fitted)
    assert answer.code == 0
    assert [float(row["probability"]) for row in table_rows(out)] != plain
    answer, _ = predict(photos, "--fitted", fitted, "--set", "alpha=2")
    assert answer.code == 2 and "leave out" in answer.text
    answer, _ = predict(photos, "--fitted", fitted, "--method", "coop")
    assert answer.code == 2 and "fitted for tip_adapter" in answer.text


def test_shifted_shots_have_other_noise_than_test_images(
    run: Run, tiny_file: Path, tmp_path: Path
) -> None:
    id, out = "bundled-fewshot@gaussian_noise:3", tmp_path / "tip.safetensors"
    made = run(
        *("fit", "--method", "tip_adapter", "--dataset", id, "--shots", "1"),
        *("--model", tiny_file, "--out", out),
    )
    assert made.code == 0
    clip = create_model(str(tiny_file))
    keys = {}
    for noise_seed in (0, 1):
        images = get_dataset(id, noise_seed=noise_seed)
        few_shot = FewShot.from_dataset(images, 1, clip.preprocess, 0)
        config = method_config("tip_adapter")
        keys[noise_seed] = fit_method("tip_adapter", clip, images.prompts, few_shot, config).fitted[
            "keys"
        ]
    found = load_file(out)["fitted.keys"]
    torch.testing.assert_close(found, keys[1])
    assert not torch.allclose(found, keys[0], atol=1e-3)


def test_fit_refuses_a_method_that_learns_nothing(
    run: Run, tiny_file: Path, tmp_path: Path
) -> None:
    answer = run(
        *("fit", "--method", "zero_shot", "--dataset", "bundled-fewshot"),
        *("--model", tiny_file, "--out", tmp_path / "x.safetensors"),
    )
    assert answer.code == 2 and "needs no fitting" in answer.text


def test_views_reach_a_method_that_needs_them(predict: Any, photos: Path) -> None:
    answer, out = predict(photos, "--method", "zero", "--set", "views=4")
    assert answer.code == 0
    assert len(table_rows(out)) == 6


def test_the_same_command_gives_the_same_table(predict: Any, photos: Path) -> None:
    tables = []
    for workers in ("0", "2"):
        _, out = predict(photos, "--method", "tent", "--workers", workers)
        tables.append(out.read_bytes())
    assert tables[0] == tables[1]
    assert np.isfinite([float(row["probability"]) for row in table_rows(out)]).all()
