"""The paper's tables: numbers as printed, runs as planned, and honest words about the rest."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.data.catalogue import list_datasets
from cliquetta.errors import UnknownNameError
from cliquetta.evaluation import published as protocols
from cliquetta.evaluation import sweep as sweeping
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.published import (
    Protocol,
    list_tables,
    published_model,
    published_table,
    reasons,
    sources,
    template_name,
)
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.reproduce import Item, Setting, absent, baselines, lines, plain, plan
from cliquetta.evaluation.sweep import RunContext, sweep
from cliquetta.methods.registry import get_method, method_config
from cliquetta.prompts.catalogue import templates
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tolerance import LOGIT

BASE = RunSpec("", "scap", model="tiny", limit=24, batch_size=12)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    monkeypatch.setattr(sweeping, "create_model", lambda name, **_: build_tiny_clip())
    return RunContext(tmp_path)


# --- the published numbers ---------------------------------------------------------------------


def test_averages_agree_with_the_printed_ones() -> None:
    document = json.loads(
        files("cliquetta.evaluation").joinpath("data/published.json").read_text(encoding="utf-8")
    )
    checked = 0
    for table in document["tables"].values():
        for row in table.get("rows", ()):
            if "average" in row:
                mean = statistics.mean(row["values"].values())
                assert mean == pytest.approx(row["average"], abs=0.021), row["label"]
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("name", list_tables())
def test_every_row_can_be_run_as_it_says(name: str) -> None:
    table = published_table(name)
    known = {entry.id for entry in list_datasets()}
    assert set(table.datasets) <= known
    for row in table.rows:
        assert row.source in sources()
        assert min(row.values.values()) > 0 and max(row.values.values()) < 100
        entry = get_method(row.method)
        for dataset in table.datasets:
            preset = (row.preset or "").replace("{dataset}", dataset) or None
            if row.preset is not None and "{" not in row.preset:
                assert preset in entry.presets
            if preset in entry.presets or preset is None:
                options = {**row.options_by_dataset.get(dataset, {}), **row.options}
                method_config(row.method, preset, options)
            if row.protocol.templates is not None:
                assert row.protocol.texts(dataset), (row.label, dataset)


def test_published_views_are_those_of_our_presets() -> None:
    """Where the data say that a row had 64 views, the run that stands beside it has them too."""
    for name in ("ood", "cross-domain-full"):
        table = published_table(name)
        for row in table.rows:
            entry = get_method(row.method)
            if entry.fit is not None or row.method in ("zero_shot", "dmn"):
                continue
            for dataset in table.datasets:
                preset = (row.preset or "").replace("{dataset}", dataset)
                config = method_config(row.method, preset if preset in entry.presets else None)
                count = config.views
                assert count == row.protocol.views, (row.label, dataset)


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'components'"):
        published_table("component")


# --- plans -------------------------------------------------------------------------------------


def test_without_data_every_row_runs_once_on_the_stand_in() -> None:
    setting = Setting(BASE, seeds=(0, 1))
    items = plan(published_table("ood"), setting)
    methods = [item.row.method for item in items]
    assert len(methods) == len(set(methods))  # CLIP's three rows would be one run
    assert all(item.row.source == "P" for item in items if item.row.method in ("zero_shot", "zero"))
    for item in items:
        fits = get_method(item.row.method).fit is not None
        assert bool(item.missing) == fits
        assert all(s.dataset == "bundled@contrast:4" and s.preset is None for s in item.specs)
        assert [s.seed for s in item.specs] == ([] if fits else [0, 1])
    assert items[0].paper == pytest.approx(np.mean([47.87, 73.98, 46.09, 61.88]))
    assert {s.method for s in baselines(items)} == {"zero_shot"} and len(baselines(items)) == 2


def test_components_are_the_rows_of_the_paper() -> None:
    items = plan(published_table("components"), Setting(BASE))
    configs = [method_config("scap", None, dict(item.specs[0].options)) for item in items]
    assert [(c.modalities, c.retention, c.threshold) for c in configs] == [
        ("image", False, 2.0),
        ("text", False, 0.8),
        ("image", False, 0.8),
        ("image", True, 0.8),
        ("both", True, 0.8),
    ]
    joined = plan(published_table("combination"), Setting(BASE))
    pairs = [dict(item.specs[0].options) for item in joined]
    assert [(p["clique_combination"], p["retained_combination"]) for p in pairs] == [
        (a, b) for a in ("mean", "concat") for b in ("mean", "concat")
    ]


def test_beside_real_data_rows_keep_their_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"imagenet-r": "not there"}
    monkeypatch.setattr("cliquetta.evaluation.reproduce.absent", lambda *_: missing)
    items = plan(published_table("ood"), Setting(BASE, Path("data"), fitted={"coop": "c.file"}))
    cells = {(item.row.label, item.dataset): item for item in items}
    scap = cells["SCAP", "imagenet-a"].specs[0]
    assert (scap.dataset, scap.preset) == ("imagenet-a", "paper-views")
    assert dict(scap.options)["threshold"] == 0.65
    assert scap.templates == templates("scap-imagenet-a")
    assert dict(cells["SCAP", "imagenet-sketch"].specs[0].options)["threshold"] == 0.9
    tda = cells["TDA", "imagenet-sketch"].specs[0]
    assert tda.preset == "imagenet-sketch" and tda.templates == templates("openai-80")
    assert cells["CLIP, ensemble", "imagenet-a"].specs[0].templates == templates("openai-80")
    assert cells["SCAP", "imagenet-r"].missing == "not there"
    assert cells["SCAP", "imagenet-r"].specs == ()
    assert cells["CoOp", "imagenet-a"].specs[0].fitted == "c.file"
    assert "cliquetta fit" in cells["CoCoOp", "imagenet-a"].missing
    only = plan(published_table("ood"), Setting(BASE, Path("data")), ["scap", "tda"])
    assert {item.row.method for item in only} == {"scap", "tda"}
    with pytest.raises(UnknownNameError, match="method of table ood"):
        plan(published_table("ood"), Setting(BASE), ["scup"])


def test_a_shift_is_laid_over_real_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cliquetta.evaluation.reproduce.absent", lambda *_: {})
    items = plan(published_table("components"), Setting(BASE, Path("data"), shift="fog:3"))
    assert items[0].specs[0].dataset == "imagenet-a@fog:3"


def test_absent_data_sets_come_with_a_reason(tmp_path: Path) -> None:
    reasons = absent(["bundled", "pets"], tmp_path)
    assert list(reasons) == ["pets"] and str(tmp_path) in reasons["pets"]


# --- lines -------------------------------------------------------------------------------------


def test_nothing_learned_is_zero_shot(context: RunContext) -> None:
    items = plan(published_table("components"), Setting(BASE))
    none = items[0].specs[0]
    scap, clip = sweep([none, *baselines(items)], context)
    assert scap.record is not None and clip.record is not None
    ours, theirs = (load_predictions(context.out / o.record.id) for o in (scap, clip))
    assert ours.keys == theirs.keys
    assert np.array_equal(ours.classes[:, 0], theirs.classes[:, 0])
    np.testing.assert_allclose(ours.probabilities, theirs.probabilities, rtol=LOGIT)


def test_lines_put_both_sides_together(context: RunContext) -> None:
    table = published_table("ood")
    items = plan(table, Setting(BASE, seeds=(0, 1)), ["zero_shot", "tda", "coop"])
    results = sweep([spec for item in items for spec in item.specs], context)
    clip, coop, tda = lines(table, items, results)
    top1 = [r.metrics["top1"] for r in tda.records]
    assert tda.ours == pytest.approx(np.mean(top1)) and tda.sd == pytest.approx(
        np.std(top1, ddof=1)
    )
    assert tda.difference == pytest.approx(tda.ours - tda.item.paper)
    assert tda.gain == pytest.approx(tda.ours - clip.ours)
    assert tda.paper_gain == pytest.approx(tda.item.paper - clip.item.paper)
    assert clip.gain is None
    assert coop.ours is None and coop.difference is None and "cliquetta fit" in coop.note
    assert (tda.paper_side.views, tda.our_side.views) == ("64", "1")
    shown = plain(tda)
    assert shown["comparable"] is False and len(shown["records"]) == 2
    text = "; ".join(tda.reasons)
    assert "model tiny instead of CLIP ViT-B/16" in text
    assert "data bundled@contrast:4 instead of mean of 4 sets" in text
    assert "24 of 2,000 images" in text and "views: 1 instead of 64" in text


def record_of(row_dataset: str, **changes: Any) -> Record:
    """A made-up record of SCAP's full run on ImageNet-A under the published protocol."""
    texts = changes.get("templates", templates("scap-imagenet-a"))
    config = {"view_kind": "zoom-crop", "view_zoom": 1.830357, "text_mix": 0.6}
    settings = {
        "dataset": row_dataset,
        "method": "scap",
        "config": config | changes.get("config", {}),
        "model": {"id": changes.get("model", "openai:ViT-B/16")},
        "prompts": {"templates": list(texts)},
        "stream": {
            "views": changes.get("views", {"count": 64}),
            "batch_size": changes.get("batch_size", 64),
            "limit": None,
            "datasets": [{"images": 7500}],
        },
    }
    return Record("id", settings, "finished", images=changes.get("images", 7500))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"model": "hf:openai/clip-vit-base-patch16"}, None),
        ({"model": "openai:ViT-B/32"}, "model openai:ViT-B/32 instead of CLIP ViT-B/16 (OpenAI)"),
        ({"views": None}, "views: 1 instead of 64"),
        ({"config": {"view_kind": "augmix"}}, "view_kind: augmix instead of zoom-crop"),
        ({"config": {"view_zoom": 1.15}}, "view_zoom: 1.15 instead of 1.830357"),
        ({"config": {"text_mix": 0.5}}, "text_mix: 0.5 instead of 0.6"),
        ({"templates": templates("single")}, "templates: single instead of scap-imagenet-a"),
        ({"batch_size": 128}, "batch size 128 instead of 64"),
        ({"images": 7499}, "7,499 of 7,500 images of imagenet-a"),
    ],
)
def test_what_keeps_two_numbers_apart(changes: Any, reason: str | None) -> None:
    row = published_table("components").rows[-1]
    found = reasons(row, "imagenet-a", record_of("imagenet-a", **changes))
    assert found == (() if reason is None else (reason,))


def test_unknown_templates_are_no_match() -> None:
    row = published_table("ood").rows[-1]
    row = replace(row, protocol=Protocol(64, None, 64))
    found = protocols.reasons(row, "imagenet-a", record_of("imagenet-a"))
    assert found == ("the published templates are not known",)


def test_names_of_templates() -> None:
    assert template_name(templates("openai-7")) == "openai-7"
    assert template_name(["a photo of a {}."]) == "single"
    assert template_name(["my {}"]) == "'my {}'"
    assert template_name(["my {}", "your {}"]) == "2 templates"
    assert "openai:ViT-B/16" in published_model()[1]
    assert Item(published_table("ood").rows[0], "x", 1.0).specs == ()
