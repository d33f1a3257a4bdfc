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

    tda = table.cells["tda", "bundled"]
    scores = {}
    for run in runs:
        scores[run.record.method, run.record.seed] = run.record.metrics["top1"]
    plain = [scores["zero_shot", seed] for seed in range(3)]
    top1 = [scores["tda", seed] for seed in range(3)]
    gains = [after - before for after, before in zip(top1, plain, strict=True)]
    assert tda.mean == pytest.approx(np.mean(top1))
    assert tda.sd == pytest.approx(np.std(top1, ddof=1))
    assert tda.gain == pytest.approx(np.mean(gains))

    # the test counts images: three runs of 30
    changed = tda.test.repaired - tda.test.broken
    assert 100 * changed / 90 == pytest.approx(tda.gain, abs=100 * SUM)


def test_the_baseline_has_no_gain(made: Any) -> None:
    table = compare(made(spec(), spec("tda")))
    cell = table.cells["zero_shot", "bundled"]
    assert cell.test is None
    assert cell.gain is None


def test_averages_say_over_how_many_columns(made: Any) -> None:
    runs = made(spec(), spec(dataset="bundled@fog:2"), spec("tda"))
    table = compare(runs)
    assert set(table.columns) == {"bundled", "bundled@fog:2"}

    # zero-shot was run on both, TDA on one
    clear = table.cells["zero_shot", "bundled"].mean
    foggy = table.cells["zero_shot", "bundled@fog:2"].mean
    both = table.overall("zero_shot")
    assert both.mean == pytest.approx((clear + foggy) / 2)
    assert table.overall("tda").columns == ("bundled",)


@pytest.mark.parametrize(
    ("changes", "aspect"),
    [
        ({"templates": ("a {}.",)}, "templates"),
        ({"limit": 20}, "images"),
        ({"order": "sequential"}, "images"),
    ],
    ids=["other templates", "fewer images", "another order"],
)
def test_unlike_runs_are_not_put_into_one_column(
    made: Any, changes: Any, aspect: str
) -> None:
    runs = made(spec(), spec("tda", **changes))
    with pytest.raises(IncomparableError, match=aspect) as error:
        compare(runs)
    for run in runs:
        assert run.record.id in str(error.value)

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


def test_presets_of_authors_are_marked(made: Any) -> None:
    table = compare(made(spec(), spec("tda", preset="pets")))
    assert table.cells["tda:pets", "bundled"].marks == TUNED_BY_AUTHORS
    assert table.marks == TUNED_BY_AUTHORS


def test_models_have_their_own_baseline(made: Any) -> None:
    table = compare(made(spec(), spec("tent", model="other")))
    assert all(cell.test is None for cell in table.cells.values())


def test_another_baseline_and_metric(made: Any) -> None:
    runs = made(spec(), spec("tda"))
    table = compare(runs, baseline="tda", metric="nll")
    assert table.rows[0] == "tda"

    zero_shot, tda = (run.record.metrics["nll"] for run in runs)
    cell = table.cells["zero_shot", "bundled"]
    assert cell.gain == pytest.approx(zero_shot - tda)


def test_a_metric_that_there_is_not_is_refused(made: Any) -> None:
    runs = made(spec(), spec("tda"))
    with pytest.raises(UnknownNameError):
        compare(runs, metric="top-1")


def test_protocols_are_columns_and_words_of_a_row(made: Any) -> None:
    mixed = {"classes": ("cat", "dog", "frog"), "unknown": "bundled"}
    keff = {"dataset": "bundled@fog:3", "order": "keff", "present": (1, 2)}
    runs = made(
        spec("zero_shot", **mixed),
        spec("tda", **mixed),
        spec("zero_shot", **keff),
        spec("tda", **keff),
    )
    table = compare(runs, metric="fpr95")
    assert set(table.columns) == {"bundled with unknown bundled", "bundled@fog:3"}
    assert "tda order=keff present=1+2" in table.rows

    # only the first protocol has unknown images, whose rate is compared
    zero_shot, tda = runs[:2]
    gain = tda.record.metrics["fpr95"] - zero_shot.record.metrics["fpr95"]
    assert table.overall("tda order=shuffled").gain == pytest.approx(gain)
    for run in (zero_shot, tda):
        labels = run.predictions.labels
        assert (labels == -2).sum() == 30
        assert (labels >= 0).sum() == 30
        assert labels.max() == 2


def test_the_worst_tenth_of_many_draws() -> None:
    assert worst_tenth([1.0] * 9) is None
    draws = [float(value) for value in range(20)]
    backwards = draws[::-1]
    assert worst_tenth(backwards) == 0.5
    assert worst_tenth(draws, lowest=False) == 18.5
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
    first, other = made(spec(), spec("tda"))
    # the record of the second run with one hash changed
    settings = dict(other.record.settings)
    settings[section] = {**settings[section], key: "another"}
    record = replace(other.record, settings=settings)
    with pytest.raises(IncomparableError, match=aspect):
        compare([first, Run(record, other.folder)])


def test_rows_that_lack_datasets_are_not_ranked_among_the_others(made: Any) -> None:
    """Tda is run on one of two datasets: its mean stands behind those over both."""
    runs = made(
        spec("zero_shot"),
        spec("zero_shot", dataset="bundled@fog:2"),
        spec("tent"),
        spec("tent", dataset="bundled@fog:2"),
        spec("tda"),
    )
    table = compare(runs)
    ranked = [row[:2] for row in overall_table(table).rows]
    assert ranked == [
        ("zero_shot", "2"),
        ("tent", "2"),
        ("tda", "1 of 2"),
    ]
    assert any(line.startswith("n of m: ") for line in footnotes(table))


def test_gains_have_an_interval_over_images(made: Any) -> None:
    table = compare(made(spec(), spec("tda")))
    cell = table.cells["tda", "bundled"]
    assert cell.test is not None
    assert cell.half_width == cell.test.half_width

    # the table shows it
    (row,) = paired_table(table).rows
    assert row[4] == f"{cell.gain:+.2f} ± {cell.half_width:.2f}"


def test_runs_from_kept_features_have_no_cost(made: Any) -> None:
    runs = made(spec(), spec("tda"))
    assert compare(runs).cells["tda", "bundled"].cost is not None

    kept = []
    for run in runs:
        environment = {**run.record.environment, "features": "kept"}
        record = replace(run.record, environment=environment)
        kept.append(replace(run, record=record))
    assert compare(kept).cells["tda", "bundled"].cost is None
