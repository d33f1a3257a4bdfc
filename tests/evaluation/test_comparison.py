"""Tables of runs: refusals, means, pairs, marks, and a test that agrees with scipy."""

from __future__ import annotations

import csv
import io
import itertools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from cliquetta.errors import UnknownNameError
from cliquetta.evaluation import paired
from cliquetta.evaluation import sweep as sweeping
from cliquetta.evaluation.comparison import (
    SEVERAL_SETTINGS,
    TUNED_BY_AUTHORS,
    IncomparableError,
    compare,
    worst_tenth,
)
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.paired import paired_test, sign_flip_p
from cliquetta.evaluation.predictions import Predictions
from cliquetta.evaluation.record import RECORD, Run, find_runs, load_record
from cliquetta.evaluation.sweep import RunContext, sweep
from cliquetta.evaluation.tables import TextTable, to_csv, to_latex, to_markdown
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tolerance import DOUBLE, SUM

BASE = RunSpec("bundled", "zero_shot", model="tiny", limit=30, batch_size=10)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run specs with the tiny model; gives the runs back."""
    monkeypatch.setattr(sweeping, "create_model", lambda name, **_: build_tiny_clip(len(name)))

    def make(*specs: RunSpec) -> list[Run]:
        results = sweep(specs, RunContext(tmp_path))
        assert not [result.error for result in results if result.error]
        return find_runs([tmp_path])[0]

    return make


def spec(method: str = "zero_shot", **changes: Any) -> RunSpec:
    return RunSpec(**{**vars(BASE), "method": method, **changes})


# --- the paired test ---------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 60))
def test_one_seed_is_mcnemars_exact_test(repaired: int, broken: int) -> None:
    differences = np.array([1] * repaired + [-1] * broken + [0] * 5)
    expected = binomtest(repaired, repaired + broken).pvalue if repaired + broken else 1.0
    assert sign_flip_p(differences) == pytest.approx(expected, rel=DOUBLE)


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_several_seeds_count_every_sign_pattern(differences: list[int]) -> None:
    values = np.array(differences, dtype=np.int64)
    sums = [
        abs(sum(s * v for s, v in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    expected = statistics.mean(total >= abs(sum(differences)) for total in sums)
    assert sign_flip_p(values) == pytest.approx(expected)


def test_many_images_are_approximated(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([1] * 2560 + [-1] * 2440 + [2] * 300 + [-2] * 250)
    exact = sign_flip_p(values)
    monkeypatch.setattr(paired, "EXACT", 10)
    assert 0.0005 < exact < 0.05
    assert sign_flip_p(values) == pytest.approx(exact, rel=0.01)


def answers(right: dict[str, bool], unknown: tuple[str, ...] = ()) -> Predictions:
    keys = (*right, *unknown)
    labels = np.array([0] * len(right) + [-1] * len(unknown))
    classes = np.array([[0 if good else 1] for good in right.values()] + [[0]] * len(unknown))
    return Predictions(keys, labels, classes, np.ones((len(keys), 1), dtype=np.float32))


def test_answers_are_paired_by_image_not_by_place() -> None:
    before = answers({"a": True, "b": False, "c": False}, unknown=("d",))
    after = answers({"c": True, "b": True, "a": True}, unknown=("d",))
    test = paired_test([(before, after)])
    assert (test.images, test.repaired, test.broken) == (3, 2, 0)
    assert test.p == pytest.approx(0.5)  # two discordant pairs on one side
    twice = paired_test([(before, after), (before, before)])
    assert (twice.images, twice.repaired) == (3, 2)
    with pytest.raises(ValueError, match="same images"):
        paired_test([(before, answers({"a": True, "b": False}))])


# --- tables of runs ----------------------------------------------------------------------------


def test_cells_hold_mean_spread_and_gain_over_seeds(made: Any) -> None:
    runs = made(*(spec(m, seed=s) for m in ("tda", "zero_shot") for s in (0, 1, 2)))
    table = compare(runs)
    assert table.rows == ("zero_shot", "tda")  # the baseline comes first
    plain, tda = table.cells["zero_shot", "bundled"], table.cells["tda", "bundled"]
    top1 = {(r.record.method, r.record.seed): r.record.metrics["top1"] for r in runs}
    own = [top1["tda", s] for s in (0, 1, 2)]
    assert tda.mean == pytest.approx(np.mean(own))
    assert tda.sd == pytest.approx(np.std(own, ddof=1))
    assert tda.gain == pytest.approx(
        np.mean([top1["tda", s] - top1["zero_shot", s] for s in range(3)])
    )
    assert plain.test is None and plain.gain is None
    assert tda.test is not None
    assert 100 * (tda.test.repaired - tda.test.broken) / 90 == pytest.approx(
        tda.gain, abs=100 * SUM
    )


def test_averages_say_over_how_many_columns(made: Any) -> None:
    runs = made(spec(), spec(dataset="bundled@fog:2"), spec("tda"))
    table = compare(runs)
    assert set(table.columns) == {"bundled", "bundled@fog:2"}
    means = [table.cells["zero_shot", column].mean for column in table.columns]
    assert table.overall("zero_shot").mean == pytest.approx(np.mean(means))  # type: ignore[arg-type]
    assert len(table.overall("tda").columns) < len(table.columns)


@pytest.mark.parametrize(
    ("changes", "aspect"),
    [
        ({"templates": ("a {}.",)}, "templates"),
        ({"limit": 20}, "images"),
        ({"order": "sequential"}, "images"),
    ],
)
def test_unlike_runs_are_not_put_into_one_column(made: Any, changes: Any, aspect: str) -> None:
    runs = made(spec(), spec("tda", **changes))
    with pytest.raises(IncomparableError, match=f"different {aspect} do not belong") as error:
        compare(runs)
    assert all(run.record.id in str(error.value) for run in runs)
    apart = compare(runs, split=True)
    assert set(apart.columns) == {"bundled #1", "bundled #2"}
    assert all(cell.test is None for cell in apart.cells.values())


@pytest.mark.parametrize(
    ("section", "aspect"), [("preprocessing", "preprocessing"), ("prompts", "class names")]
)
def test_hashes_of_records_decide(made: Any, section: str, aspect: str) -> None:
    first, other = made(spec(), spec("tda"))
    key = "fingerprint" if section == "preprocessing" else "names"
    changed = {**other.record.settings[section], key: "another"}
    settings = {**other.record.settings, section: changed}
    other = Run(type(other.record)(other.record.id, settings, "finished"), other.folder)
    with pytest.raises(IncomparableError, match=aspect):
        compare([first, other])


def test_rows_say_what_tells_them_apart(made: Any) -> None:
    tda = [spec("tda", options=(("positive_alpha", a),)) for a in (1.0, 3.0)]
    table = compare(made(spec(), *tda, spec("tent", batch_size=15)))
    assert set(table.rows) == {
        "zero_shot batch_size=10",
        "tda positive_alpha=1 batch_size=10",
        "tda positive_alpha=3 batch_size=10",
        "tent batch_size=15",
    }
    marked = {row for (row, _), cell in table.cells.items() if SEVERAL_SETTINGS in cell.marks}
    assert marked == {row for row in table.rows if row.startswith("tda")}
    assert table.cells["tent batch_size=15", "bundled"].test is not None


def test_presets_of_authors_are_marked(made: Any) -> None:
    table = compare(made(spec(), spec("tda", preset="pets")))
    assert table.cells["tda:pets", "bundled"].marks == TUNED_BY_AUTHORS
    assert table.marks == TUNED_BY_AUTHORS


def test_models_are_tested_against_their_own_baseline(made: Any) -> None:
    runs = made(spec(), spec("tda", model="other"))
    table = compare(runs)
    assert all(cell.test is None for cell in table.cells.values())


def test_another_baseline_and_metric(made: Any) -> None:
    runs = made(spec(), spec("tda"))
    table = compare(runs, baseline="tda", metric="nll")
    assert table.rows[0] == "tda"
    nll = {run.record.method: run.record.metrics["nll"] for run in runs}
    assert table.cells["zero_shot", "bundled"].gain == pytest.approx(nll["zero_shot"] - nll["tda"])
    with pytest.raises(UnknownNameError, match="did you mean 'top1'"):
        compare(runs, metric="top-1")


def test_protocols_are_columns_and_words_of_a_row(made: Any) -> None:
    mixed = {"classes": ("cat", "dog", "frog"), "unknown": "bundled"}
    keff = {"dataset": "bundled@fog:3", "order": "keff", "present": (1, 2)}
    runs = made(*(spec(name, **more) for name in ("zero_shot", "tda") for more in (mixed, keff)))
    table = compare(runs, metric="fpr95")
    assert set(table.columns) == {"bundled with unknown bundled", "bundled@fog:3"}
    assert "tda order=keff present=1+2" in table.rows
    row = table.overall("tda order=shuffled")
    rates = {run.record.method: run.record.metrics.get("fpr95") for run in runs[:4]}
    assert row.gain == pytest.approx((rates["tda"] or 0) - (rates["zero_shot"] or 0))
    labels = {run.row: run.predictions.labels for run in runs if "unknown" in run.record.dataset}
    for found in labels.values():
        assert (found == -2).sum() == (found >= 0).sum() == 30 and found.max() == 2


def test_the_worst_tenth_of_many_draws() -> None:
    assert worst_tenth([1.0] * 9) is None
    draws = [float(value) for value in range(20)]
    assert worst_tenth(draws[::-1]) == 0.5 and worst_tenth(draws, lowest=False) == 18.5
    assert worst_tenth(draws[:11]) == 0.5  # a tenth is rounded up


def test_runs_are_found_once_and_unfinished_ones_apart(made: Any, tmp_path: Path) -> None:
    (run,) = made(spec())
    for path in (tmp_path, run.folder, run.folder / RECORD):
        assert [r.record.id for r in find_runs([path, run.folder])[0]] == [run.record.id]
    text = (run.folder / RECORD).read_text().replace('"finished"', '"running"', 1)
    (run.folder / RECORD).write_text(text)
    assert load_record(run.folder).status == "running"
    finished, unfinished = find_runs([tmp_path])
    assert finished == [] and len(unfinished) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no runs in"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(ValueError, match="no such folder"):
        find_runs([tmp_path / "nowhere"])


# --- text --------------------------------------------------------------------------------------


def test_tables_as_text() -> None:
    table = TextTable(("method", "a|b"), (("zero_shot", "83.5 ± 0.4▲"),), title="top-1 %")
    assert to_markdown(table).splitlines() == [
        "**top-1 %**",
        "",
        "| method | a\\|b |",
        "| --- | ---: |",
        "| zero_shot | 83.5 ± 0.4▲ |",
    ]
    latex = to_latex(table)
    assert r"zero\_shot & 83.5 $\pm$ 0.4$\blacktriangle$ \\" in latex
    assert r"\begin{tabular}{lr}" in latex
    rows = [["x,y", None, 1.5]]
    assert list(csv.reader(io.StringIO(to_csv(["a", "b", "c"], rows)))) == [
        ["a", "b", "c"],
        ["x,y", "", "1.5"],
    ]
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        TextTable(("a", "b"), (("x",),))


def test_differences_need_not_be_whole_numbers() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0]) == pytest.approx(2 / 8)
    assert sign_flip_p([3.0, -1.0, 1.0]) == pytest.approx(6 / 8)  # of |±3±1±1| two are 1
    assert sign_flip_p([0.0, 0.0]) == 1.0
    values = np.random.default_rng(0).normal(0.4, 1.0, 12)
    flips = 1 - 2 * ((np.arange(2**12)[:, None] >> np.arange(12)) & 1)
    exact = np.mean(np.abs(flips @ values) >= abs(values.sum()) - 1e-12)
    assert sign_flip_p(values) == pytest.approx(exact, rel=0.02)
