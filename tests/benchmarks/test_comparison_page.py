"""The comparison page: numbers by hand, honest gaps, and the page on disk is what records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import comparison_page
import pytest
from comparison import headline

from cliquetta.methods.registry import list_methods
from tests.benchmarks.made_cells import make_cell, make_cells, write_folder

SPEED = {
    "about": "2026-01-02, a machine: a model, fp32, N=10, `python benchmarks/methods_speed.py`",
    "classes": 10,
    "rows": [
        {"method": "tent", "views": 1, "x encoding": 2.741},
        {"method": "zero", "views": 64, "x encoding": 1.0139},
        {"method": "scap", "views": 1, "x encoding": 13.39},
    ],
}


@pytest.fixture
def records(tmp_path: Path) -> list[str]:
    """Arguments that name made-up records."""
    bundled = write_folder(tmp_path / "bundled", make_cells())
    cells = [c for c in make_cells() if c["method"] in ("zero_shot", "tent")]
    real = write_folder(tmp_path / "real", cells, {"tpt": "needs text, which weights lacks"})
    speed = tmp_path / "speed.json"
    speed.write_text(json.dumps(SPEED))
    return ["--bundled", str(bundled), "--real", str(real), "--speed", str(speed)]


def make(tmp_path: Path, arguments: list[str]) -> str:
    out = tmp_path / "page.md"
    assert comparison_page.main([*arguments, "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def row(page: str, label: str, table: int = 0) -> list[str]:
    lines = [line for line in page.splitlines() if re.match(rf"\| \[?`{label}`", line)]
    return [cell.strip() for cell in lines[table].strip("|").split("|")]


def section(page: str, title: str) -> str:
    """The text under a heading, on one line."""
    return " ".join(page.split(f"## {title}\n")[1].split("\n## ")[0].split())


def test_rows_hold_what_the_cells_say(tmp_path: Path, records: list[str]) -> None:
    page = make(tmp_path, records)
    assert row(page, "tent")[2:] == [
        "joint", "LayerNorms", "55.00 ± 1.41", "+5.00 ± 8.49", "-1.50 (clean)", "20.5", "2.74",
        "3 × 100",
    ]  # fmt: skip
    assert row(page, "zero")[2:] == [
        "independent", "16 views", "*52.50 ± 0.00*", "+2.50 ± 2.12", "+0.00 (clean)", "10.0",
        "1.01 × 64 views", "3 × 50",
    ]  # fmt: skip
    assert row(page, "tda")[4:6] == ["*52.25 ± 0.71*", "+2.25 ± 1.06"]
    assert row(page, "tda")[8:] == ["–", "2 of 3 × 100, 3 of 6 runs"]
    assert row(page, "zero_shot")[4:8] == ["50.00 ± 0.00", "–", "–", "10.0"]
    assert row(page, "tent", 1)[1:6] == [
        "55.00 ± 1.41", "+5.00 ± 8.49", "-1.00", "-1.50 (clean)", "20.5"
    ]  # fmt: skip
    assert row(page, "tent", 2)[1:] == ["51.0 (+11.0)", "59.0 (-1.0)", "88.5 (-1.5)"]
    assert row(page, "tda", 1)[1:] == ["41.5 (+1.5)", "63.0 (+3.0)", "–"]


def test_every_method_has_a_row_and_gaps_are_named(tmp_path: Path, records: list[str]) -> None:
    page = make(tmp_path, records)
    for entry in list_methods():
        cells = row(page, entry.name)
        assert len(cells) == 10 and cells[1] == entry.summary
        recorded = entry.name in ("zero_shot", "tent", "tda", "zero")
        assert (cells[4] == "not recorded") is not recorded
    assert row(page, "scap")[8] == "13.4"
    missing = section(page, "What was not run")
    assert "`tda` (3 of 6 runs): the recording stopped" in missing
    assert "Real tower: `tpt`: needs text, which weights lacks." in missing
    assert re.search(r"Real tower: [^:]*`coop`[^:]*: learn through the text tower", missing)
    assert re.search(r"Real tower: `tip_adapter`, `tip_adapter_f`: are fitted", missing)
    choice = section(page, "How to read and choose")
    assert "(joint). `tent` +5.00. Not recorded: `batclip`" in choice
    assert "(sequential). Not on all sets: `tda`. Not recorded: `dart`, `dmn`." in choice
    assert "bundled set and never more than 0.5 points below zero-shot: `zero`." in choice


def test_p_is_given_from_six_sets_on(tmp_path: Path) -> None:
    cells = [make_cell("zero_shot", f"s{i}", 0, 50, 0) for i in range(9)]
    cells += [make_cell("tent", f"s{i}", 0, 52, 2) for i in range(9)]
    page = make(tmp_path, ["--bundled", str(write_folder(tmp_path / "nine", cells))])
    assert row(page, "tent")[5] == "+2.00 ± 0.00 (p 0.0039)"  # 2 of 2^9
    assert [len(row(page, "tent", table)) for table in (1, 2)] == [6, 5]  # no table too wide
    assert "Nothing is recorded." in section(page, "The real ViT-B/16 tower")


def test_later_folders_count_and_configs_do_not_mix(tmp_path: Path) -> None:
    old = write_folder(tmp_path / "old", make_cells())
    tent = [c | {"config": {"rate": 1}} for c in make_cells() if c["method"] == "tent"]
    better = [c | {"top1": c["top1"] + 1, "gain": c["gain"] + 1} for c in tent]
    new = write_folder(tmp_path / "new", better)
    page = make(tmp_path, ["--bundled", str(old), str(new)])
    assert row(page, "tent")[4:6] == ["56.00 ± 1.41", "+6.00 ± 8.49"]
    part = write_folder(tmp_path / "part", tent[:2])
    with pytest.raises(SystemExit, match="tent was run with different configs"):
        make(tmp_path, ["--bundled", str(old), str(part)])
    with pytest.raises(SystemExit, match=r"no cells\.jsonl"):
        make(tmp_path, ["--bundled", str(tmp_path)])


def test_other_settings_get_tables_of_their_own(tmp_path: Path) -> None:
    stream = [c | {"setting": "micro, stream long"} for c in make_cells() if c["method"] != "tda"]
    both = write_folder(tmp_path / "both", [*stream, *make_cells()])
    more = write_folder(tmp_path / "more", make_cells()[:6])
    page = make(tmp_path, ["--bundled", str(both), "--more", str(more)])
    assert "3 of 6 runs" in row(page, "tda")[9]  # the setting with most methods comes first
    others = section(page, "Other settings")
    assert "### micro, stream long |" in others.replace("  ", " ")
    assert "### more: micro, fp32, stream iid, batch 64 |" in others


def test_a_page_is_made_again_and_checked_by_what_it_names(
    tmp_path: Path, records: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = make(tmp_path, records)
    out = tmp_path / "page.md"
    assert comparison_page.main(["--out", str(out), "--check"]) == 0
    out.write_text(page.replace("+5.00 ± 8.49", "+9.00 ± 8.49"), encoding="utf-8")
    assert comparison_page.main(["--out", str(out), "--check"]) == 1
    assert "is not what the records say" in capsys.readouterr().out
    assert comparison_page.main(["--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == page
    out.write_text("no command", encoding="utf-8")
    with pytest.raises(SystemExit, match="names no command"):
        comparison_page.main(["--out", str(out), "--check"])


def test_the_page_of_the_repository_is_what_its_records_say() -> None:
    assert comparison_page.main(["--check"]) == 0, "run python benchmarks/comparison_page.py"
    text = comparison_page.PAGE.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (comparison_page.PAGE.parent / target).exists(), target
    assert text.count("](") > len(list_methods())


def test_the_readme_gets_its_first_table(tmp_path: Path, records: list[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{headline.BEGIN}\nold\n{headline.END}\nafter\n")
    both = ["--corruptions", records[1], "--shifts", records[3], "--readme", str(readme)]
    make(tmp_path, [*records, *both])
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    # tent: 55.00 over noise and fog, fog alone where development shifts do not count
    assert row(text, "tent") == [
        "`tent`", "55.00 (+5.00)", "-1.00", "-1.5", "59.00 (-1.00)", "-1.00", "-1.5", "2.74 ×"
    ]  # fmt: skip
    assert row(text, "zero_shot")[1:5] == ["50.00", "–", "90.0", "60.00"]
    assert "bundled set, 2 shifts" in text and "real tower, 1 shifts" in text
    assert not re.search(r"`zero`|`tda`", text)  # not in both worlds
    page = ["--out", str(tmp_path / "page.md"), "--readme", str(readme), "--check"]
    assert comparison_page.main(page) == 0
    readme.write_text(text.replace("55.00", "56.00"))
    assert comparison_page.main(page) == 1


def test_a_readme_without_marks_is_left_alone(tmp_path: Path, records: list[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no table here\n")
    both = ["--corruptions", records[1], "--shifts", records[3], "--readme", str(readme)]
    with pytest.raises(SystemExit, match="headline"):
        comparison_page.main([*records, *both, "--out", str(tmp_path / "page.md")])
    assert readme.read_text() == "no table here\n"
