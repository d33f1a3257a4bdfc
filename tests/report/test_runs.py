"""Runs grouped for a report."""

from pathlib import Path
from typing import Any

from cliquetta.data.catalogue import get_dataset
from cliquetta.report.runs import group_runs, load_runs, shown_groups
from tests._helpers.made_runs import LABELS, NAMES, PLAIN, make_run


def test_groups_hold_runs_over_the_same_images(ablation: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "more", "scap", LABELS, PLAIN, dataset="toy@snow:1")
    make_run(tmp_path / "more", "tent", LABELS[:4], PLAIN[:4])
    runs = [*ablation, *load_runs([tmp_path / "more"])[0]]
    groups = group_runs(runs)
    assert sorted(len(group.runs) for group in groups) == [1, 1, 9]
    large = max(groups, key=lambda group: len(group.runs))
    assert large.baseline.plain and large.runs[0].plain
    labels = large.labels
    assert len(set(labels.values())) == 9  # by what differs
    assert (
        "scap" in labels[large.adapted[0].id]
        and "threshold" in labels[large.adapted[0].id]
    )


def test_figures_show_one_run_per_method_with_usual_settings(
    ablation: Any, tmp_path: Path
) -> None:
    more = tmp_path / "more"
    make_run(more, "scap", LABELS, PLAIN, dataset="toy@snow:1", seed=2)
    make_run(more, "tent", LABELS[::-1], PLAIN[::-1], seed=5)
    make_run(more, "tent", LABELS, PLAIN, seed=4)

    loaded, _ = load_runs([more])
    groups = shown_groups([*ablation, *loaded])
    fog, snow = sorted(groups, key=lambda group: group.dataset)

    assert [run.record.method for run in fog.runs] == ["zero_shot", "scap", "tent"]
    assert fog.runs[1].record.settings["config"]["threshold"] == 0.8
    assert fog.runs[1].metric("top1") == 75  # the first seed
    assert [run.record.seed for run in snow.runs] == [2]


def test_class_names_come_from_a_run_that_has_them_or_from_the_dataset(
    tmp_path: Path, evaluated: Path
) -> None:
    (bundled,), _ = load_runs(list(evaluated.glob("*zero_shot*")))
    assert bundled.names == get_dataset("bundled").names
    first = make_run(tmp_path, "dmn", LABELS, PLAIN)
    (run,), _ = load_runs([first])
    assert run.names == tuple(
        f"class {label}" for label in range(4)
    )  # nobody knows them
    second = make_run(tmp_path, "scap", LABELS, PLAIN, evidence=True)
    runs, _ = load_runs([first, second])
    assert [run.names for run in runs] == [NAMES, NAMES]  # one that knows is enough
