"""The leaderboard and its picture: numbers from records made by hand."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest

from benchmarks.results import leaderboard, leaderboard_figure
from benchmarks.results.grid_files import GRIDS, grid_file
from benchmarks.results.leaderboard import (
    COLUMNS,
    leaderboard_page,
    stream_kind,
    within_noise,
)
from cliquetta.evaluation import grid as grids
from cliquetta.evaluation.record import Record
from cliquetta.methods.building.registry import method_entries
from tests._helpers.made_runs import table_cells


def on_stream(record: Record, top1: float | None = None, **changes: Any) -> Record:
    stream = {**record.settings["stream"], **changes}
    metrics = dict(record.metrics) | (
        {} if top1 is None else {"top1": top1, "auroc": top1 / 2}
    )
    return replace(
        record, settings={**record.settings, "stream": stream}, metrics=metrics
    )


def board(records: list[Record], folder: Path) -> str:
    return leaderboard_page(
        {"Toys": (records, leaderboard.board_rows(records, {}))}, folder
    )


def test_the_board_says_who_wins_where(
    records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two sets with few classes TDA gains 20 and loses 2, Tent 4 and 6 in half the time."""
    top1 = {"zero_shot": (50.0, 50.0), "tda": (70.0, 48.0), "tent": (54.0, 56.0)}
    few = [
        on_stream(
            r, top1[r.method][r.dataset != "toy@fog:3"], order="keff", present=[1, 4]
        )
        for r in records
        if r.dataset != "toy"
    ]
    unknown = [on_stream(r, top1[r.method][1], unknown="junk") for r in few[::4]]
    page = board([*records, *few, *unknown], tmp_path)
    head = next(line for line in page.splitlines() if line.startswith("| method"))
    names = [name.strip() for name in head.strip("|").split("|")][1:]
    cells = {m: dict(zip(names, table_cells(page, m), strict=True)) for m in top1}
    few_tda = {"few classes": "**+9.0** (toy@contrast:3 ▼-2.0)", "weather": "**+15.0**"}
    few_tda |= {"digital": "▼-5.0", "clean": "+0.0", "cost": "2 ×"}
    assert "noise" not in names, "a column of which nothing is recorded is left out"
    assert cells["tda"].items() >= few_tda.items()
    few_tent = {
        "few classes": "+5.0 (toy@fog:3 +4.0)",
        "open set": "**+6.0**",
        "cost": "1 ×",
    }
    assert (
        cells["tent"].items() >= (few_tent | {"open set (AUROC)": "**+3.0**"}).items()
    )
    assert cells["zero_shot"].items() >= {"digital": "60.0", "open set": "50.0"}.items()
    advice = " ".join(page.partition("## What to take")[2].split())
    assert (
        "**few classes**: Highest gain: `tda` (+9.0); within noise of it: `tent` (+5.0). Below "
        "zero-shot on average: none; on no set: `tent` (+5.0). `tda` takes 2 × the time of "
        "zero-shot; for at most 1.5 ×: `tent` (+5.0)." in advice
    )
    assert (
        "**digital**: No method gains: take zero-shot. The most is lost by: `tent` "
        in advice
    )
    assert "**noise**" not in advice
    rows = leaderboard.board_rows([*records, *few], {})
    assert leaderboard.method_sentence(rows, "tda") == (
        "`tda` gains over zero-shot on weather (+15.0), few classes (+9.0) and does not on digital "
        "(▼-5.0), clean (+0.0)."
    )
    assert leaderboard.method_sentence(rows, "moon") == ""
    monkeypatch.setattr(leaderboard, "DEFAULT_METHOD", "tda")
    page = board([*records, *few], tmp_path)
    assert "| digital | ▼-5.0 | ▼-5.0 (toy@contrast:3) | 1 of 2 | – |" in page


def test_the_picture_shows_means_and_lowest_and_no_bar_where_nothing_was_run(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard_figure, "DEFAULT_METHOD", "tda")
    few = [on_stream(r, order="keff", present=[1, 4]) for r in records]
    mixed = [on_stream(r, order="mixed") for r in records if r.method != "tent"]
    rows = leaderboard.board_rows([*records, *few, *mixed], {})
    drawn = fromstring(leaderboard_figure.leaderboard_figure({"Toys & co": rows}))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in drawn.iter(f"{space}text")]
    assert "Toys & co" in texts and texts.index("tda") < texts.index("tent")
    bars = {rect[0].text: rect for rect in drawn.iter(f"{space}rect") if len(rect)}
    assert list(bars)[:2] == [
        "tda, clean: +0.0, lowest +0.0",
        "tent, clean: -5.0, lowest -5.0",
    ]
    zero = float(bars["tent, clean: -5.0, lowest -5.0"].attrib["y"])
    for about, bar in bars.items():
        gain = float(re.findall(r"[-+][\d.]+", str(about))[0])
        height = float(bar.attrib["height"])
        top = float(bar.attrib["y"])
        assert height == pytest.approx(abs(gain) * leaderboard_figure.POINT, abs=0.4)
        assert top == pytest.approx(zero - (height if gain > 0 else 0), abs=0.4)
    assert "tda, few classes: +3.3, lowest -5.0" in bars
    ticks = [path.attrib["d"] for path in drawn.iter(f"{space}path")]
    left = bars["tda, few classes: +3.3, lowest -5.0"].attrib["x"]
    assert f"M{int(left) + 1} {zero + 5 * leaderboard_figure.POINT:.1f}h7" in ticks
    # Four kinds with both methods, and one on which Tent was not run.
    assert len(bars) == 2 * 4 + 1 and texts.count("×") == 1


def test_rows_of_fewer_images_give_no_advice(
    records: list[Record], tmp_path: Path
) -> None:
    small = [
        replace(on_stream(r, limit=5), images=5) if r.method == "tda" else r
        for r in records
    ] + [
        replace(on_stream(r, limit=5), images=5)
        for r in records
        if r.method == "zero_shot"
    ]
    page = board(small, tmp_path)
    weather = 2  # behind setting and clean
    assert table_cells(page, "tda")[weather] == "+15.0°"
    assert table_cells(page, "tda")[-1] == "3 × 5"
    assert table_cells(page, "zero_shot")[weather] == "50.0"
    assert table_cells(page, "tent")[-1] == "3 × 20"
    assert "**weather**: No method gains: take zero-shot." in page
    assert "**Not recorded yet.**" in board([], tmp_path)


OF_CORRUPTIONS = {
    "clean",
    "noise",
    "blur",
    "weather",
    "digital",
    "few classes",
    "bursts",
    "mixed",
}
OF_SMALL_SETS = {"rendering", "hub", "long tail", "open set"}
FILLED = {
    "leaderboard": OF_CORRUPTIONS | OF_SMALL_SETS | {"batch 1"},
    "leaderboard-real": OF_CORRUPTIONS | OF_SMALL_SETS | {"batch 1"},
    "leaderboard-imagenet": OF_CORRUPTIONS | {"there and back", "batch 8", "batch 1"},
}


@pytest.mark.parametrize("grid", GRIDS["leaderboard"])
def test_the_grids_of_the_boards_fill_their_columns(grid: str) -> None:
    """With every method that can run there, and each beside zero-shot on the same images."""
    path = grid_file(grid)
    specs = grids.read_grid(path, root=grids.ROOT)
    lacking = grids.TEXT_CAPABILITIES if specs[0].text_features else frozenset()
    able = {
        e.name
        for e in method_entries()
        if e.fit is None and not e.adapter.needs & lacking
    }
    assert {s.method for s in specs} == able
    assert {grids.zero_shot(spec) for spec in specs} <= set(specs)
    kinds = set()
    roles = grids.grid_roles(path)
    for spec in specs:
        stream: dict[str, Any] = {"order": spec.order, "batch_size": spec.batch_size}
        stream |= {"unknown": spec.unknown} if spec.unknown else {}
        kinds.add(
            stream_kind(Record("", {"dataset": spec.dataset, "stream": stream}), roles)
        )
    assert kinds == FILLED[grid]
    assert kinds <= {kind for kind, _ in COLUMNS.values()}


def test_noise_is_estimated_from_paired_runs() -> None:
    def runs(*gains: float) -> dict[tuple[str, int], float]:
        return {("set", seed): gain for seed, gain in enumerate(gains)}

    assert within_noise(
        runs(3, 4, 5), runs(1, 6, 4)
    )  # differences 2, -2, 1: 0.33 ± 1.2
    assert not within_noise(runs(3, 4, 5), runs(1, 1.9, 3.1))  # 2, 2.1, 1.9: 2.0 ± 0.06
    assert not within_noise(runs(3), runs(2.9))  # one run says nothing of noise


def test_methods_that_lack_a_column_stand_behind_the_others(
    records: list[Record],
) -> None:
    """Tent gains most, on clean images alone; Tda is on all columns."""
    few = [
        on_stream(r, order="keff", present=[1, 4])
        for r in records
        if r.method != "tent"
    ]
    raised = [
        replace(r, metrics={**r.metrics, "top1": 99.0}) if r.method == "tent" else r
        for r in records
    ]
    assert list(leaderboard.board_rows(raised, {})) == ["zero_shot", "tent", "tda"]
    assert list(leaderboard.board_rows([*raised, *few], {})) == [
        "zero_shot",
        "tda",
        "tent",
    ]
