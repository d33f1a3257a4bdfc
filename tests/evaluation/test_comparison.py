"""Tables of runs: refusals, means, pairs, marks, and a test that agrees with scipy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cliquetta.cli.compare import footnotes, overall_table, paired_table
from cliquetta.errors import UnknownNameError
from cliquetta.evaluation.comparison import (
    SEVERAL_SETTINGS,
    TUNED_BY_AUTHORS,
    IncomparableError,
    compare,
    worst_tenth,
)
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.record import Run
from tests._helpers.made_runs import BASE
from tests._helpers.tolerance import SUM


def spec(method: str = "zero_shot", **changes: Any) -> RunSpec:
    return replace(BASE, method=method, **changes)


def test_cells_hold_mean_spread_and_gain_over_seeds(made: Any) -> None:
    runs = made(*(spec(m, seed=s) for m in ("tda", "zero_shot") for s in (0, 1, 2)))
    table = compare(runs)
    assert table.rows == ("zero_shot", "tda")  # the baseline comes first
    plain, tda = table.cells["zero_shot", "bundled"], table.cells["tda", "bundled"]
    top1 = {(r.record.method, r.record.seed): r.record.metrics["top1"] for r in runs}
    own = [top1["tda", s] for s in (0, 1, 2)]
    assert tda.mean == pytest.approx(np.mean(own))
    assert tda.sd == pytest.approx(np.std(own, ddof=1))
    gains = [top1["tda", s] - top1["zero_shot", s] for s in range(3)]
    assert tda.gain == pytest.approx(np.mean(gains))
    assert plain.test is None and plain.gain is None
    changed = tda.test.repaired - tda.test.broken
    assert 100 * changed / 90 == pytest.approx(tda.gain, abs=100 * SUM)


def test_averages_say_over_how_many_columns(made: Any) -> None:
    table = compare(made(spec(), spec(dataset="bundled@fog:2"), spec("tda")))
    assert set(table.columns) == {"bundled", "bundled@fog:2"}
    means = [table.cells["zero_shot", column].mean for column in table.columns]
    assert table.overall("zero_shot").mean == pytest.approx(np.mean(means))  # type: ignore[arg-type]
    assert table.overall("tda").columns == ("bundled",)


@pytest.mark.parametrize(
    ("changes", "aspect"),
    [
        ({"templates": ("a {}.",)}, "templates"),
        ({"limit": 20}, "images"),
        ({"order": "sequential"}, "images"),
    ],
)
def test_unlike_runs_are_not_put_into_one_column(
    made: Any, changes: Any, aspect: str
) -> None:
    runs = made(spec(), spec("tda", **changes))
    with pytest.raises(IncomparableError, match=aspect) as error:
        compare(runs)
    assert all(run.record.id in str(error.value) for run in runs)
    apart = compare(runs, split=True)
    assert set(apart.columns) == {"bundled #1", "bundled #2"}
    assert all(cell.test is None for cell in apart.cells.values())


def test_rows_name_the_settings_that_differ(made: Any) -> None:
    tda = [spec("tda", options=(("positive_alpha", a),)) for a in (1.0, 3.0)]
    table = compare(made(spec(), *tda, spec("tent", batch_size=15)))
    assert set(table.rows) == {
        "zero_shot batch_size=10",
        "tda positive_alpha=1 batch_size=10",
        "tda positive_alpha=3 batch_size=10",
        "tent batch_size=15",
    }
    marked = {
        row for (row, _), cell in table.cells.items() if SEVERAL_SETTINGS in cell.marks
    }
    assert marked == {row for row in table.rows if row.startswith("tda")}
    assert table.cells["tent batch_size=15", "bundled"].test is not None


def test_presets_of_authors_are_marked_and_models_have_their_own_baseline(
    made: Any,
) -> None:
    runs = made(spec(), spec("tda", preset="pets"), spec("tent", model="other"))
    table = compare([run for run in runs if run.record.method != "tent"])
    assert table.cells["tda:pets", "bundled"].marks == table.marks == TUNED_BY_AUTHORS
    table = compare([run for run in runs if run.record.method != "tda"])
    assert all(cell.test is None for cell in table.cells.values())


def test_another_baseline_and_metric(made: Any) -> None:
    runs = made(spec(), spec("tda"))
    table = compare(runs, baseline="tda", metric="nll")
    assert table.rows[0] == "tda"
    nll = {run.record.method: run.record.metrics["nll"] for run in runs}
    assert table.cells["zero_shot", "bundled"].gain == pytest.approx(
        nll["zero_shot"] - nll["tda"]
    )
    with pytest.raises(UnknownNameError):
        compare(runs, metric="top-1")


def test_protocols_are_columns_and_words_of_a_row(made: Any) -> None:
    mixed = {"classes": ("cat", "dog", "frog"), "unknown": "bundled"}
    keff = {"dataset": "bundled@fog:3", "order": "keff", "present": (1, 2)}
    runs = made(
        *(spec(name, **more) for name in ("zero_shot", "tda") for more in (mixed, keff))
    )
    table = compare(runs, metric="fpr95")
    assert set(table.columns) == {"bundled with unknown bundled", "bundled@fog:3"}
    assert "tda order=keff present=1+2" in table.rows
    row = table.overall("tda order=shuffled")
    rates = {run.record.method: run.record.metrics.get("fpr95") for run in runs[:4]}
    assert row.gain == pytest.approx((rates["tda"] or 0) - (rates["zero_shot"] or 0))
    labels = {
        run.row: run.predictions.labels
        for run in runs
        if "unknown" in run.record.dataset
    }
    for result in labels.values():
        assert (result == -2).sum() == (result >= 0).sum() == 30 and result.max() == 2


def test_the_worst_tenth_of_many_draws() -> None:
    assert worst_tenth([1.0] * 9) is None
    draws = [float(value) for value in range(20)]
    assert worst_tenth(draws[::-1]) == 0.5 and worst_tenth(draws, lowest=False) == 18.5
    assert worst_tenth(draws[:11]) == 0.5  # a tenth is rounded up


@pytest.mark.parametrize(
    ("section", "key", "aspect"),
    [
        ("preprocessing", "fingerprint", "preprocessing"),
        ("prompts", "names", "class names"),
    ],
)
def test_hashes_of_records_decide(
    made: Any, section: str, key: str, aspect: str
) -> None:
    first, other = made(BASE, replace(BASE, method="tda"))
    changed = {section: {**other.record.settings[section], key: "another"}}
    record = replace(other.record, settings={**other.record.settings, **changed})
    with pytest.raises(IncomparableError, match=aspect):
        compare([first, Run(record, other.folder)])


def test_rows_that_lack_datasets_are_not_ranked_among_the_others(made: Any) -> None:
    """Tda is run on one of two datasets: its mean stands behind those over both."""
    runs = made(
        *(
            spec(m, dataset=d)
            for m in ("zero_shot", "tent")
            for d in ("bundled", "bundled@fog:2")
        ),
        spec("tda"),
    )
    table = compare(runs)
    rows = overall_table(table).rows
    assert [row[:2] for row in rows] == [
        ("zero_shot", "2"),
        ("tent", "2"),
        ("tda", "1 of 2"),
    ]
    assert any(line.startswith("n of m: ") for line in footnotes(table))


def test_gains_have_an_interval_over_images(made: Any) -> None:
    table = compare(made(spec(), spec("tda")))
    cell = table.cells["tda", "bundled"]
    assert cell.test is not None and cell.half_width == cell.test.half_width
    (row,) = paired_table(table).rows
    assert row[4] == f"{cell.gain:+.2f} ± {cell.half_width:.2f}"


def test_runs_from_kept_features_have_no_cost(made: Any) -> None:
    runs = made(spec(), spec("tda"))
    assert compare(runs).cells["tda", "bundled"].cost is not None
    kept = [
        replace(
            run,
            record=replace(
                run.record, environment={**run.record.environment, "features": "kept"}
            ),
        )
        for run in runs
    ]
    assert compare(kept).cells["tda", "bundled"].cost is None
