"""Ablations: one field changes, all else is equal; curves hold what the records say."""

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cliquetta.errors import UnknownNameError
from cliquetta.evaluation.ablation import ablation, curve
from cliquetta.evaluation.record import list_records
from cliquetta.evaluation.sweep import RunContext, RunResult, sweep
from cliquetta.report.curves import curves_figure
from tests._helpers import made_runs

BASE = replace(made_runs.BASE, method="tda")
FIELD = "clique_combination"


@pytest.fixture
def context(tmp_path: Path, loads: list[str]) -> RunContext:
    return RunContext(tmp_path)


def test_only_the_field_changes() -> None:
    study = ablation(BASE, "positive_alpha", ["1", "2", "4.0", "1.0"], seeds=(0, 1))
    assert [value for value, _ in study.cells] == [
        1.0,
        2.0,
        4.0,
    ]  # 1 and 1.0 are one value
    assert study.default == 2.0
    for value, specs in study.cells:
        own = () if value == study.default else (("positive_alpha", value),)
        assert specs == tuple(replace(BASE, options=own, seed=seed) for seed in (0, 1))
    plain = [replace(BASE, method="zero_shot", seed=seed) for seed in (0, 1)]
    assert list(study.baselines) == plain


def test_presets_and_other_options_stay() -> None:
    base = replace(
        BASE, preset="pets", options=(("positive_beta", 9.0), ("positive_alpha", 7.0))
    )
    study = ablation(base, "positive_alpha", [1, 7.0])
    assert study.default == 7.0
    changed, unchanged = (dict(specs[0].options) for _, specs in study.cells)
    assert changed == {"positive_beta": 9.0, "positive_alpha": 1}
    assert unchanged == dict(base.options)


def test_any_kind_of_field() -> None:
    base = replace(BASE, method="scap")
    assert [v for v, _ in ablation(base, "blocks", ["0", "0,1"]).cells] == [
        (0,),
        (0, 1),
    ]
    assert [v for v, _ in ablation(base, "retention", ["true", "no"]).cells] == [
        True,
        False,
    ]
    assert [v for v, _ in ablation(base, FIELD, ["mean", "concat"]).cells] == [
        "mean",
        "concat",
    ]
    sizes = ablation(base, "batch_size", ["4", 16])
    assert sizes.default == 10
    assert [specs[0].batch_size for _, specs in sizes.cells] == [4, 16]
    assert all(spec.batch_size == 10 for spec in sizes.baselines)


def test_bad_fields_and_values_are_refused() -> None:
    with pytest.raises(UnknownNameError):
        ablation(replace(BASE, method="scap"), FIELD, ["sum"])
    with pytest.raises(ValueError, match="at least 1"):
        ablation(BASE, "batch_size", ["0"])
    with pytest.raises(ValueError, match="values"):
        ablation(BASE, "positive_alpha", [])


def test_a_curve_holds_what_the_records_say(context: RunContext) -> None:
    study = ablation(BASE, "positive_alpha", [0.0, 2.0, 50.0], seeds=(0, 1))
    actual = curve(study, sweep(study.specs, context))
    records = {}
    for record in list_records(context.out or ""):
        value = record.settings["config"].get("positive_alpha")
        records[record.method, value, record.seed] = record.metrics

    plain = [records["zero_shot", None, seed]["top1"] for seed in (0, 1)]
    assert actual.baseline == pytest.approx(statistics.mean(plain))
    for point in actual.points:
        own = [records["tda", point.value, seed] for seed in (0, 1)]
        top1 = [metrics["top1"] for metrics in own]
        nll = [metrics["nll"] for metrics in own]
        # each run against the baseline of the same seed
        gains = [a - b for a, b in zip(top1, plain, strict=True)]
        assert point.mean == pytest.approx(statistics.mean(top1))
        assert point.sd == pytest.approx(statistics.stdev(top1))
        assert point.gain == pytest.approx(statistics.mean(gains))
        assert point.nll == pytest.approx(statistics.mean(nll))


def test_only_new_values_of_a_curve_are_run(context: RunContext) -> None:
    first = ablation(BASE, "positive_alpha", [0.0, 2.0, 50.0], seeds=(0, 1))
    sweep(first.specs, context)
    assert len(list_records(context.out or "")) == 8

    # of these values 2 has been run, 3 has not
    second = ablation(BASE, "positive_alpha", [2.0, 3.0], seeds=(0, 1))
    results = sweep(second.specs, context)
    assert len(list_records(context.out or "")) == 8 + 2
    assert all(result.record for result in results)


def test_a_point_whose_run_is_lost_has_no_score(context: RunContext) -> None:
    # the baseline ends, the run of the value does not
    study = ablation(BASE, "positive_alpha", [50.0], seeds=(1,))
    plain = sweep(study.specs[:1], context)
    lost = RunResult(study.specs[-1], error="lost")
    (point,) = curve(study, [*plain, lost]).points
    assert point.mean is None

    nothing = curve(study, []).plain()
    assert nothing["points"][0]["top1"] is None


def test_curves_are_drawn(context: RunContext) -> None:
    study = ablation(BASE, "positive_alpha", [1.0, 3.0])
    actual = curve(study, sweep(study.specs, context))
    figure = curves_figure({"a": actual, "b": actual, "c": actual})
    # three panels, NLL beside each
    assert sum(axes.get_visible() for axes in figure.axes) == 6

    axes = figure.axes[0]
    drawn = axes.lines[0].get_ydata().tolist()
    assert drawn == pytest.approx([point.mean for point in actual.points])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "3"]
    legend = axes.get_legend().get_texts()
    assert {text.get_text() for text in legend} == {"zero_shot"}


def test_rounding_does_not_look_like_a_trend(context: RunContext) -> None:
    study = ablation(BASE, "positive_alpha", [1.0])
    actual = curve(study, sweep(study.specs, context))
    point = actual.points[0]
    flat = replace(actual, points=(point, point))
    top1, nll = curves_figure({"a": flat}).axes

    # axes have a least height
    low, high = top1.get_ylim()
    assert high - low == pytest.approx(2)
    assert low < point.mean < high
    assert np.ptp(nll.get_ylim()) > 0.0499
