"""``cliquetta predict`` end to end, on a tiny random model."""

import csv
import json
from html import escape
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cliquetta.cli.predict import scores_in_words
from cliquetta.inference.scores import MethodScores
from cliquetta.methods.building.state import read_header
from cliquetta.methods.zero_shot import ZeroShot
from tests._helpers.running import Run
from tests._helpers.tolerance import SUM
from tests._helpers.trees import noise, table_rows

NAMES = ("airplane", "cat", "frog")


@pytest.fixture
def predict(run: Run, tiny_file: Path, tmp_path: Path) -> Any:
    """``predict`` with the tiny model, three classes and zero-shot; the result and the table."""
    out = tmp_path / "out.csv"

    def call(
        *words: str | Path, classes: str = ",".join(NAMES), input: bytes | None = None
    ) -> Any:
        if not {"--method", "--fitted"} & set(words):
            words = (*words, "--method", "zero_shot")
        words = (*words, "--classes", classes, "--model", tiny_file)
        words = (*words, *(() if "--out" in words else ("--out", out, "--overwrite")))
        result = run("predict", *words, input=input)
        return result, table_rows(out) if out.exists() else []

    return call


def test_table_holds_a_row_per_image_in_order(predict: Any, photos: Path) -> None:
    for name in ("notes.txt", "clip.mp4"):
        (photos / name).write_text("x")
    result, rows = predict(
        photos, photos / "image1.png", "--batch-size", "4", "--top-k", "2"
    )
    assert result.code == 0 and "1 path named twice" in result.text
    assert "1 .txt" in result.text and "1 .mp4" in result.text
    paths = [photos / f"{'more/' if i > 3 else ''}image{i}.png" for i in range(6)]
    assert [row["path"] for row in rows] == [path.as_posix() for path in paths]
    for row in rows:
        assert {row["prediction"], row["prediction_2"]} <= set(NAMES)
        assert float(row["probability"]) >= float(row["probability_2"])
        assert row["error"] == ""
    assert "6 images in" in result.text and "each once" in result.text


def test_json_is_all_of_stdout_and_writes_no_table_that_was_not_asked_for(
    predict: Any,
    run: Run,
    photos: Path,
    tiny_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, rows = predict(photos, "--json")
    document = json.loads(result.stdout)
    assert document["images"] == 6 and document["out"].endswith("out.csv")
    assert sum(document["predicted"]["zero_shot"].values()) == 6
    printed = [(row["path"], row["prediction"]) for row in document["predictions"]]
    assert printed == [(row["path"], row["prediction"]) for row in rows]
    monkeypatch.chdir(photos)
    words = (
        "predict",
        ".",
        "--classes",
        "cat,dog",
        "--method",
        "zero_shot",
        "--model",
        tiny_file,
    )
    document = json.loads(run(*words, "--json").stdout)
    assert document["out"] is None and len(document["predictions"]) == 6
    assert not list(photos.glob("*.csv"))
    assert run(*words).code == 0 and Path("predictions.csv").exists()


def test_a_page_shows_every_image_with_its_prediction(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    (photos / "damaged.png").write_bytes(b"no picture")
    result, rows = predict(photos, "--page", page, "--method", "tda")
    assert result.code == 3 and f"Page: {page}" in result.text
    html = page.read_text()
    text = html.split('id="images">')[1].split("</script>")[0]
    data = json.loads(text)
    rows = [row for row in rows if not row["error"]]
    classes = data["classes"]
    assert data["paths"] == [row["path"] for row in rows]
    assert [classes[n] for n in data["predictions"][0]] == [
        row["prediction"] for row in rows
    ]
    plain = [row["zero_shot_prediction"] for row in rows]
    assert [classes[number] for number in data["zero_shot"]] == plain
    assert f"{escape((photos / 'damaged.png').as_posix())}: not an image" in html


def test_labels_give_accuracy_and_say_whether_adapting_helped(
    predict: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "labelled"
    for name in (*NAMES, "other"):
        (folder / name).mkdir(parents=True)
    noise(folder, [f"{name}/{n}.png" for name in (*NAMES, "other") for n in range(4)])
    words = (folder, "--method", "tda,tent", "--labels", "folder", "--batch-size", "4")
    result, rows = predict(*words)
    assert "shuffled order" in result.text
    assert [row["label"] for row in rows] == [n for n in NAMES for _ in range(4)] + [
        ""
    ] * 4
    for method in ("tda", "tent"):
        right = sum(row[f"{method}_prediction"] == row["label"] for row in rows[:12])
        assert (
            f"Accuracy of {method}: {100 * right / 12:.1f} % of 12 images with a label"
            in (result.text)
        )
    assert "Adapting made no difference beyond chance" in result.text
    assert "4 images with no label of the class list: not scored" in result.text
    document = json.loads(predict(*words, "--json")[0].stdout)
    assert document["scores"]["tda"]["labelled"] == 12 and document["unlabelled"] == 4
    assert document["shuffled"] is True
    assert predict(*words[:-4], "--labels", "kind")[0].refuses(
        "no column 'kind' of labels"
    )


def test_a_significant_difference_is_called_help_or_harm() -> None:
    scores = MethodScores()
    for _ in range(9):
        scores.add(label="cat", predicted="cat", zero_shot="dog")
    words = scores_in_words("tda", scores)
    assert words.startswith(
        "Accuracy of tda: 100.0 % of 9 images with a label, zero-shot 0.0 %:"
    )
    assert "0.0 %: +100.0 ± 0.0 points." in words
    assert "Adapting helped (9 repaired and 0 broken, p = 0.0039)." in words
    for _ in range(30):
        scores.add(label="cat", predicted="dog", zero_shot="cat")
    assert "Adapting hurt (9 repaired and 30 broken" in scores_in_words("tda", scores)


@pytest.mark.parametrize("name", ["photo.jpg", "list.csv", "shard.tar"])
def test_an_address_that_cannot_be_reached_is_named(predict: Any, name: str) -> None:
    address = f"http://127.0.0.1:1/{name}"
    result, _ = predict(address)
    assert result.code in (1, 2) and address in result.stderr
    assert "parts" not in result.stderr


def test_images_of_no_class_are_named(predict: Any, photos: Path) -> None:
    result, rows = predict(photos, "--reject", "0.5", "--json")
    document = json.loads(result.stdout)
    assert list(rows[0])[-3:] == ["rejected", "rejection_score", "error"]
    rejected = [row["rejected"] == "true" for row in rows]
    assert (
        document["rejected"] == {"zero_shot": sum(rejected)} and 0 < sum(rejected) < 6
    )
    assert [row["rejected"] for row in document["predictions"]] == rejected
    result, _ = predict(photos, "--reject", "0.5")
    assert f"{sum(rejected)} of them look like none of the classes" in result.text


def test_calibration_changes_probabilities_alone(predict: Any, photos: Path) -> None:
    words = (photos, "--method", "tda", "--probabilities")
    _, before = predict(*words)
    _, after = predict(*words, "--calibrate")
    assert list(before[0]) == list(after[0])
    for one, other in zip(before, after, strict=True):
        assert one["prediction"] == other["prediction"]
        assert one["probability"] != other["probability"]
        assert sum(float(other[f"p_{name}"]) for name in NAMES) == pytest.approx(
            1, abs=SUM
        )


def test_a_frozen_method_rejects_by_the_limit_that_it_learned(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    words = (photos, "--method", "tent", "--state", tmp_path / "state")
    predict(*words)
    result, _ = predict(*words, "--reject", "0.5", "--frozen")
    assert result.refuses("the state was saved without --reject")
    predict(*words, "--reject", "0.5")
    result, rows = predict(*words, "--reject", "0.5", "--frozen")
    assert result.code == 0 and {row["rejected"] for row in rows} <= {"true", "false"}


def test_the_last_lines_show_the_figures_of_a_method(
    predict: Any, photos: Path
) -> None:
    result, rows = predict(photos, "--method", "domain_norm,tda", "--probabilities")
    assert {"domain_norm_prediction", "tda_probability", "tda_p_cat"} <= set(rows[0])
    assert "domain_norm without labels: 1 domain" in result.text
    assert (
        "only labels can tell" in result.text
        and "tda without labels" not in result.text
    )
    result, _ = predict(photos, "--method", "domain_norm,tda", "--json")
    ((name, figures),) = json.loads(result.stdout)["health"].items()
    assert name == "domain_norm" and 0 < figures["confidence"] <= 1


def test_domains_of_a_state_go_on_with_other_classes_and_caches_do_not(
    predict: Any, photos: Path, tmp_path: Path
) -> None:
    words = (photos / "image0.png", "--state", tmp_path / "state", "--method", "tda")
    first, _ = predict(*words)
    assert (
        first.code == 0
        and f"pass --state {tmp_path / 'state'} to continue" in first.text
    )
    predict(*words)
    assert read_header(tmp_path / "state")["notes"] == {"images": 2}
    result, _ = predict(*words, classes="cat,frog")
    assert result.refuses("another class list")
    assert "tda learns about its classes only" in result.text
    state = tmp_path / "state.safetensors"
    predict(photos, "--state", state, "--method", "domain_norm")
    learned = load_file(state)["memory.domains.0.key.mean"]
    words = (photos / "image0.png", "--state", state, "--method", "domain_norm")
    result, rows = predict(*words, classes="cat,frog")
    assert "another class list: what was learned about the images stays" in result.text
    assert (
        "was of another class list: what was learned about the images stays"
        in result.text
    )
    assert result.code == 0 and rows[0]["prediction"] in ("cat", "frog")
    after = load_file(state)
    assert learned.any() and after["memory.domains.0.counts.images"] == 1
    assert after["memory.domains.0.key.images"] == 1 + len(list(photos.rglob("*.png")))


def test_an_interrupted_run_says_how_to_continue(
    predict: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ZeroShot._predict
    calls = []

    def fail_at_the_second(self: Any, batch: Any) -> Any:
        calls.append(len(batch))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return plain(self, batch)

    monkeypatch.setattr("cliquetta.inference.parts.PART_ROWS", 2)
    monkeypatch.setattr(ZeroShot, "_predict", fail_at_the_second)
    result, rows = predict(photos, "--batch-size", "2")
    assert result.code == 1 and rows == []
    assert "No space left" in result.text and "finished parts are in" in result.text
    result, rows = predict(photos, "--batch-size", "2")
    assert result.code == 0 and len(rows) == 6
    assert (
        "6 images in" in result.text
        and "2 of them before it was continued" in result.text
    )
    calls[:] = [2]  # stopped before a part is finished: none is named
    result, _ = predict(photos, "--batch-size", "3")
    assert result.code == 1 and "finished parts are in" not in result.text


def test_standard_input_and_output(predict: Any, photos: Path) -> None:
    for separator in (b"\n", b"\0"):
        names = separator.join(str(photos / f"image{i}.png").encode() for i in (3, 1))
        result, _ = predict("-", "--out", "-", "--quiet", input=names)
        rows = list(csv.DictReader(result.stdout.splitlines()))
        assert [Path(row["path"]).name for row in rows] == ["image3.png", "image1.png"]
    result, _ = predict(photos, "--out", "-", "--format", "jsonl", "--shard", "1/2")
    assert result.stdout == ""  # one batch cannot be shared
    result, _ = predict(photos, "--out", "-", "--format", "jsonl", "--shard", "2/2")
    assert [json.loads(line)["error"] for line in result.stdout.splitlines()] == [
        None
    ] * 6


def test_unreadable_images_are_named_and_skipped(predict: Any, photos: Path) -> None:
    intact = (photos / "image0.png").read_bytes()
    (photos / "bad_corrupt.png").write_bytes(intact[:60] + b"\0" * 200 + intact[260:])
    (photos / "bad_empty.jpg").write_bytes(b"")
    result, table = predict(photos, "--batch-size", "3")
    rows = {Path(row["path"]).name: row for row in table if row["error"]}
    assert rows.keys() == {"bad_corrupt.png", "bad_empty.jpg"} and len(table) == 8
    assert not any(row["prediction"] for row in rows.values())
    assert result.code == 3 and "2 images could not be read" in result.stderr
    assert "bad_empty.jpg" in "".join(result.stderr.split())
    quiet, _ = predict(photos, "--quiet")
    assert (quiet.code, quiet.stdout, quiet.stderr) == (3, "", "")
    result, (row,) = predict(photos / "bad_empty.jpg")
    assert (
        result.refuses("nothing could be predicted") and row["error"] == "an empty file"
    )


def test_a_fitted_file_replaces_a_method(
    predict: Any, photos: Path, fitted: Path
) -> None:
    _, plain = predict(photos)
    result, rows = predict(photos, "--fitted", fitted)
    assert result.code == 0
    assert [r["probability"] for r in rows] != [r["probability"] for r in plain]
    other, _ = predict(photos, "--fitted", fitted, "--method", "coop")
    assert other.refuses("fitted for tip_adapter")
    assert predict(photos, "--fitted", fitted, "--set", "alpha=2")[0].refuses(
        "leave out"
    )
