"""``cliquetta demo``: what it runs, and what it says in words."""

import json
import statistics
from pathlib import Path
from typing import Any

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
from cliquetta.evaluation.record import Record
from cliquetta.report.changes import Changes
from cliquetta.significance import PairedTest
from tests._helpers.made_runs import predictions
from tests._helpers.running import Run
from tests._helpers.tolerance import LOGIT


def stream(**classes: list[int]) -> DemoStream:
    """Predictions by method, of images whose labels are all 0."""
    records = [Record("run", {"method": m}, metrics={"top1": 76.5}) for m in classes]
    made = [predictions([0] * len(some), some) for some in classes.values()]
    return DemoStream("jpeg_compression:3", (), records, made)


def test_change_counts_by_hand() -> None:
    # stays right, repaired, broken, sideways, stays wrong
    both = stream(zero_shot=[0, 1, 0, 1, 2], scap=[0, 0, 3, 2, 2], tent=[0, 0, 0, 0, 2])
    scap: dict[str, Any] = {
        "images": 5,
        "changed": 3,
        "repaired": 1,
        "broken": 1,
        "gain": 0.0,
        "p": 1.0,
    }
    tent: dict[str, Any] = {
        "images": 5,
        "changed": 2,
        "repaired": 2,
        "broken": 0,
        "gain": 40.0,
        "p": 0.5,
    }
    # 1.96 standard deviations of the differences, over the root of five images
    for entry, differences in ((scap, [1, -1, 0, 0, 0]), (tent, [1, 1, 0, 0, 0])):
        deviation = 100 * statistics.pstdev(differences)
        entry["half_width"] = pytest.approx(1.959964 * deviation / 5**0.5)
    assert count_tests([both]) == [
        {"method": "scap", **scap},
        {"method": "tent", **tent},
    ]
    assert count_tests([stream(zero_shot=[0, 1])]) == []  # zero-shot alone
    plain = [1] * 1231 + [0] * 769
    after = [0] * 1000 + [1] * 462 + [0] * 538
    row = tabulate([stream(zero_shot=plain, domain_norm=after)])[1][0]
    assert row[3:] == ["+38.45", "1000", "231"]
    row = tabulate([stream(zero_shot=plain, scap=after, domain_norm=[1] * 2000)])[1][0]
    assert row[2:] == ["76.50", "+38.45", "76.50", "-38.45"]
    assert read_methods("tent, zero_shot,scap") == ["tent", "scap"]


def test_summary_is_plain_about_what_changed() -> None:
    def changes(changed: int, repaired: int, broken: int, p: float) -> Changes:
        return Changes(100, 100, changed, PairedTest(100, repaired, broken, p))

    both = {"scap": changes(0, 0, 0, 1.0), "tent": changes(40, 5, 30, 1e-5)}
    assert summary(both, 40) == [
        "Of 100 shifted images, zero_shot gets 40.00 % right, scap 40.00 % and tent 15.00 %.",
        "scap changed none of 100 predictions.",
        "tent changed 40 of 100 predictions: 5 from wrong to right, 30 from right to wrong, "
        "5 otherwise. That is a loss of 25.00 points (p = 1e-05).",
    ]


def test_demo_compares_and_records(run: Run, tmp_path: Path) -> None:
    """Shifted, clean and single images, then SCAP as printed; each in a table of its own."""
    words = ["--images", "12", "--batch-size", "6", "--shifts", "fog:3,clean"]
    words += ["--method", "tent,domain_norm", "--singles", "3", "--scap", "16"]
    result = run("demo", "--out", tmp_path / "demo", *words)
    assert result.code == 0
    for images in ("12 shifted", "12 clean", "3 shifted"):
        assert result.text.count(f"Of {images} images, zero_shot gets") == 1
    curve = result.stdout.split("Accuracy over the stream\n")[1].splitlines()[1:3]
    assert [line.split()[0] for line in curve] == ["6", "12"]
    assert "tent changed" in result.text and "domain_norm changed" in result.text
    last = result.text.partition("SCAP as printed, on frost:3")[2]
    for words_of_scap in (
        "scap found",
        "move",
        "retained prompt",
        "Accuracy: zero_shot",
        "Expect",
    ):
        assert words_of_scap in last, words_of_scap
    page = (tmp_path / "demo/report.html").read_text(encoding="utf-8")
    assert (
        "Inside scap" in page
        and "<h3>Cliques</h3>" in page
        and "<h3>Attention</h3>" in page
    )
    written = {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("demo/*/record.json")
    }
    assert (
        len(written) == 6 + 2 + 2
    )  # singly with one method, SCAP with zero-shot beside it
    assert f"Records: 10 runs in {tmp_path / 'demo'}" in result.text
    shown = json.loads(run("demo", "--out", tmp_path / "demo", "--json", *words).stdout)
    assert {
        path: path.stat().st_mtime_ns for path in written
    } == written  # none is run again
    rows = [
        (e["shift"], e["batch_size"], [r["method"] for r in e["runs"]]) for e in shown
    ]
    both = ["zero_shot", "tent", "domain_norm"]
    assert rows == [
        *(("fog:3", 6, both), ("clean", 6, both), ("fog:3, singly", 1, both[:2])),
        ("frost:3", 6, ["zero_shot", "scap"]),
    ]
    assert [entry["change"][0]["images"] for entry in shown] == [12, 12, 3, 16]
    assert shown[-1]["scap"]["cliques"] > 0 and shown[0]["scap"] is None
    for entry in shown:
        plain, *adapted = entry["runs"]
        for run_, change in zip(adapted, entry["change"], strict=True):
            assert change["method"] == run_["method"]
            gain = 100 * (change["repaired"] - change["broken"]) / change["images"]
            assert run_["top1"] - plain["top1"] == pytest.approx(gain, abs=LOGIT)


@pytest.mark.parametrize(
    ("repaired", "broken", "words"), [(20, 2, "a gain of"), (3, 1, "chance")]
)
def test_demo_states_a_gain_only_where_chance_would_not_give_it(
    repaired: int, broken: int, words: str
) -> None:
    before = [1] * repaired + [0] * (100 - repaired)
    row = stream(
        zero_shot=before, a=[0] * repaired + [1] * broken + before[repaired + broken :]
    )
    p = scipy.stats.binomtest(broken, repaired + broken).pvalue  # McNemar's exact test
    assert (p < SIGNIFICANT) == (words == "a gain of")
    assert tabulate([row])[1][0][3] == (
        f"+{repaired - broken}.00" if p < SIGNIFICANT else "none"
    )
    assert words in summary(count_by_method([row]), 100 - repaired)[1]
