"""``cliquetta predict``: predict the classes of images."""

from __future__ import annotations

import csv
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import BAD_INPUT, SKIPPED, Common, command
from cliquetta.cli.console import Terminal, count, number
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.data.stream import Skipped, Stream
    from cliquetta.methods.base import Adapter
    from cliquetta.prompts.classes import ClassPrompts

_EXAMPLES = """
cliquetta predict photos/ --classes cat,dog,horse

cliquetta predict photos/ --classes names.txt --method zero_shot --model ViT-B/16 --top 3

cliquetta predict list.csv more/*.jpg --classes names.txt --templates openai-80

cliquetta predict monday/ --classes names.txt --method scap --state camera.safetensors
"""


@dataclass
class RunResult:
    """What a prediction run did, for the summary."""

    images: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)
    """How often each class came first."""
    seconds: float = 0.0


class PredictionTable:
    """A CSV file that appears under its name only when it is complete.

    Rows go to ``<name>.partial`` and are on disk after every batch, so that a run that is broken
    off leaves what it had, and never a half-written file under the name that was asked for.
    """

    def __init__(self, path: Path, keys: Sequence[str], names: Sequence[str], top: int) -> None:
        """``keys`` give the order of the rows, ``names`` are the classes."""
        self.path = path
        self.names = names
        self.top = top
        self._place = {key: place for place, key in enumerate(keys)}
        self._partial = path.with_name(path.name + ".partial")

    def __enter__(self) -> PredictionTable:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("w", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file)
        ranks = ["" if rank == 1 else f"_{rank}" for rank in range(1, self.top + 1)]
        answers = [f"{column}{rank}" for rank in ranks for column in ("prediction", "probability")]
        self._rows.writerow(["path", *answers, "error"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None:
            self._partial.replace(self.path)

    def write(
        self, keys: Sequence[str], probabilities: Any, skipped: Sequence[Skipped]
    ) -> list[str]:
        """Add a batch, (B, N) probabilities; returns the first answers."""
        best = probabilities.topk(self.top, dim=-1)
        shares = best.values.tolist()
        answers = [[self.names[i] for i in row] for row in best.indices.tolist()]
        rows: list[list[str]] = [
            [entry.key, *[""] * (2 * self.top), entry.reason] for entry in skipped
        ]
        for key, found, values in zip(keys, answers, shares, strict=True):
            pairs = [(name, f"{share:.6f}") for name, share in zip(found, values, strict=True)]
            rows.append([key, *chain.from_iterable(pairs), ""])
        rows.sort(key=lambda row: self._place[row[0]])
        self._rows.writerows(rows)
        self._file.flush()
        os.fsync(self._file.fileno())
        return [row[0] for row in answers]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(app, "predict", examples=_EXAMPLES)(predict)


def predict(
    common: Common,
    paths: Annotated[
        list[Path],
        typer.Argument(help="Folders, image files, or CSV files with a column `path`."),
    ],
    classes: Annotated[
        str | None,
        typer.Option(help="A file with one name a line, a,b,c, or a known list (imagenet)."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="See `cliquetta methods`. Without it: zero_shot.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Named settings of the method.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the method's config; repeat.")
    ] = None,
    fitted: Annotated[
        Path | None, typer.Option(help="A file of `cliquetta fit`, instead of --method.")
    ] = None,
    model: Annotated[str, typer.Option(help="See `cliquetta models`, or a path.")] = "micro",
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path("predictions.csv"),
    top: Annotated[int, typer.Option(min=1, help="Answers per image.")] = 1,
    state: Annotated[
        Path | None,
        typer.Option(help="Continue from this file if it is there, and save to it at the end."),
    ] = None,
    templates: Annotated[
        list[str] | None,
        typer.Option(help="A text with {} for the name, a file, or a set (openai-80); repeat."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the method's and the views' randomness.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Threads that decode images.")] = 2,
) -> None:
    """Predict the class of every image and write a table.

    An image that cannot be read is reported, skipped and named in the column `error`. The table
    appears when it is complete; until then rows are in a file ending in `.partial`.
    """
    from cliquetta.cli.options import find_inputs, read_method
    from cliquetta.data.dataset import FileDataset
    from cliquetta.data.stream import Stream
    from cliquetta.model.factory import MICRO
    from cliquetta.prompts.catalogue import read_prompts

    prompts = read_prompts(classes, templates or ())
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: name a file, such as {out / 'predictions.csv'}")
    choice = read_method(method, preset, settings or (), fitted)
    inputs = find_inputs(paths)
    if inputs.repeated:
        common.terminal.warn(f"{count(inputs.repeated, 'path')} named twice: predicted once")
    adapter = choice.build(common.model(model), prompts, seed)
    if model == MICRO:
        common.terminal.say(
            "micro is a small model to try things out with; for photographs give a full CLIP, "
            "such as --model openai:ViT-B/16"
        )
    before = _continue(adapter, state, common.terminal)
    files = FileDataset("predict", inputs.paths, names=prompts.names, labels=None)
    stream = Stream(
        files,
        adapter.model.preprocess,
        batch_size,
        order="sequential",
        views=adapter.views,
        view_seed=seed,
        workers=workers,
        pin=adapter.model.device.type == "cuda",
    )
    table = PredictionTable(out, files.keys, prompts.names, min(top, len(prompts)))
    result = _run(adapter, stream, table, common.terminal)
    if state is not None:
        # After the table: whoever is stopped in between repeats the run and gets the same.
        from cliquetta.methods._shared.state import save_state

        save_state(adapter, state, notes={"images": before + result.images})
    _report(result, out, state, prompts, common.terminal)
    if result.skipped:
        raise typer.Exit(SKIPPED if result.images else BAD_INPUT)


def _continue(adapter: Adapter, state: Path | None, terminal: Terminal) -> int:
    """Take up a saved state if there is one; returns how many images it has seen."""
    if state is None or not state.exists():
        return 0
    from cliquetta.methods._shared.state import load_state

    images = int(load_state(adapter, state).notes.get("images", 0))
    terminal.say(f"continuing from {state}, which has seen {count(images, 'image')}")
    return images


def _run(adapter: Adapter, stream: Stream, table: PredictionTable, terminal: Terminal) -> RunResult:
    result = RunResult()
    start = time.perf_counter()
    with table, terminal.progress() as progress:
        bar = progress.add_task("predict", total=stream.images, note="")
        for batch, _ in stream:
            probabilities = adapter.predict(batch).probabilities
            fresh = stream.skipped[len(result.skipped) :]
            result.found.update(table.write(batch.keys, probabilities, fresh))
            result.images += len(batch)
            result.skipped += fresh
            note = f"{len(result.skipped)} skipped" if result.skipped else ""
            progress.update(bar, advance=len(batch) + len(fresh), note=note)
    result.seconds = time.perf_counter() - start
    return result


def _report(
    result: RunResult, out: Path, state: Path | None, prompts: ClassPrompts, terminal: Terminal
) -> None:
    shown = result.found.most_common(10)
    rows = [(name, f"{n:,}", number(100 * n / result.images, 1)) for name, n in shown]
    if rows and not terminal.quiet:
        title = "Predicted classes" if len(shown) == len(result.found) else "Most frequent classes"
        terminal.table(("class", "images", "%"), rows, title=title, right=("images", "%"))
    rate = result.images / result.seconds if result.seconds else 0.0
    terminal.say(f"{count(result.images, 'image')} in {out} ({rate:.0f} a second)")
    if state is not None:
        terminal.say(f"what was learned is in {state}: give it again to continue")
    if result.skipped:
        worst = "; nothing could be predicted" if not result.images else ""
        terminal.warn(
            f"{count(len(result.skipped), 'image')} could not be read and "
            f"{'was' if len(result.skipped) == 1 else 'were'} skipped: see the column `error` of "
            f"{out}{worst}"
        )
    terminal.document(
        {
            "out": str(out),
            "images": result.images,
            "classes": len(prompts),
            "skipped": [{"path": s.key, "reason": s.reason} for s in result.skipped],
            "predicted": dict(result.found.most_common()),
            "seconds": result.seconds,
            "state": None if state is None else str(state),
        }
    )
