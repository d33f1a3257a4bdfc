"""``cliquetta evaluate`` and ``cliquetta demo``: records, tables, and what they say in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from cliquetta.cli.demo import (
    SIGNIFICANT,
    DemoStream,
    count_by_method,
    count_tests,
    read_methods,
    summary,
    tabulate,
)
from cliquetta.evaluation.predictions import PairedTest, Predictions, load_predictions
from cliquetta.evaluation.record import Record, load_record
from cliquetta.report.changes import Changes
from tests._helpers.running import Run
from tests._helpers.tolerance import LOGIT
from tests._helpers.trees import picture


@pytest.fixture
def evaluate(run: Run, tiny_file: Path, tmp_path: Path) -> Any:
    """``evaluate`` with the tiny model on 40 bundled images."""

    def call(*words: str | Path, method: str = "zero_shot", dataset: str = "bundled@fog:3") -> Any:
        given = ("--dataset", dataset, "--method", method, "--model", tiny_file, "--limit", "40")
        return run("evaluate", *given, "--batch-size", "16", "--out", tmp_path / "runs", *words)

    return call


def test_one_record_per_cell_of_the_grid(evaluate: Any, tmp_path: Path) -> None:
    answer = evaluate("--seeds", "0,1", "--json", method="tent", dataset="bundled,bundled@fog:3")
    assert answer.code == 0
    runs = json.loads(answer.stdout)
    cells = [(run["dataset"], run["method"], run["seed"]) for run in runs]
    assert cells == [
        (dataset, method, seed)
        for dataset in ("bundled", "bundled@fog:3")
        for method in ("zero_shot", "tent")
        for seed in (0, 1)
    ]
    for run in runs:
        folder = Path(run["record"]).parent
        record, predictions = load_record(folder), load_predictions(folder)
        assert record.status == "finished" and record.images == run["images"] == 40
        assert run["metrics"]["top1"] == pytest.approx(100 * predictions.correct.mean())


def test_table_shows_mean_spread_and_gain(evaluate: Any) -> None:
    runs = json.loads(evaluate("--seeds", "0,1", "--json", method="tent").stdout)
    top1 = {(run["method"], run["seed"]): run["metrics"]["top1"] for run in runs}
    answer = evaluate("--seeds", "0,1", method="tent")
    plain = [top1["zero_shot", seed] for seed in (0, 1)]
    tent = [top1["tent", seed] for seed in (0, 1)]
    assert f"{np.mean(plain):.2f} ± {np.std(plain, ddof=1):.2f}" in answer.text
    assert f"{np.mean(tent) - np.mean(plain):+.2f}" in answer.text
    assert "4 runs recorded" in answer.text


def test_protocols_have_words_and_metrics_of_their_own(evaluate: Any, tmp_path: Path) -> None:
    picture(tmp_path / "junk" / "a.png")
    (run,) = json.loads(evaluate("--unknown", f"folder:{tmp_path / 'junk'}", "--json").stdout)
    assert run["images"] == 41 and run["metrics"]["outside"] == 1
    words = ("--classes", "cat,dog,frog", "--unknown", "bundled@fog:3")
    (run,) = json.loads(evaluate(*words, "--json").stdout)
    assert run["images"] == 80 and run["metrics"]["labelled"] == run["metrics"]["outside"] == 40
    table = evaluate(*words).text
    assert "AUROC" in table and "FPR95" in table and f"{run['metrics']['fpr95']:.2f}" in table
    tail = evaluate("--order", "long-tail", "--imbalance", "20")
    assert tail.code == 0 and "macro-F1" in tail.text
    (batches,) = json.loads(evaluate("--order", "keff", "--present", "1-4", "--json").stdout)
    assert batches["images"] == 32  # whole batches only
    wrong = evaluate("--order", "keff", "--present", "11")
    assert wrong.code == 2 and "classes, not of 11" in wrong.text


def test_finished_runs_are_not_repeated(evaluate: Any, tmp_path: Path) -> None:
    evaluate()
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("*/record.json"))
    before = (folder / "record.json").stat().st_mtime_ns
    assert evaluate().code == 0
    assert (folder / "record.json").stat().st_mtime_ns == before


def test_baseline_can_be_left_out(evaluate: Any) -> None:
    runs = json.loads(evaluate("--no-baseline", "--json", method="tent").stdout)
    assert [run["method"] for run in runs] == ["tent"]


def test_settings_reach_the_one_method(evaluate: Any) -> None:
    runs = json.loads(evaluate("--set", "temperature=2", "--json").stdout)
    record = load_record(Path(runs[0]["record"]).parent)
    assert record.settings["config"] == {"temperature": 2.0}
    answer = evaluate("--set", "temperature=2", method="zero_shot,tent")
    assert answer.code == 2 and "for one method" in answer.text


def test_fitted_file_is_evaluated(run: Run, tiny_file: Path, tmp_path: Path) -> None:
    fitted = tmp_path / "tip.safetensors"
    run(
        *("fit", "--method", "tip_adapter", "--dataset", "bundled-fewshot", "--shots", "2"),
        *("--model", tiny_file, "--out", fitted),
    )
    answer = run(
        *("evaluate", "--dataset", "bundled", "--fitted", fitted, "--model", tiny_file),
        *("--limit", "20", "--out", tmp_path / "runs", "--json"),
    )
    assert answer.code == 0
    assert [run["method"] for run in json.loads(answer.stdout)] == ["zero_shot", "tip_adapter"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--seeds", "one"), "whole numbers"),
        (("--order", "sorted"), "unknown order 'sorted'"),
        (("--dataset", "bundeld"), "did you mean 'bundled'"),
        (("--dataset", "pets"), "--root"),
        (("--method", "tend"), "did you mean 'tent'"),
        (("--method", "tent:best"), "preset of tent"),
        (("--dataset", ","), "no datasets given"),
    ],
)
def test_bad_grids_are_refused_before_the_first_run(
    evaluate: Any, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    answer = evaluate(*words)
    assert answer.code == 2
    assert sentence in answer.text and "Traceback" not in answer.text
    assert not (tmp_path / "runs").exists()


def test_unreadable_images_of_a_folder_are_counted(
    run: Run, photos: Path, tiny_file: Path, tmp_path: Path
) -> None:
    for path in list(photos.glob("*.png")):
        (photos / "few").mkdir(exist_ok=True)
        path.rename(photos / "few" / path.name)
    (photos / "more" / "bad.jpg").write_bytes(b"")
    answer = run(
        *("evaluate", "--dataset", f"folder:{photos}", "--model", tiny_file),
        *("--out", tmp_path / "runs"),
    )
    assert answer.code == 3
    assert "1 image could not be read" in answer.text


def test_a_cell_that_fails_does_not_stop_the_others(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cliquetta.methods.tent import Tent

    def fail(self: Tent, batch: Any) -> None:
        raise RuntimeError("a broken method")

    monkeypatch.setattr(Tent, "_predict", fail)
    answer = evaluate("--json", method="tent,zero_shot")
    runs = {run["method"]: run for run in json.loads(answer.stdout)}
    assert answer.code == 1
    assert "a broken method" in runs["tent"]["error"]
    assert runs["zero_shot"]["images"] == 40


def predictions(*classes: int) -> Predictions:
    labels = np.zeros(len(classes), dtype=np.int64)
    shown = np.array(classes, dtype=np.int64)[:, None]
    keys = tuple(map(str, range(len(classes))))
    return Predictions(keys, labels, shown, np.ones(shown.shape, dtype=np.float32))


def test_change_counts_by_hand() -> None:
    # labels are all 0:   stays right, repaired, broken, sideways, stays wrong
    before = predictions(0, 1, 0, 1, 2)
    after, best = predictions(0, 0, 3, 2, 2), predictions(0, 0, 0, 0, 2)
    records = tuple(Record("run", {"method": m}) for m in ("zero_shot", "scap", "tent"))
    scap = {"images": 5, "changed": 3, "repaired": 1, "broken": 1, "gain": 0.0, "p": 1.0}
    tent = {"images": 5, "changed": 2, "repaired": 2, "broken": 0, "gain": 40.0, "p": 0.5}
    assert count_tests([DemoStream("fog:3", (), records, (before, after, best))]) == [
        {"method": "scap", **scap},
        {"method": "tent", **tent},
    ]
    assert count_tests([DemoStream("fog:3", (), records[:1], (before,))]) == []


def test_summary_is_plain_about_what_changed() -> None:
    def changes(images: int, changed: int, repaired: int, broken: int, p: float) -> Changes:
        return Changes(images, images, changed, PairedTest(images, repaired, broken, p))

    def said(images: int, *counts: float) -> str:
        return " ".join(summary({"scap": changes(images, *counts)}, 4 * images // 10))  # type: ignore[arg-type]

    nothing = said(100, 0, 0, 0, 1.0)
    assert "40.00 % right and scap 40.00 %" in nothing and "changed none of 100 pre" in nothing
    small = said(100, 10, 4, 3, 1.0)
    assert "scap 41.00 %" in small and "may be chance (p = 1)" in small
    assert said(1000, 100, 10, 80, 1e-9).endswith("a loss of 7.00 points (p = 1e-09).")
    both = {"scap": changes(100, 0, 0, 0, 1.0), "tent": changes(100, 40, 5, 30, 1e-5)}
    assert summary(both, 40) == [
        "Of 100 shifted images, zero_shot gets 40.00 % right, scap 40.00 % and tent 15.00 %.",
        "scap changed none of 100 predictions.",
        "tent changed 40 of 100 predictions: 5 from wrong to right, 30 from right to wrong, "
        "5 otherwise. That is a loss of 25.00 points (p = 1e-05).",
    ]


def test_demo_compares_and_records(run: Run, tmp_path: Path) -> None:
    """Shifted, clean and single images, then SCAP as printed; each in a table of its own."""
    words = ["--images", "12", "--batch-size", "6", "--shifts", "fog:3,clean"]
    words += ["--method", "tent,domain_norm", "--singles", "3", "--scap", "6"]
    answer = run("demo", "--out", tmp_path / "demo", *words)
    assert answer.code == 0
    for images in ("12 shifted", "12 clean", "3 shifted", "6 shifted"):
        assert answer.text.count(f"Of {images} images, zero_shot gets") == 1
    curve = answer.stdout.split("Accuracy over the stream\n")[1].splitlines()[1:3]
    assert [line.split()[0] for line in curve] == ["6", "12"]
    assert "tent changed" in answer.text and "domain_norm changed" in answer.text
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("demo/*/record.json")}
    assert len(written) == 6 + 2 + 2  # singly with one method, SCAP with zero-shot beside it
    assert f"Records: 10 runs in {tmp_path / 'demo'}" in answer.text
    shown = json.loads(run("demo", "--out", tmp_path / "demo", "--json", *words).stdout)
    assert {path: path.stat().st_mtime_ns for path in written} == written  # none is run again
    found = [(e["shift"], e["batch_size"], [r["method"] for r in e["runs"]]) for e in shown]
    both = ["zero_shot", "tent", "domain_norm"]
    assert found == [
        *(("fog:3", 6, both), ("clean", 6, both), ("fog:3, singly", 1, both[:2])),
        ("fog:3", 6, ["zero_shot", "scap"]),
    ]
    assert [entry["change"][0]["images"] for entry in shown] == [12, 12, 3, 6]
    for entry in shown:
        assert [change["method"] for change in entry["change"]] == [
            run["method"] for run in entry["runs"][1:]
        ]
        plain, *adapted = (run["top1"] for run in entry["runs"])
        for top1, change in zip(adapted, entry["change"], strict=True):
            gain = 100 * (change["repaired"] - change["broken"]) / change["images"]
            assert top1 - plain == pytest.approx(gain, abs=LOGIT)


@pytest.mark.parametrize(("repaired", "broken", "said"), [(20, 2, "a gain of"), (3, 1, "chance")])
def test_demo_states_a_gain_only_where_chance_would_not_give_it(
    repaired: int, broken: int, said: str
) -> None:
    before = predictions(*[1] * repaired, *[0] * (100 - repaired))
    after = predictions(*[0] * repaired, *[1] * broken, *[0] * (100 - repaired - broken))
    records = tuple(Record("run", {"method": m}, metrics={"top1": 0.0}) for m in ("zero_shot", "a"))
    stream = DemoStream("fog:3", (), records, (before, after))
    p = scipy.stats.binomtest(broken, repaired + broken).pvalue  # McNemar's exact test
    assert (p < SIGNIFICANT) == (said == "a gain of")
    assert tabulate([stream])[1][0][3] == (
        f"+{repaired - broken}.00" if p < SIGNIFICANT else "none"
    )
    assert said in summary(count_by_method([stream]), 100 - repaired)[1]


def test_demo_of_zero_shot_alone(run: Run, tmp_path: Path) -> None:
    words = ("--images", "6", "--singles", "0", "--shifts", "fog:3", "--out", tmp_path / "demo")
    (entry,) = json.loads(run("demo", "--method", "zero_shot", *words, "--json").stdout)
    assert entry["change"] == [] and len(entry["runs"]) == 1


def test_methods_of_the_demo() -> None:
    assert read_methods("scap, domain_norm") == ["scap", "domain_norm"]
    assert read_methods("zero_shot") == []
    assert read_methods("tent,zero_shot,scap") == ["tent", "scap"]


def test_demo_table_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from cliquetta.cli.console import Terminal

    def shown(*methods: str) -> list[str]:
        names = ("zero_shot", *methods)
        records = tuple(Record("run", {"method": m}, metrics={"top1": 76.5}) for m in names)
        seen = (before, after, worse)[: len(names)]
        columns, (row,) = tabulate([DemoStream("jpeg_compression:3", (), records, seen)])
        Terminal(out=Console(width=80)).table(columns, [row], right=columns[1:])
        lines = capsys.readouterr().out.splitlines()
        # of the long name the end may stand on a line of its own, of numbers nothing
        assert any(all(cell in line for cell in row[1:]) for line in lines)
        return row

    before = predictions(*[1] * 1231, *[0] * 769)
    after, worse = predictions(*[0] * 1000, *[1] * 462, *[0] * 538), predictions(*[1] * 2000)
    assert shown("scap")[3:] == ["+38.45", "1000", "231"]
    assert shown("domain_norm")[3:] == ["+38.45", "1000", "231"]
    assert shown("scap", "domain_norm")[2:] == ["76.50", "+38.45", "76.50", "-38.45"]


def test_a_grid_that_is_not_there_names_those_that_are(run: Run) -> None:
    answer = run("evaluate", "--grid", "odd")
    assert answer.code == 2 and "did you mean 'ood'" in answer.text
