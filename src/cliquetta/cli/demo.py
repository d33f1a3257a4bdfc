"""``cliquetta demo``: adaptation on the bundled model and images, in about a minute on a CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cliquetta.cli.checks import check_datasets, check_methods
from cliquetta.cli.command import BatchSize, Bounds, Common, split_list
from cliquetta.cli.console import Terminal, count, number
from cliquetta.cli.executing import finish, run_grid
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.predictions import Predictions
    from cliquetta.evaluation.progress import Step
    from cliquetta.evaluation.record import Record
    from cliquetta.report.changes import Changes
    from cliquetta.report.scap_findings import ScapFindings

PLAIN = "zero_shot"
CLEAN = "clean"  # the name of no shift at all
SHIFTS = (
    "contrast:5",
    "gaussian_noise:5",
    "defocus_blur:5",
    "jpeg_compression:5",
    CLEAN,
)
"""The development shifts at full severity, and images as they are. That contrast comes
first, and the numbers of images, were chosen after looking at gains and p values here:
a show, no evidence."""
CLIQUES = ("fog:3", "frost:3")
"""Nearly all of their images have others like them: cliques are many. One that is no
stream already is shown, so that the report keeps both."""
SIGNIFICANT = 0.01  # a difference that chance makes more often is stated as none
NO_GAIN = "none"  # what a table says of a smaller difference
_BAR = 20  # columns of a bar of 100 %
EXAMPLES = """
cliquetta demo
cliquetta demo --shifts fog:4,contrast:3 --images 128 --method scap,domain_norm
cliquetta demo --method zero_shot
"""


@dataclass
class DemoStream:
    """One row of a table: zero-shot and methods on one stream, and what came out."""

    label: str
    specs: "Sequence[RunSpec]"  # the runs, zero-shot first
    records: "Sequence[Record]" = ()  # of all runs, if none has failed
    predictions: "Sequence[Predictions]" = ()
    batch_size: int = 0  # of the methods


def count_by_method(streams: Sequence[DemoStream]) -> "dict[str, Changes]":
    """Count changes of each method's predictions against zero-shot, over all streams."""
    from cliquetta.report.changes import count_changes

    changes = {}
    for index, record in enumerate(streams[0].records):
        if index > 0:
            pairs = [(s.predictions[0], s.predictions[index]) for s in streams]
            changes[record.method] = count_changes(pairs)
    return changes


def demo(
    common: Common,
    method: Annotated[
        str, "Methods to show beside zero_shot, comma-separated."
    ] = "domain_norm",
    shifts: Annotated[
        str, "Shifts as NAME:SEVERITY or clean, comma-separated."
    ] = ",".join(SHIFTS),
    images: Annotated[int, Bounds(1, 2000), "Images per shift."] = 256,
    singles: Annotated[
        int,
        Bounds(0, 2000),
        "Images of the first shift that also come singly; 0 for none.",
    ] = 320,
    scap: Annotated[
        int, Bounds(0, 2000), "Images in fog to show SCAP's cliques on; 0 for none."
    ] = 64,
    batch_size: BatchSize = 64,
    seed: Annotated[int, "Seed of the order and of the method."] = 0,
    out: Annotated[Path, "Output directory."] = Path("demo"),
) -> None:
    """Compare plain CLIP and adapting methods on shifted images.

    Model and images are bundled: a small CLIP trained on CIFAR images, and a slice of
    CIFAR-10's test set that it never saw, with corruptions that it never saw either.
    The first shift is drawn batch by batch; the other shifts follow, then the first one
    with images that come one at a time. Last, SCAP as its paper prints it: the cliques
    that it finds, what their prompts do to attention, what it retains. Every difference
    is tested; one that may be chance is called no change. The report is about the
    streams in batches, with pictures of the cliques.
    """
    wanted = split_list(shifts, "shifts")
    check_methods(method)
    check_datasets([f"bundled@{shift}" for shift in wanted if shift != CLEAN], None)

    from cliquetta.evaluation.grid import RunSpec, grid, with_method
    from cliquetta.evaluation.predictions import load_predictions
    from cliquetta.evaluation.sweep import RunContext

    methods = read_methods(method)
    base = RunSpec("", PLAIN, batch_size=batch_size, limit=images, dtype=common.dtype)

    def stream(
        shift: str, limit: int, names: Sequence[str], size: int = batch_size
    ) -> DemoStream:
        # Plain CLIP predicts each image by itself, in batches of any size.
        plain = replace(base, limit=limit)
        cells = [plain]
        for name in names:
            cells.append(with_method(replace(plain, batch_size=size), name))
        dataset = "bundled" if shift == CLEAN else f"bundled@{shift}"
        specs = grid(cells, datasets=[dataset], seeds=[seed])
        return DemoStream(shift, specs, batch_size=size)

    # One table per kind of stream; the first one is drawn batch by batch.
    first, *others = wanted
    shifted = [shift for shift in others if shift != CLEAN]
    clean = [shift for shift in others if shift == CLEAN]
    tables = [
        [stream(first, max(images, singles), methods)],
        [stream(shift, images, methods) for shift in shifted],
        [stream(shift, images, methods) for shift in clean],
    ]
    if singles and methods:
        single = stream(first, singles, methods[:1], 1)
        tables.append([replace(single, label=f"{first}, singly")])
    shown_by_scap = None
    if scap and methods and "scap" not in methods:
        unused = [shift for shift in CLIQUES if shift not in wanted]
        shift = unused[0] if unused else CLIQUES[0]
        shown_by_scap = stream(shift, scap, ["scap"])
        tables.append([shown_by_scap])

    # All methods and datasets are built once before the first run.
    rows = [row for table in tables for row in table]
    context = RunContext(out, device=common.checked_device(), evidence=True)
    context.check([spec for row in rows for spec in row.specs])
    results = []
    for table in filter(None, tables):
        is_first = table is tables[0]
        is_scap = shown_by_scap is not None and table[0] is shown_by_scap
        context.evidence = is_first or is_scap  # pictures of few streams are enough

        curve = LiveCurve(common.terminal) if is_first and methods else None
        specs = [spec for row in table for spec in row.specs]
        results += run_grid(specs, context, common.terminal, watch=curve)
        records = {}
        for result in results:
            if result.record is not None:
                records[result.spec] = result.record
        for row in table:
            if all(spec in records for spec in row.specs):
                row.records = [records[spec] for spec in row.specs]
                folders = [out / record.id for record in row.records]
                row.predictions = [load_predictions(folder) for folder in folders]

        if curve is not None and table[0].records:
            curve.draw(table[0])
        if not all(row.records for row in table):
            continue
        if is_scap:
            common.terminal.say("\n".join(describe_scap(table[0], out)))
        else:
            _show(table, common.terminal)
    if all(result.record is not None for result in results):
        # The report is about streams in batches, and about SCAP.
        folders = []
        for row in rows:
            in_batches = row.batch_size == batch_size and row.label in wanted
            if in_batches or row is shown_by_scap:
                folders += [out / record.id for record in row.records]
        page = _make_page(folders, out)
        runs = {record.id for row in rows for record in row.records}
        common.terminal.say(
            f"Records: {count(len(runs), 'run')} in {out}, each with record.json"
        )
        missing = (
            "For a report with figures: pip install 'cliquetta[report]' and run again."
        )
        common.terminal.say(f"Report: {page}" if page else missing)
        report = None if page is None else str(page)
        common.terminal.document(
            [_plain(row, out) | {"report": report} for row in rows]
        )
    finish(results, common.terminal)


def describe_scap(stream: DemoStream, out: Path) -> list[str]:
    """Say what SCAP found, did and changed on a stream, and what to expect of its accuracy.

    Args:
        stream: Zero-shot and SCAP, with their records.
        out: The folder of the runs.

    """
    from cliquetta.report.changes import in_words
    from cliquetta.report.scap_findings import EXPECTATION

    findings = find_scap(stream, out)
    lines = [f"SCAP as printed, on {stream.label}"]
    if findings is not None:
        lines += findings.sentences()
    change = count_by_method([stream])["scap"]
    plain, adapted = (number(record.metrics["top1"]) for record in stream.records)
    accuracy = f"Accuracy: zero_shot {plain} %, scap {adapted} %."
    return [*lines, f"{in_words(change, 'scap')} {accuracy} {EXPECTATION}"]


def find_scap(stream: DemoStream, out: Path) -> "ScapFindings | None":
    """Read what SCAP left to look at on a stream; ``None`` where it left nothing."""
    from cliquetta.evaluation.evidence_log import load_evidence
    from cliquetta.report.scap_findings import find

    runs = [record for record in stream.records if record.method == "scap"]
    evidence = load_evidence(out / runs[0].id) if runs else None
    return None if evidence is None else find(evidence)


class LiveCurve:
    """Draws the accuracy of zero-shot and of the first method over a stream, batch by batch."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.plain: list[float] = []
        self.drawn = 0

    def __call__(self, spec: "RunSpec", step: "Step") -> None:
        """Note a batch: zero-shot is remembered, the method drawn beside it."""
        share = step.accuracy or 0.0  # the bundled images have labels
        if spec.method == PLAIN:
            self.plain.append(share)
        elif self.drawn < step.number <= len(self.plain):
            plain = self.plain[step.number - 1]
            self._line(spec.method, step.images, plain, share)

    def draw(self, stream: DemoStream) -> None:
        """Draw the batches that were not run now, from the recorded predictions."""
        plain, adapted, *_ = (each.correct for each in stream.predictions)
        images = len(plain)
        ends = [*range(stream.batch_size, images, stream.batch_size), images]
        for end in ends[self.drawn :]:
            plain_share = 100 * float(plain[:end].mean())
            share = 100 * float(adapted[:end].mean())
            self._line(stream.records[1].method, end, plain_share, share)

    def _line(self, method: str, images: int, plain: float, adapted: float) -> None:
        """Print one line of bars, with the names above the first."""
        if not self.drawn:
            width = _BAR + 7
            names = f"{PLAIN:<{width}}  {method:<{width}}"
            self.terminal.say(f"Accuracy over the stream\nimages  {names}")
        self.terminal.say(f"{images:>6}  {_bar(plain)}  {_bar(adapted)}")
        self.drawn += 1


def _bar(percent: float) -> str:
    """Draw a bar of blocks with its figure."""
    blocks = "█" * round(_BAR * percent / 100)
    return f"{blocks:<{_BAR}} {percent:4.1f} %"


def read_methods(text: str) -> list[str]:
    """Read the methods of ``a,b,c`` but zero-shot, which is always run."""
    from cliquetta.methods.building.registry import get_method

    names = [get_method(name).name for name in split_list(text, "methods")]
    for name in names:
        if [part.strip() for part in text.split(",")].count(name) > 1:
            raise UserError(f"--method names {name} twice: name every method once")
    return [name for name in names if name != PLAIN]


def _make_page(folders: Sequence[Path], out: Path) -> Path | None:
    """Write the report of these runs, where matplotlib is installed."""
    from cliquetta.report.style import can_draw

    if not can_draw():
        return None
    from cliquetta.report.page import Choices, build_page, write_page
    from cliquetta.report.runs import load_runs

    path = out / "report.html"
    write_page(build_page(*load_runs(folders), Choices(title="CliqueTTA demo")), path)
    return path


def summary(
    changes: "Mapping[str, Changes]", plain_right: int, kind: str = "shifted"
) -> list[str]:
    """Describe the changes by the methods in words: all in one line, then each."""
    from cliquetta.report.changes import in_words

    images = next(iter(changes.values())).images
    before = 100 * plain_right / images
    *shares, last = [
        f"{PLAIN} gets {number(before)} % right",
        *(
            f"{method} {number(before + (change.gain or 0.0))} %"
            for method, change in changes.items()
        ),
    ]
    lines = [f"Of {count(images, f'{kind} image')}, {', '.join(shares)} and {last}."]
    for method, change in changes.items():
        # A difference that may be chance is stated as none.
        test = change.test
        if test is not None and change.changed and test.p >= SIGNIFICANT:
            lines.append(
                f"{method} changed {change.changed:,} of {count(images, 'prediction')}; the "
                f"difference in accuracy may be chance (p = {test.p:.2g})."
            )
        else:
            lines.append(in_words(change, method))
    return lines


def _show(table: Sequence[DemoStream], terminal: Terminal) -> None:
    """Show one table and what it says in words."""
    columns, rows = tabulate(table)
    terminal.table(columns, rows, right=columns[1:])
    if any(NO_GAIN in row for row in rows):
        terminal.say(f"{NO_GAIN}: the difference may be chance (p >= {SIGNIFICANT:g})")
    changes = count_by_method(table)
    if not changes:
        return

    # The sentences are about all streams of the table together.
    plain_right = 0
    for row in table:
        plain_right += int(row.predictions[0].correct.sum())
    kind = CLEAN if all(row.label == CLEAN for row in table) else "shifted"
    terminal.say("\n".join(summary(changes, plain_right, kind)))


def tabulate(table: Sequence[DemoStream]) -> tuple[list[str], list[list[str]]]:
    """Write headers and rows; ``fixed`` are wrong predictions set right, ``broken`` the reverse.

    These counts are for one method; of several the sentences below the table have them.
    """
    methods = [record.method for record in table[0].records[1:]]
    columns = ["shift", f"{PLAIN} %"]
    for method in methods:
        columns += [f"{method} %", "gain"]
    if len(methods) == 1:
        columns += ["fixed", "broken"]
    rows = []
    for stream in table:
        plain, *adapted = (number(record.metrics["top1"]) for record in stream.records)
        counts = count_tests([stream])
        row = [stream.label, plain]
        for top1, change in zip(adapted, counts, strict=True):
            gain = NO_GAIN
            if change["p"] < SIGNIFICANT:
                gain = number(change["gain"], signed=True)
            row += [top1, gain]
        if len(counts) == 1:
            row += [str(counts[0]["repaired"]), str(counts[0]["broken"])]
        rows.append(row)
    return columns, rows


def count_tests(streams: Sequence[DemoStream]) -> list[dict[str, Any]]:
    """List the changes by each method as JSON types."""
    entries = []
    for method, change in count_by_method(streams).items():
        assert change.test is not None  # the bundled images have labels
        entry = {"method": method, "changed": change.changed, "gain": change.gain}
        entries.append(entry | asdict(change.test))
    return entries


def _plain(stream: DemoStream, out: Path) -> dict[str, Any]:
    """Write a stream as JSON types: ``change`` has one entry per method, ``runs`` zero-shot too."""
    findings = find_scap(stream, out)
    runs = []
    for record in stream.records:
        run = {
            "method": record.method,
            "top1": record.metrics["top1"],
            "ece": record.metrics["ece"],
            "images_per_second": record.throughput["images_per_second"],
            "record": str(out / record.id / "record.json"),
        }
        runs.append(run)
    return {
        "shift": stream.label,
        "batch_size": stream.batch_size,
        "change": count_tests([stream]),
        "scap": None if findings is None else findings.plain(),
        "runs": runs,
    }
