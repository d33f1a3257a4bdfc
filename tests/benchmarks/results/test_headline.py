"""README's headline table from runs made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest

from benchmarks.results import headline
from benchmarks.results.headline import (
    Headline,
    headline_picture,
    headline_table,
    read_costs,
    read_headline,
)
from benchmarks.results.headline_figure import Bars, headline_figure
from cliquetta.errors import UserError
from cliquetta.evaluation.record import Record, load_record
from tests._helpers.made_runs import LABELS, PLAIN, make_run, table_cells

CLEAN = "tar:{root}/tar/imagenet"


def made(root: Path, method: str, dataset: str, top1: float) -> Record:
    record = load_record(
        make_run(root, method, LABELS, PLAIN, dataset=dataset, batch_size=64)
    )
    return replace(record, metrics={"top1": top1})


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Headline:
    """Tda gains 1 on clean images, 4 and -2 on corruptions, 6 and 2 on the tower's shifts."""
    monkeypatch.setattr(headline, "DEFAULT_METHOD", "tda")
    monkeypatch.setattr(headline, "RIVALS", 1)
    accuracies: dict[str, list[float]] = {
        "zero_shot": [66.0, 40.0, 30.0],
        "tda": [67.0, 44.0, 28.0],
        "tent": [60.0, 42.0, 31.0],
        "oga": [66.0, 41.0, 31.0],
        "scap": [66.1, 40.5],  # one corruption is missing
    }
    shifts = ("", "@fog:5", "@snow:5")
    imagenet = []
    for method, values in accuracies.items():
        for shift, top1 in zip(shifts, values, strict=False):
            imagenet.append(made(tmp_path, method, f"{CLEAN}{shift}", top1))
    tower = [
        made(tmp_path, "zero_shot", "toy@fog:5", 50.0),
        made(tmp_path, "zero_shot", "sketches", 70.0),
        made(tmp_path, "zero_shot", "toy", 90.0),
        made(tmp_path, "tda", "toy@fog:5", 56.0),
        made(tmp_path, "tda", "sketches", 72.0),
        made(tmp_path, "tda", "toy", 10.0),  # clean images are no shift
        made(tmp_path, "scap", "sketches", 67.0),
    ]
    return read_headline(imagenet, tower, {"sketches": "rendering"})


@pytest.fixture
def table(read: Headline) -> str:
    costs = {"tda": 1.14, "tda:young": 2.5, "scap": 14.2}
    return headline_table(read, costs)


def test_a_row_has_every_kind_of_images_the_lowest_gain_and_the_cost_alone(
    table: str,
) -> None:
    assert table_cells(table, "zero_shot") == ["66.0", "35.0", "–", "–", "1.0 ×"]
    assert table_cells(table, "tda") == [
        "67.0 (+1.0)",
        "36.0 (+1.0)",
        "+4.0",
        "-2.0",
        "2.5 ×, later 1.1 ×",
    ]
    assert table_cells(table, "tent") == [
        "60.0 (-6.0)",
        "36.5 (+1.5)",
        "–",
        "+1.0",
        "–",
    ]
    assert "2 shifts, few classes" in table


def test_a_method_with_images_missing_says_on_how_many_sets_its_gain_is(
    table: str,
) -> None:
    assert table_cells(table, "scap") == [
        "66.1 (+0.1)",
        "+0.5 (1 of 2)",
        "-3.0 (1 of 2)",
        "-3.0",
        "14.2 ×",
    ]


def test_the_best_rivals_are_shown_in_order_and_scap_wherever_it_stands(
    table: str,
) -> None:
    order = [line.split("`")[1] for line in table.splitlines() if "`" in line]
    assert order[0] == "zero_shot"
    assert order[1:] == ["tent", "tda", "scap"], "oga is no best rival"


def test_the_picture_leaves_out_gains_over_a_part_of_the_images(read: Headline) -> None:
    picture = headline_picture(read)
    assert "+4.0" in picture, "of tda on the tower's shifts"
    assert "-3.0" not in picture, "of scap on one of two shifts"


def test_costs_are_those_of_methods_alone() -> None:
    costs: dict[str, Any] = read_costs(Path(__file__).parents[3] / "docs/results")
    assert 1 < costs["tda"] < costs["tent"] < costs["scap"]


def test_the_picture_has_a_bar_for_every_gain_and_says_what_was_not_run() -> None:
    rows = [Bars("tda", (1.0, -2.0, 6.0)), Bars("tent", (0.5, 1.5, None))]
    drawn = fromstring(headline_figure(("clean", "corrupted", "shifts"), rows))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in drawn.iter(f"{space}text")]
    shown = ["tda", "+1.0", "-2.0", "+6.0", "tent", "+0.5", "+1.5", "not run"]
    assert texts == [
        "Points over zero-shot, ViT-B/16",
        "clean",
        "corrupted",
        "shifts",
        *shown,
    ]
    bars = [rect.attrib for rect in drawn.iter(f"{space}rect")][4:]
    widths = [float(bar["width"]) for bar in bars]
    ratios = [width / widths[0] for width in widths]
    assert ratios == pytest.approx([1, 2, 6, 0.5, 1.5], abs=0.01)
    lost = float(bars[1]["x"])
    gained = float(bars[0]["x"])
    assert lost + widths[1] == pytest.approx(gained, abs=0.2), "both end at zero"


def test_labels_can_be_read_where_a_phone_shows_360_pixels() -> None:
    drawn = fromstring(headline_figure(("clean",), [Bars("tda", (1.0,))]))
    shrunk = 360 / float(drawn.attrib["width"])
    assert float(drawn.attrib["font-size"]) * shrunk >= 12


def test_without_clean_images_the_error_names_the_run_that_is_missing(
    tmp_path: Path,
) -> None:
    corrupted = [made(tmp_path, "zero_shot", f"{CLEAN}@fog:5", 40.0)]
    with pytest.raises(UserError, match="--grid leaderboard-imagenet"):
        read_headline(corrupted, [], {})
