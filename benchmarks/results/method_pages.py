"""The parts of a method's page that follow from the code: how to run it, and its settings.

They stand in the files between two marks, so that a reader of the repository sees them
as well. ``python -m benchmarks.results methods`` writes them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import COMMAND
from cliquetta.methods.building.config import config_fields
from cliquetta.methods.building.index import index_text
from cliquetta.methods.building.registry import MethodEntry, method_entries

BEGIN = f"<!-- written by `{COMMAND} methods` -->"
END = "<!-- /written -->"
RUN = "How to run it"
SETTINGS = "Settings"
_REFERENCE = "\n## Reference\n"
_WRITTEN = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END) + r"\n*", re.DOTALL)
_PLAIN = """\
from cliquetta import create_method, create_model

model = create_model("micro")  # or "ViT-B/16", "hf:...", a path
method = create_method("{name}", model, ["cat", "dog", "horse"])
photos = ["photos/1.jpg", "photos/2.jpg", "photos/3.jpg"]
print(method.predict(photos).logits.argmax(dim=1))
"""
_FITTED = """\
from cliquetta import FewShot, create_model, fit_method, get_dataset

model = create_model("micro")
dataset = get_dataset("bundled-fewshot")  # labelled images, 16 per class
few_shot = FewShot.from_dataset(dataset, 16, model.preprocess)
method = fit_method("{name}", model, dataset.prompts, few_shot)
method.save("{name}.safetensors")  # for cliquetta.load_method
photos = ["photos/1.jpg", "photos/2.jpg"]
print(method.predict(photos).logits.argmax(dim=1))
"""
_PREDICT = """\
cliquetta predict photos/ --classes cat,dog,horse --model ViT-B/16 \\
    --method {name}
"""
_FIT = """\
cliquetta fit --method {name} --dataset bundled-fewshot --shots 16 \\
    --out {name}.safetensors
cliquetta evaluate --dataset bundled@fog:3 --fitted {name}.safetensors
"""


def page_of(name: str, folder: Path) -> Path | None:
    """Return the page of a method: its own, or the one whose heading names it.

    Args:
        name: A registered method.
        folder: Where the pages are.

    """
    page = folder / f"{name}.md"
    if page.exists():
        return page
    for path in sorted(folder.glob("*.md")):
        if f"`{name}`" in path.read_text(encoding="utf-8").partition("\n")[0]:
            return path
    return None


def snippet(entry: MethodEntry) -> str:
    """Return a program that runs a method on three photos; a test runs it."""
    return (_FITTED if entry.fit else _PLAIN).format(name=entry.name)


def command(entry: MethodEntry) -> str:
    """Return the method on the command line."""
    return (_FIT if entry.fit else _PREDICT).format(name=entry.name)


def settings_table(entry: MethodEntry) -> str:
    """Return the table of a config's fields, and the names of its presets."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    fields = config_fields(entry.config)
    for field in fields:
        default = "–"
        if field.default != "":
            default = f"`{_cell(_value(field.default))}`"
        cells = (f"`{field.name}`", _cell(field.type), default, _cell(field.doc))
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines) if fields else "None."
    presets = []
    for name in entry.presets:
        tuned = " (tuned by the authors)" if name in entry.tuned_by_authors else ""
        presets.append(f"`{name}`{tuned}")
    if not presets:
        return table
    return f"{table}\n\nPresets: {', '.join(presets)}."


def _value(default: object) -> str:
    """Write a default; a third as 0.333333."""
    return f"{default:.6g}" if isinstance(default, float) else str(default)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_page(text: str, entries: Sequence[MethodEntry]) -> str:
    """Return a page with its written parts renewed.

    Args:
        text: The page as it is.
        entries: The methods that it describes; a program of the page's own replaces
            ours.

    """
    programs = []
    tables = []
    for entry in entries:
        python = f"```python\n{snippet(entry)}```"
        shell = f"```sh\n{command(entry)}```"
        programs.append(f"{python}\n\n{shell}")
        of_which = f"`{entry.name}`:\n\n" if len(entries) > 1 else ""
        tables.append(of_which + settings_table(entry))
    plain = _WRITTEN.sub("", text)
    filled = _fill(plain, RUN, programs, unless="```python")
    return _fill(filled, SETTINGS, tables)


def _fill(
    text: str, title: str, blocks: Sequence[str], unless: str | None = None
) -> str:
    """Put blocks at the head of a section, which is added where a page has none."""
    heading = f"\n## {title}\n"
    if heading not in text:
        end = text.find(_REFERENCE)
        place = len(text) if end < 0 else end
        before = text[:place].rstrip()
        after = text[place:].lstrip()
        text = f"{before}\n{heading}\n{after}"
        text = text.replace(f"{heading}\n##", f"{heading}\n\n##")
    before, rest = text.split(heading, 1)
    section, _, _ = rest.partition("\n## ")
    if unless is not None and unless in section:
        return text
    written = "\n\n".join([BEGIN, *blocks, END])
    return f"{before}{heading}\n{written}\n\n{rest.lstrip()}"


def method_files(folder: Path, index: Path) -> dict[Path, str]:
    """Return the texts of all files that follow from the registered methods alone.

    Args:
        folder: Where the pages of methods are.
        index: The index of names and options that commands check their arguments with.

    Returns:
        The text of every page that is there, and of the index.

    """
    entries_of: dict[Path, list[MethodEntry]] = {}
    for entry in method_entries():
        page = page_of(entry.name, folder)
        if page is not None:
            entries_of.setdefault(page, []).append(entry)
    texts = {}
    for page, entries in entries_of.items():
        texts[page] = write_page(page.read_text(encoding="utf-8"), entries)
    options = {}
    for entry in method_entries():
        fields = [field.name for field in config_fields(entry.config)]
        options[entry.name] = (list(entry.presets), fields)
    texts[index] = index_text(options)
    return texts
