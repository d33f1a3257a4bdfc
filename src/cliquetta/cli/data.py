"""``cliquetta data doctor``: check a directory of datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.checks import check_classes, check_datasets, check_model
from cliquetta.cli.command import SKIPPED, Bounds, Common, split_list
from cliquetta.cli.console import Terminal, count, number

if TYPE_CHECKING:
    from cliquetta.data.doctor import Finding, Report
    from cliquetta.data.own_images import OwnImages
    from cliquetta.model.clip import CLIP

BATCH = 64
_CLASSES_SHOWN = 20  # rows of the table of classes
SIGNIFICANT = 0.01  # p value below which zero-shot is said to beat chance
EXAMPLES = """
cliquetta data doctor ~/data
cliquetta data doctor ~/data --only pets,eurosat --deep
cliquetta data doctor photos/
cliquetta data doctor photos/ --classes names.txt --model ViT-B/16
cliquetta data doctor csv:labels.csv --json
"""


def doctor(
    common: Common,
    data: Annotated[
        str,
        typer.Argument(
            help="Root directory of known datasets, one of them, or your own images: a folder, "
            "folder:PATH, csv:PATH or tar:PATH."
        ),
    ],
    deep: Annotated[
        bool,
        "Known datasets: open every image; slow, finds damaged files. Your own: always.",
    ] = False,
    only: Annotated[
        str | None, "Datasets to look for, comma-separated. (default: all)"
    ] = None,
    classes: Annotated[
        str | None,
        "Your own images: the class list to compare with (file, a,b,c, known list).",
    ] = None,
    model: Annotated[
        str | None,
        "Your own images: also compare zero-shot with chance (name or path).",
    ] = None,
    limit: Annotated[
        int, Bounds(1), "Images that zero-shot predicts, with --model."
    ] = 512,
    workers: Annotated[int, Bounds(0), "Threads that open images."] = 4,
) -> None:
    """Check directories of known datasets, or images of your own.

    Known datasets: which are there, in which layout, what is missing or wrong. Your
    own: images per class, files that cannot be read, duplicates, small images, names
    that the class list lacks, and with --model whether zero-shot beats chance.
    """
    own_id = own_data_id(data)
    if own_id is not None:
        check_datasets([own_id], None)
        if classes is not None:
            check_classes(classes)
        if model is not None:
            check_model(model)
        _examine_own(common, own_id, classes, model, limit, workers)
        return

    from cliquetta.data.doctor import examine

    root = Path(data).expanduser()
    ids = None if only is None else split_list(only, "datasets")
    with common.terminal.bars() as bars:

        def opened(id: str, done: int, total: int) -> None:
            bars.show(f"open {id}", done, total, "images")

        report = examine(root, ids=ids, deep=deep, workers=workers, on_image=opened)
    # A folder without any known dataset may hold images of one's own.
    nothing_known = ids is None and all(f.state == "missing" for f in report.findings)
    if nothing_known and has_images(root):
        _examine_own(common, f"folder:{data}", classes, model, limit, workers)
        return
    common.terminal.document(asdict(report))
    if not common.json:
        _show(common, report, named=ids is not None)
    if any(finding.opened and finding.opened.unreadable for finding in report.findings):
        raise typer.Exit(SKIPPED)


def own_data_id(data: str) -> str | None:
    """Return the id of data of one's own that are named as such; a table by its suffix."""
    if data.startswith(("folder:", "csv:", "tar:")):
        return data
    suffix = Path(data).suffix.lower()
    if suffix in (".csv", ".tsv", ".parquet"):
        return f"csv:{data}"
    return f"tar:{data}" if suffix == ".tar" else None


def has_images(folder: Path) -> bool:
    """Return whether there is any image in a folder or below it."""
    from cliquetta.data.files import walk_images

    return next(walk_images(folder), None) is not None


def _examine_own(
    common: Common,
    id: str,
    classes: str | None,
    model: str | None,
    limit: int,
    workers: int,
) -> None:
    """Check images of one's own and say what was found."""
    from cliquetta.data.own_images import USUAL_SIDE, examine_own
    from cliquetta.prompts.catalogue import read_prompts

    names = None if classes is None else read_prompts(classes).names
    clip = None if model is None else common.model(model)
    with common.terminal.bars() as bars:
        bars.show("open", 0, None)

        def opened(done: int, total: int) -> None:
            bars.show("open", done, total, "images")

        found = examine_own(
            id,
            classes=names,
            side=USUAL_SIDE if clip is None else clip.image_size,
            workers=workers,
            on_image=opened,
        )
    score = None
    can_score = bool(found.classes) and not found.unlisted
    if clip is not None and can_score and len(found.unreadable) < found.images:
        score = _score_zero_shot(clip, found, names, limit)
    document = asdict(found) | {"problems": found.problems, "zero_shot": score}
    common.terminal.document(document)
    if not common.json:
        _show_own(found, score, common.terminal)
    if found.unreadable:
        raise typer.Exit(SKIPPED)


def _score_zero_shot(
    model: "CLIP", found: "OwnImages", names: Sequence[str] | None, limit: int
) -> dict[str, float]:
    """Compare zero-shot with guessing, on some of the images in shuffled order."""
    from cliquetta.data.catalogue import get_dataset
    from cliquetta.data.files import RelabelledDataset
    from cliquetta.data.stream import Stream
    from cliquetta.evaluation.metrics import chance_p_value
    from cliquetta.evaluation.runner import evaluate
    from cliquetta.methods.building.registry import create_method

    dataset = get_dataset(found.id, classes=names)
    if names is not None:
        dataset = RelabelledDataset(dataset, names)
    method = create_method("zero_shot", model, dataset.prompts)
    stream = Stream(
        [dataset], model.preprocess, BATCH, limit=limit, device=model.device
    )
    record = evaluate(method, stream)
    right = round(record.metrics["top1"] / 100 * record.images)
    classes = len(dataset.names)
    return {
        "images": record.images,
        "top1": record.metrics["top1"],
        "chance": 100 / classes,
        "p": chance_p_value(right, record.images, classes=classes),
    }


def _show_own(
    found: "OwnImages", score: Mapping[str, float] | None, terminal: Terminal
) -> None:
    """Print the classes, the sizes, what is wrong, and zero-shot beside chance."""
    classes = sorted(found.classes, key=lambda name: -found.classes[name])
    rows = [(name, f"{found.classes[name]:,}") for name in classes[:_CLASSES_SHOWN]]
    if rows:
        columns = ("class", "images")
        terminal.table(columns, rows, title="Images per class", right=("images",))
    others = classes[_CLASSES_SHOWN:]
    if others:
        images = sum(found.classes[name] for name in others)
        more = count(len(others), "further class", "further classes")
        terminal.say(f"... and {more} with {count(images, 'image')}")
    readable = found.images - len(found.unreadable)
    terminal.say(
        f"{count(found.images, 'image')} in {found.id}, {readable:,} readable; shorter side "
        f"{found.shortest} to {found.median} pixels (smallest, median)"
    )
    if not found.classes:
        terminal.say(
            "No labels: sub-folders named after the classes, or a column `class`, would show "
            "whether predictions are right."
        )
    for problem in found.problems:
        terminal.say(f"to mend: {problem}")
    if found.unused:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in found.unused.items())
        terminal.say(f"not used: {kinds}")
    if score is not None:
        terminal.say(_in_words(score))


def _in_words(score: Mapping[str, float]) -> str:
    """Say whether zero-shot beats guessing."""
    said = (
        f"zero_shot is right on {number(score['top1'], 1)} % of {score['images']:,.0f} images, "
        f"guessing on {number(score['chance'], 1)} %"
    )
    if score["p"] < SIGNIFICANT:
        return f"{said}: better than chance (p = {score['p']:.1g})"
    return (
        f"{said}: this may be chance (p = {score['p']:.2f}); check that names and folders belong "
        "together, and try plainer class names"
    )


def _show(common: Common, report: "Report", *, named: bool) -> None:
    """Show a table of what is there, then what is wrong and what is missing."""
    terminal = common.terminal
    there = [finding for finding in report.findings if finding.state != "missing"]
    missing = [finding for finding in report.findings if finding.state == "missing"]
    columns = ("dataset", "state", "images", "other splits", "where")
    if there:
        terminal.table(columns, [_row(finding) for finding in there], right=("images",))
    for finding in there:
        for line in _remarks(finding):
            terminal.say(f"{finding.id}: {line}")
    if missing:
        ids = ", ".join(finding.id for finding in missing)
        terminal.say(
            f"{count(len(missing), 'dataset')} not found under {report.root}: {ids}"
        )
        for finding in missing if named or not there else ():
            terminal.say(f"  {finding.id}: {finding.get}")
        if there and not named:
            terminal.say("How to get one: cliquetta data doctor ROOT --only ID")
    if report.unknown_folders:
        unknown = ", ".join(report.unknown_folders)
        terminal.say(f"Unknown folders: {unknown}; use one as folder:PATH")


def _row(finding: "Finding") -> tuple[str, ...]:
    """Write a dataset: images of its first split, then its other splits and its folder."""
    first = "–"
    others = []
    for index, (name, split) in enumerate(finding.splits.items()):
        counts = f"{split.found:,} / {split.expected:,}"
        if index == 0:
            first = counts
        else:
            others.append(f"{name} {counts}")
    folder = f"{finding.folder} ({finding.layout})" if finding.folder else "–"
    return finding.id, finding.state, first, ", ".join(others) or "–", folder


def _remarks(finding: "Finding") -> list[str]:
    """List what is wrong with a dataset, how to get it, and what opening it showed."""
    lines = [f"to fix: {problem}" for problem in finding.problems]
    if finding.problems and finding.get:
        lines.append(finding.get)
    opened = finding.opened
    if opened is not None:
        lines.append(
            f"{count(opened.images, 'image')} opened, {len(opened.unreadable):,} unreadable, "
            f"{count(opened.duplicates, 'duplicate')}"
        )
        for first, second in opened.contradictions[:5]:
            lines.append(f"the same image in two classes: {first} and {second}")
    return lines + [f"note: {note}" for note in finding.notes]
