"""Programs and settings stand in the pages of methods as the code says them."""

from pathlib import Path

from benchmarks.results.method_pages import (
    BEGIN,
    END,
    RUN,
    SETTINGS,
    method_files,
    page_of,
    settings_table,
    write_page,
)
from cliquetta.methods.building.index import INDEX_FILE
from cliquetta.methods.building.registry import get_method, method_entries

REPOSITORY = Path(__file__).parents[3]
PAGE = """# TDA

## How to run it

A word on it.

## When to use it

Always.

## Reference

Its paper.
"""


def test_pages_and_index_are_what_the_code_says() -> None:
    index = REPOSITORY / INDEX_FILE
    for path, text in method_files(REPOSITORY / "docs/methods", index).items():
        known = path.read_text(encoding="utf-8")
        assert known == text, (
            f"run `python -m benchmarks.results methods --overwrite`: {path}"
        )


def test_no_page_of_a_method_has_an_empty_section() -> None:
    for entry in method_entries():
        page = page_of(entry.name, REPOSITORY / "docs/methods")
        assert page is not None
        for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            title, _, body = section.partition("\n")
            assert body.strip() or title == "What it costs and gains", (
                f"{page.name}: {title}"
            )


def test_written_parts_stand_at_the_head_of_their_sections_and_are_renewed() -> None:
    entry = get_method("tda")
    once = write_page(PAGE, [entry])
    run = once.partition(f"## {RUN}\n")[2].partition("\n## ")[0]
    assert run.startswith(f"\n{BEGIN}\n") and 'create_method("tda"' in run
    assert run.endswith(f"{END}\n\nA word on it.\n")
    assert (
        once.index("## When")
        < once.index(f"## {SETTINGS}")
        < once.index("## Reference")
    )
    assert (
        "| `positive_alpha` | float" in once and "`pets` (tuned by the authors)" in once
    )
    assert write_page(once, [entry]) == once
    assert write_page(once.replace("| float", "| int"), [entry]) == once


def test_a_program_of_the_page_replaces_ours() -> None:
    own = PAGE.replace("A word on it.", "```python\nmine()\n```")
    page = write_page(own, [get_method("tda")])
    assert "create_method" not in page and "mine()" in page and "positive_alpha" in page
    assert write_page(page, [get_method("tda")]) == page


def test_lines_of_programs_fit_eighty_columns() -> None:
    for entry in method_entries():
        page = write_page("# Method\n", [entry])
        programs = page.split("```")[1::2]
        assert all(
            len(line) <= 80 for text in programs for line in text.splitlines()
        ), entry.name


def test_defaults_are_short() -> None:
    assert "`1.83036`" in settings_table(get_method("scap"))
