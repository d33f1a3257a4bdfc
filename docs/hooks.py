"""Parts of the documentation site that come from the code, so that no page repeats it by hand.

The navigation lists every registered method; a method's page gets its snippet, its settings and its
recorded figures; the API page lists ``cliquetta.__all__``.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cliquetta
from cliquetta.methods.building.config import config_fields
from cliquetta.methods.registry import MethodEntry, method_entries

DOCS = Path(__file__).parent
_PLAIN = """\
from cliquetta import create_method, create_model

model = create_model("micro")  # comes with the package; or "ViT-B/16", "hf:...", a path
method = create_method("{name}", model, ["cat", "dog", "horse"])
prediction = method.predict(["photos/1.jpg", "photos/2.jpg", "photos/3.jpg"])
print(prediction.logits.argmax(dim=1))
"""
_FITTED = """\
from cliquetta import FewShot, create_model, fit_method, get_dataset, load_method

model = create_model("micro")
dataset = get_dataset("bundled-fewshot")  # labelled images, 16 per class
few_shot = FewShot.from_dataset(dataset, 16, model.preprocess)
method = fit_method("{name}", model, dataset.prompts, few_shot)
method.save("{name}.safetensors")  # load_method("{name}.safetensors", model) builds it again
print(method.predict(["photos/1.jpg", "photos/2.jpg"]).logits.argmax(dim=1))
"""


def page_of(name: str) -> str | None:
    """The page of a method, relative to docs/: its own, or the one whose heading names it."""
    if (DOCS / "methods" / f"{name}.md").exists():
        return f"methods/{name}.md"
    for path in sorted((DOCS / "methods").glob("*.md")):
        if f"`{name}`" in path.read_text(encoding="utf-8").splitlines()[0]:
            return f"methods/{path.name}"
    return None


def snippet(entry: MethodEntry) -> str:
    """A program that runs a method on three photos; a test runs it."""
    return (_FITTED if entry.fit else _PLAIN).format(name=entry.name)


def command(entry: MethodEntry) -> str:
    """The method on the command line."""
    predict = "cliquetta predict photos/ --classes cat,dog,horse --model ViT-B/16"
    if entry.fit is None:
        return f"{predict} --method {entry.name}"
    return (
        f"cliquetta fit --method {entry.name} --shots 16 --dataset bundled-fewshot "
        f"--out {entry.name}.safetensors\n"
        f"cliquetta evaluate --dataset bundled@fog:3 --fitted {entry.name}.safetensors"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def settings(entry: MethodEntry) -> str:
    """The table of a config's fields, and the names of its presets."""
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field in config_fields(entry.config):
        default = f"`{_cell(str(field.default))}`" if field.default != "" else "–"
        rows.append(f"| `{field.name}` | {_cell(field.type)} | {default} | {_cell(field.doc)} |")
    presets = ", ".join(
        f"`{name}`{' (tuned by the authors)' if name in entry.tuned_by_authors else ''}"
        for name in entry.presets
    )
    table = "\n".join(rows) if len(rows) > 2 else "None."
    return table + (f"\n\nPresets: {presets}." if presets else "")


def recorded(entry: MethodEntry) -> str:
    """The rows of this method in the tables of the comparison, zero-shot beside it."""
    page = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
    parts: list[str] = []
    heading = ""
    for block in re.split(r"\n\n+", page):
        lines = block.splitlines()
        if lines[0].startswith("#"):
            heading = lines[0].lstrip("# ")
        if len(lines) > 2 and re.fullmatch(r"[|\s:-]+", lines[1]):
            own = [line for line in lines[2:] if _names(line, entry.name)]
            plain = [line for line in lines[2:] if _names(line, "zero_shot")]
            if own:
                both = plain + [line for line in own if line not in plain]
                parts.append("\n".join([f"*{heading}*", "", *lines[:2], *both]))
    if not parts:
        return "Not in the recorded comparison yet."
    more = "\n\nColumns are explained in [the comparison](README.md)."
    return "\n\n".join(parts[:3]) + more


@cache
def _boards() -> dict[str, Any]:
    """The rows of every recorded board, by title."""
    from cliquetta.evaluation.grid import grid_roles, packaged_grid
    from cliquetta.evaluation.record import unpack_records
    from cliquetta.report.leaderboard import BOARDS, board_rows

    files = {grid: DOCS / "results" / f"{grid}.json" for grid in BOARDS}
    return {
        BOARDS[grid]: board_rows(unpack_records(path), grid_roles(packaged_grid(grid)))
        for grid, path in files.items()
        if path.exists()
    }


def board_sentences(entry: MethodEntry) -> str:
    """Where a method gains and where it loses, by the recorded boards: its paper reports gains."""
    from cliquetta.report.leaderboard import method_sentence

    found = [
        f"*{title}*: {sentence}"
        for title, rows in _boards().items()
        if entry.name != "zero_shot" and (sentence := method_sentence(rows, entry.name))
    ]
    head = (
        "On [the board of streams](../results/leaderboard.md), in points, mean over sets and seeds:"
    )
    return "\n\n".join([head, *found]) if found else ""


def _names(row: str, name: str) -> bool:
    return re.match(rf"\| \[?`{name}(:paper)?`", row) is not None


def method_page(text: str, entries: Sequence[MethodEntry]) -> str:
    """A page with its generated parts; a snippet of the page's own replaces the usual one."""
    usual = [f"```python\n{snippet(e)}```\n\n```\n{command(e)}\n```" for e in entries]
    tables = [f"`{e.name}`:\n\n{settings(e)}" for e in entries]
    text = _fill(text, "How to run it", usual, unless="```python")
    text = _fill(text, "Settings", tables if len(entries) > 1 else [settings(entries[0])])
    gains = [part for e in entries for part in (recorded(e), board_sentences(e)) if part]
    return _fill(text, "What it costs and gains", gains)


def _fill(text: str, title: str, generated: Sequence[str], unless: str = "\0") -> str:
    """Put generated blocks at the head of a section, which is added where a page has none."""
    heading = f"\n## {title}\n"
    if heading not in text:
        place = text.find("\n## Reference\n")
        place = len(text) if place < 0 else place
        text = f"{text[:place].rstrip()}\n{heading}\n{text[place:]}"
    before, own = text.split(heading, 1)
    section = own.split("\n## ", 1)[0]
    blocks = [] if unless in section else generated
    return before + heading + "\n" + "\n\n".join([*blocks, own.lstrip("\n")])


def _without_outside_links(text: str, page: Path) -> str:
    """Links to files of the repository that are no pages of the site become plain words."""

    def keep(match: re.Match[str]) -> str:
        target = (page.parent / match[2].split("#")[0]).resolve()
        pages = target.suffix in {".md", ".png", ".svg"} and target.is_relative_to(DOCS)
        excluded = target.is_relative_to(DOCS / "results") and target.parent != DOCS / "results"
        return match[0] if pages and not excluded else match[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", keep, text)


def api_page() -> str:
    """The reference of every public name."""
    homes = [(getattr(cliquetta, name).__module__, name) for name in cliquetta.__all__]
    head = ["# API reference", "Everything here is imported from `cliquetta`."]
    return "\n\n".join([*head, *(f"::: {module}.{name}" for module, name in homes)])


def on_config(config: Any) -> Any:
    """Fill the navigation with the pages of methods."""
    pages = {page_of(entry.name) for entry in method_entries()} - {None}
    listed = [{"The methods compared": "methods/README.md"}, *sorted(str(p) for p in pages)]
    for part in config.nav:
        if "Methods" in part:
            part["Methods"] = listed
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated as a whole."""
    from mkdocs.structure.files import File

    changes = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "api.md", content=api_page()))
    files.append(File.generated(config, "changes.md", content=changes))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the pages of methods; links to files of the repository become plain names."""
    entries = [e for e in method_entries() if page_of(e.name) == page.file.src_uri]
    if entries:
        markdown = method_page(markdown, entries)
    return _without_outside_links(markdown, DOCS / page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Roles of reStructuredText in docstrings leave only what they name."""
    return re.sub(r":(?:class|meth|func|data|attr|mod):(?=<code>)", "", html)
