"""One page for any number of runs: self-contained, small enough to mail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cliquetta.atomic import write_atomically
from cliquetta.evaluation.record import Record, Run
from cliquetta.model.attention import Kind
from cliquetta.model.names import MICRO, MICRO_NOTE
from cliquetta.report import sections as parts
from cliquetta.report.curves import find_curves
from cliquetta.report.embedding import How
from cliquetta.report.evidence_section import Amounts, evidence_section
from cliquetta.report.markup import PageFigures, count, esc, frame
from cliquetta.report.runs import ReportedRun, RunGroup, shown_groups
from cliquetta.report.style import Figure, to_file


@dataclass(frozen=True)
class Choices:
    """Choices of the reader."""

    title: str = ""
    attention: Kind = "class"
    map: How = "auto"
    limit: int = 3_000_000  # bytes that a page may have


_AMOUNTS = (
    Amounts(),
    Amounts(cliques=4, changed=16, maps=3, runs=4, datasets=16),
    Amounts(cliques=3, changed=8, maps=2, runs=2, datasets=8),
    Amounts(cliques=2, changed=8, maps=1, runs=1, datasets=4),
    Amounts(runs=0, datasets=1),
    Amounts(runs=0, datasets=0),
)
"""Tried in turn until the page is small enough."""


@dataclass(frozen=True)
class Page:
    """A page and the figures on it, by name."""

    html: str
    figures: Mapping[str, Figure]


def build_page(
    runs: Sequence[ReportedRun],
    unfinished: Sequence[Run] = (),
    choices: Choices | None = None,
) -> Page:
    """Build the report of ``runs``; where it would grow too large, later ones get less detail."""
    choices = choices or Choices()
    figures = PageFigures()
    groups = shown_groups(runs)
    html = ""
    for amounts in _AMOUNTS:
        html = _document(runs, groups, unfinished, choices, figures, amounts)
        if len(html.encode()) <= choices.limit:
            break
    return Page(html, figures.drawn)


def write_page(page: Page, path: Path | str) -> int:
    """Write the page and return its size in bytes."""
    data = page.html.encode()
    write_atomically(Path(path), data)
    Path(path).chmod(0o644)  # to be shared: temporary files are private
    return len(data)


def write_figures(page: Page, folder: Path | str) -> list[Path]:
    """Write every figure of the page as PNG and PDF; returns the files."""
    written = []
    for name, figure in page.figures.items():
        for kind in ("png", "pdf"):
            path = Path(folder) / f"{name}.{kind}"
            write_atomically(path, to_file(figure, kind))
            path.chmod(0o644)
            written.append(path)
    return written


def _document(
    runs: Sequence[ReportedRun],
    groups: Sequence[RunGroup],
    unfinished: Sequence[Run],
    choices: Choices,
    figures: PageFigures,
    amounts: Amounts,
) -> str:
    """Render the page with so much detail."""
    results = parts.headline(runs) + parts.results(runs)
    sections: list[tuple[str, str]] = [("Results", results)]

    # Every stream of images has a section, with the evidence of a few runs.
    shown = 0
    left_out = 0
    for index, group in enumerate(groups):
        body = parts.group_section(group, figures, draw=index < amounts.datasets)
        for run in group.runs:
            if run.evidence is None or not run.evidence.batches or run.plain:
                continue
            if shown == amounts.runs:
                left_out += 1
                continue
            shown += 1
            label = group.labels[run.id]
            section = evidence_section(
                run,
                label,
                run.evidence,
                amounts,
                figures,
                kind=choices.attention,
                how=choices.map,
            )
            if section:
                body += f"<h3>Inside {esc(label)}</h3>{section}"

        of_dataset = sum(run.record.dataset == group.dataset for run in runs)
        hidden = of_dataset - len(group.runs)
        if hidden:
            words = f"One run per method is shown here; {hidden:,} more are among the results."
            body = f'<p class="note">{words}</p>{body}'
        if body:
            sections.append((group.dataset, body))

    curves = find_curves(runs)
    if curves:
        sections.append(("Settings", parts.curves_section(curves, figures)))
    sections.append(("How to repeat it", parts.repeat_section(runs)))

    notes = unlearned_text([run.record for run in runs])
    if any(run.record.settings["model"]["id"] == MICRO for run in runs):
        notes.append(f"{MICRO_NOTE}.")
    if unfinished:
        names = ", ".join(run.record.id for run in unfinished[:3])
        notes.append(f"{count(len(unfinished), 'unfinished run')} left out: {names}.")
    less = []
    if left_out:
        less.append(f"the galleries of {count(left_out, 'run')}")
    undrawn = len(groups) - amounts.datasets
    if undrawn > 0:
        less.append(f"the figures of {count(undrawn, 'dataset')}")
    if less:
        what = f"To keep the page small it leaves out {' and '.join(less)}"
        notes.append(f"{what}: report on fewer runs to see them.")
    return frame(choices.title or _title(runs), _lead(runs), sections, notes)


def _title(runs: Sequence[ReportedRun]) -> str:
    """Name the method and the dataset, or how many there are."""
    methods = {run.name for run in runs}
    if len(methods) == 2:  # one, beside what it is compared with
        methods = {run.name for run in runs if not run.plain} or methods
    what = f"{len(methods)} methods"
    if len(methods) == 1:
        (what,) = methods
    datasets = {run.record.dataset for run in runs}
    where = f"{len(datasets)} datasets"
    if len(datasets) == 1:
        (where,) = datasets
    return f"{what} on {where}"


def _lead(runs: Sequence[ReportedRun]) -> str:
    """Say how many runs there are, with which models, and when the last one finished."""
    ids = dict.fromkeys(str(run.record.settings["model"]["id"]) for run in runs)
    models = ", ".join(ids)
    last = max(run.record.finished for run in runs)
    when = last.replace("T", " ")[:16]
    version = runs[0].record.environment.get("versions", {}).get("cliquetta", "")
    numbered = f" {version}" if version[:1].isdigit() else ""
    return (
        f"{count(len(runs), 'run')} of CliqueTTA{numbered} with {models}; the last one finished "
        f"{when} UTC."
    )


def unlearned_text(records: Sequence[Record]) -> list[str]:
    """Remark on runs that were to learn text prompts and could not."""
    fine = {"learned", "not asked for"}
    remarks = {
        f"{record.method} learned no text prompt on {record.dataset}: "
        f"{record.notes['text_prompts']}."
        for record in records
        if record.notes.get("text_prompts", "learned") not in fine
    }
    return sorted(remarks)
