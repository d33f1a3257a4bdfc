"""README's table and the pages of results: numbers from records made by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest

from cliquetta.errors import UserError
from cliquetta.evaluation.comparison import compare
from cliquetta.evaluation.grid import (
    ROOT,
    TEXT_CAPABILITIES,
    grid_roles,
    packaged_grid,
    read_grid,
    zero_shot,
)
from cliquetta.evaluation.record import Record, find_runs, load_record, pack_records, unpack_records
from cliquetta.methods.registry import method_entries
from cliquetta.report import leaderboard, leaderboard_figure
from cliquetta.report.leaderboard import COLUMNS, leaderboard_page, stream_kind, within_noise
from cliquetta.report.results_pages import (
    BEGIN,
    END,
    GRIDS,
    ResultsPages,
    ablation_page,
    headline,
    insert_headline,
    methods_page,
    read_settings,
)
from tests._helpers.made_runs import make_run

REPOSITORY = Path(__file__).parents[2]
LABELS = (0, 1, 2, 3) * 5
ROLES = {"toy@fog:3": "report", "toy@contrast:3": "dev", "toy": "clean"}


def answers(right: int) -> list[int]:
    return [label if at < right else (label + 1) % 4 for at, label in enumerate(LABELS)]


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Zero-shot and two methods on three datasets with two seeds; TDA takes twice the time."""
    right = {
        ("zero_shot", "toy@fog:3"): (10, 10),
        ("zero_shot", "toy@contrast:3"): (12, 12),
        ("zero_shot", "toy"): (18, 18),
        ("tda", "toy@fog:3"): (12, 14),
        ("tda", "toy@contrast:3"): (11, 11),
        ("tda", "toy"): (18, 18),
        ("tent", "toy@fog:3"): (9, 9),
        ("tent", "toy@contrast:3"): (8, 8),
        ("tent", "toy"): (16, 18),
    }
    found = []
    for (method, dataset), counts in right.items():
        for seed, count in enumerate(counts):
            folder = make_run(tmp_path, method, LABELS, answers(count), dataset=dataset, seed=seed)
            rate = {"images_per_second": 50.0 if method == "tda" else 100.0, "seconds": 1.0}
            about = {"device_name": "toaster", "versions": {"torch": "9.9"}}
            record = replace(load_record(folder), throughput=rate, environment=about)
            record.save(folder)
            found.append(record)
    return found


def cells(table: str, method: str) -> Sequence[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| `{method}`")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_headline_has_means_worst_clean_and_cost(records: list[Record]) -> None:
    settings = read_settings(records, ROLES)
    table = headline(settings, settings)
    assert cells(table, "zero_shot") == ["55.00", "–", "90.0", "50.00", "–", "90.0", "1 ×"]
    assert cells(table, "tda") == [
        *("60.00 (+5.00)", "-5.00", "+0.0"),  # of fog +15 and contrast -5
        *("65.00 (+15.00)", "+15.00", "+0.0", "2 ×"),  # dev is left out
    ]
    assert cells(table, "tent")[2] == "-5.0"
    assert "bundled set, 2 shifts" in table and "real tower, 1 shifts" in table
    alone = headline(settings, [])
    assert cells(alone, "tda") == ["60.00 (+5.00)", "-5.00", "+0.0", "2 ×"]


def test_the_table_goes_between_its_marks() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert insert_headline(text, "| new |") == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"
    with pytest.raises(ValueError, match="needs a line"):
        insert_headline("no marks", "| new |")


def test_packed_records_are_small_and_say_the_same(records: list[Record], tmp_path: Path) -> None:
    path = tmp_path / "packed.json"
    path.write_text(pack_records(records), encoding="utf-8")
    assert unpack_records(path) == [
        replace(r, metrics={k: v for k, v in r.metrics.items() if k != "per_class"})
        for r in records
    ]
    runs = [run for run in find_runs([tmp_path])[0] if run.folder is not None]
    whole, packed = compare(runs), compare(find_runs([path])[0])
    for key, cell in whole.cells.items():
        assert (packed.cells[key].mean, packed.cells[key].gain) == (cell.mean, cell.gain)
        assert packed.cells[key].test is None
    assert whole.overall("tda").worst == (pytest.approx(-5.0), "toy@contrast:3")  # type: ignore[comparison-overlap]
    assert whole.overall("tda").cost == pytest.approx(2.0)


def test_pages_list_methods_streams_and_sources(records: list[Record], tmp_path: Path) -> None:
    settings = read_settings(records, ROLES)
    (tmp_path / "tda.md").touch()
    page = methods_page(settings, settings, settings, tmp_path)
    assert "[`tda`](tda.md)" in page
    assert "`tda` +5.00." not in page and "`tda` +5.00" in page
    assert "| fog:3 | contrast:3 (dev) | toy (clean) |" in page.replace("toy@", "")
    assert "2025-01-01, toaster, torch 9.9" in " ".join(page.split())
    assert "`domain_norm`" in page.partition("## What was not run")[2]
    assert "+5.00 ± 14.14" in ablation_page(settings)


def test_the_grids_of_the_package_can_be_read() -> None:
    for name in {name for names in GRIDS.values() for name in names}:
        specs = read_grid(packaged_grid(name), root="/data")
        assert {spec.method for spec in specs} > {"zero_shot"}
        roles = {id.replace(ROOT, "/data") for id in grid_roles(packaged_grid(name))}
        assert roles == {spec.dataset for spec in specs}
    found = list(grid_roles(packaged_grid("bundled")).values())
    assert [found.count(r) for r in ("report", "dev", "clean")] == [22, 8, 1]


def on_stream(record: Record, top1: float | None = None, **changes: Any) -> Record:
    stream = {**record.settings["stream"], **changes}
    metrics = dict(record.metrics) | ({} if top1 is None else {"top1": top1, "auroc": top1 / 2})
    return replace(record, settings={**record.settings, "stream": stream}, metrics=metrics)


def board(records: list[Record], folder: Path) -> str:
    return leaderboard_page({"Toys": (records, leaderboard.board_rows(records, {}))}, folder)


def test_the_board_says_who_wins_where(
    records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two sets with few classes TDA gains 20 and loses 2, Tent 4 and 6 in half the time."""
    top1 = {"zero_shot": (50.0, 50.0), "tda": (70.0, 48.0), "tent": (54.0, 56.0)}
    few = [
        on_stream(r, top1[r.method][r.dataset != "toy@fog:3"], order="keff", present=[1, 4])
        for r in records
        if r.dataset != "toy"
    ]
    unknown = [on_stream(r, top1[r.method][1], unknown="junk") for r in few[::4]]
    page = board([*records, *few, *unknown], tmp_path)
    head = next(line for line in page.splitlines() if line.startswith("| method"))
    names = [name.strip() for name in head.strip("|").split("|")][1:]
    found = {m: dict(zip(names, cells(page, m), strict=True)) for m in top1}
    assert found["tda"]["few classes"] == "**+9.0** (toy@contrast:3 ▼-2.0)"
    assert found["tent"]["few classes"] == "+5.0 (toy@fog:3 +4.0)"
    assert (found["tda"]["weather"], found["tda"]["digital"]) == ("**+15.0**", "▼-5.0")
    assert (found["tda"]["clean"], found["tda"]["noise"]) == ("+0.0", "–")
    assert (found["tent"]["open set"], found["tent"]["open set (AUROC)"]) == (
        "**+6.0**",
        "**+3.0**",
    )
    assert (found["zero_shot"]["digital"], found["zero_shot"]["open set"]) == ("60.0", "50.0")
    assert (found["tda"]["cost"], found["tent"]["cost"]) == ("2 ×", "1 ×")
    advice = " ".join(page.partition("## What to take")[2].split())
    assert (
        "**few classes**: Highest gain: `tda` (+9.0); within noise of it: `tent` (+5.0). Below "
        "zero-shot on average: none; on no set: `tent` (+5.0). `tda` takes 2 × the time of "
        "zero-shot; for at most 1.5 ×: `tent` (+5.0)." in advice
    )
    assert "**digital**: No method gains: take zero-shot. The most is lost by: `tent` " in advice
    assert "**noise**: Nothing is recorded." in advice
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
    rows = leaderboard.board_rows([*records, *few], {})
    drawn = fromstring(leaderboard_figure.leaderboard_figure({"Toys & co": rows}))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in drawn.iter(f"{space}text")]
    assert "Toys & co" in texts and texts.index("tda") < texts.index("tent")
    bars = {rect[0].text: rect for rect in drawn.iter(f"{space}rect") if len(rect)}
    assert list(bars)[:2] == ["tda, clean: +0.0, lowest +0.0", "tent, clean: -5.0, lowest -5.0"]
    zero = float(bars["tent, clean: -5.0, lowest -5.0"].attrib["y"])
    for about, bar in bars.items():
        gain = float(re.findall(r"[-+][\d.]+", str(about))[0])
        height, top = float(bar.attrib["height"]), float(bar.attrib["y"])
        assert height == pytest.approx(abs(gain) * leaderboard_figure.POINT, abs=0.4)
        assert top == pytest.approx(zero - (height if gain > 0 else 0), abs=0.4)
    assert "tda, few classes: +3.3, lowest -5.0" in bars
    ticks = [path.attrib["d"] for path in drawn.iter(f"{space}path")]
    place = bars["tda, few classes: +3.3, lowest -5.0"].attrib["x"]
    assert f"M{int(place) + 1} {zero + 5 * leaderboard_figure.POINT:.1f}h7" in ticks
    kinds = len(leaderboard_figure.KINDS)
    assert len(bars) == 2 * 4 and texts.count("×") == 2 * (kinds - 4)


def test_rows_of_fewer_images_give_no_advice(records: list[Record], tmp_path: Path) -> None:
    small = [
        replace(on_stream(r, limit=5), images=5) if r.method == "tda" else r for r in records
    ] + [replace(on_stream(r, limit=5), images=5) for r in records if r.method == "zero_shot"]
    page = board(small, tmp_path)
    assert cells(page, "tda")[4] == "+15.0°" and cells(page, "tda")[-1] == "3 × 5"
    assert cells(page, "zero_shot")[4] == "50.0" and cells(page, "tent")[-1] == "3 × 20"
    assert "**weather**: No method gains: take zero-shot." in page
    assert "**Not recorded yet.**" in board([], tmp_path)


@pytest.mark.parametrize("grid", GRIDS["leaderboard"])
def test_the_grids_of_the_board_fill_every_column(grid: str) -> None:
    """With every method that can run there, and each beside zero-shot on the same images."""
    specs = read_grid(packaged_grid(grid), root=ROOT)
    lacking = TEXT_CAPABILITIES if specs[0].text_features else frozenset()
    able = {e.name for e in method_entries() if e.fit is None and not e.adapter.needs & lacking}
    assert {s.method for s in specs} == able
    assert {zero_shot(spec) for spec in specs} <= set(specs)
    kinds, roles = set(), grid_roles(packaged_grid(grid))
    for spec in specs:
        stream: dict[str, Any] = {"order": spec.order, "batch_size": spec.batch_size}
        stream |= {"unknown": spec.unknown} if spec.unknown else {}
        kinds.add(stream_kind(Record("", {"dataset": spec.dataset, "stream": stream}), roles))
    assert kinds == {kind for kind, _ in COLUMNS.values()}


def test_noise_is_told_by_paired_runs() -> None:
    def runs(*gains: float) -> dict[tuple[str, int], float]:
        return {("set", seed): gain for seed, gain in enumerate(gains)}

    assert within_noise(runs(3, 4, 5), runs(1, 6, 4))  # differences 2, -2, 1: 0.33 ± 1.2
    assert not within_noise(runs(3, 4, 5), runs(1, 1.9, 3.1))  # 2, 2.1, 1.9: 2.0 ± 0.06
    assert not within_noise(runs(3), runs(2.9))  # one run says nothing of noise


@pytest.mark.parametrize("page", GRIDS)
def test_pages_are_what_the_records_say(page: str) -> None:
    pages = ResultsPages(
        REPOSITORY / "docs/results",
        REPOSITORY / "README.md",
        REPOSITORY / "docs/methods/README.md",
    )
    if page != "leaderboard" and not pages.records(GRIDS[page][0]).exists():
        with pytest.raises(UserError, match="no records"):
            pages.texts(page)
        return
    for path, text in pages.texts(page).items():
        assert path.read_text(encoding="utf-8") == text, f"run `cliquetta reproduce {page}`"


def test_the_readme_has_a_place_for_the_table() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert re.search(f"{re.escape(BEGIN)}\\n\\| method .*{re.escape(END)}", text, re.DOTALL)
