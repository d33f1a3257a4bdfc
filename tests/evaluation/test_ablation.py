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
    listed = list_records(context.out or "")
    records = {
        (r.method, r.settings["config"].get("positive_alpha"), r.seed): r
        for r in listed
    }
    plain = [records["zero_shot", None, s].metrics["top1"] for s in (0, 1)]
    assert actual.baseline == pytest.approx(statistics.mean(plain))
    for point in actual.points:
        own = [records["tda", point.value, s] for s in (0, 1)]
        top1 = [r.metrics["top1"] for r in own]
        assert point.mean == pytest.approx(statistics.mean(top1))
        assert point.sd == pytest.approx(statistics.stdev(top1))
        gains = [a - b for a, b in zip(top1, plain, strict=True)]
        assert point.gain == pytest.approx(statistics.mean(gains))
        assert point.nll == pytest.approx(
            statistics.mean(r.metrics["nll"] for r in own)
        )
    again = sweep(
        ablation(BASE, "positive_alpha", [2.0, 3.0], seeds=(0, 1)).specs, context
    )
    assert len(list_records(context.out or "")) == 8 + 2  # only the new value was run
    assert all(result.record for result in again)
    lost = RunResult(study.specs[-1], error="lost")
    (*_, partly) = curve(
        ablation(BASE, "positive_alpha", [50.0], seeds=(1,)), [*again, lost]
    ).points
    assert partly.mean is None and curve(study, []).plain()["points"][1]["top1"] is None


def test_curves_are_drawn(context: RunContext) -> None:
    study = ablation(BASE, "positive_alpha", [1.0, 3.0])
    actual = curve(study, sweep(study.specs, context))
    figure = curves_figure(dict.fromkeys("abc", actual))
    axes = figure.axes[0]
    drawn = axes.lines[0].get_ydata().tolist()
    assert drawn == pytest.approx([point.mean for point in actual.points])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "3"]
    assert {"zero_shot"} == {text.get_text() for text in axes.get_legend().get_texts()}
    assert (
        sum(axes.get_visible() for axes in figure.axes) == 6
    )  # three panels, NLL beside each
    flat = replace(actual, points=(actual.points[0], actual.points[0]))
    top1, nll = curves_figure({"a": flat}).axes  # rounding does not look like a trend
    assert (
        np.ptp(top1.get_ylim()) == pytest.approx(2) and np.ptp(nll.get_ylim()) > 0.0499
    )
    assert top1.get_ylim()[0] < actual.points[0].mean < top1.get_ylim()[1]
