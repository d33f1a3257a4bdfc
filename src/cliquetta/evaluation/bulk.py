"""Predict any number of images, in memory or into a file that survives being stopped.

A run with an output file keeps finished parts in a folder beside it (:mod:`.parts`). The same
command continues from there; batches do not depend on where a run was stopped, so its answers do
not either. When all parts are there they become the output file, and the folder goes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from cliquetta.atomic import sync_folder, write_atomically
from cliquetta.data.batch import ImageLike, to_picture
from cliquetta.data.dataset import Dataset, FileDataset
from cliquetta.data.listing import STDIN, Listing, digest, list_images
from cliquetta.data.stream import Stream
from cliquetta.errors import UserError
from cliquetta.evaluation.parts import Parts
from cliquetta.evaluation.table_files import Row, TableFormat, pick_format, shown_path
from cliquetta.methods._shared.state import describe, load_state, pack_state
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import DEFAULT_METHOD, create_method, name_of
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts

PART_SECONDS = 20.0
"""How much work a run that is stopped may lose."""
PART_ROWS = 4096
_SEGMENT = 64
"""Batches that are read as one dataset."""
_FORMAT = "cliquetta-predict-1"


@dataclass
class PredictionRun:
    """What :func:`predict` did."""

    images: int = 0
    """Images in the list (of the shard)."""
    skipped: int = 0
    """Images of these that could not be read."""
    before: int = 0
    """Images of these that an earlier, stopped run had done."""
    seconds: float = 0.0
    classes: dict[str, Counter[str]] = field(default_factory=dict)
    """By method: how often each class came first."""
    rows: list[Row] = field(default_factory=list)
    """Path, answers and error of every image; empty where they went to a file only."""
    repeated: int = 0
    """Paths that were named again."""
    unused: Counter[str] = field(default_factory=Counter)
    """Files in folders that are not images, by kind."""
    out: Path | None = None


@dataclass(frozen=True)
class Answers:
    """Which columns the answers of some methods fill."""

    methods: tuple[str, ...]
    classes: tuple[str, ...]
    top_k: int = 1
    all_probabilities: bool = False

    def prefix(self, method: str) -> str:
        """What leads the names of a method's columns."""
        return "" if len(self.methods) == 1 else f"{method}_"

    def columns(self) -> dict[str, type]:
        """Names and types of the columns of all methods."""
        found: dict[str, type] = {}
        for prefix in map(self.prefix, self.methods):
            for rank in range(1, self.top_k + 1):
                suffix = "" if rank == 1 else f"_{rank}"
                found[f"{prefix}prediction{suffix}"] = str
                found[f"{prefix}probability{suffix}"] = float
            if self.all_probabilities:
                found |= {f"{prefix}p_{name}": float for name in self.classes}
        return found

    def rows(self, logits: Mapping[str, torch.Tensor]) -> list[Row]:
        """One row per image of the logits (B, N) of every method."""
        columns = list(self.columns())
        rows: list[list[Any]] = [[] for _ in next(iter(logits.values()))]
        for method in self.methods:
            probabilities = logits[method].float().softmax(dim=-1)
            best = probabilities.topk(self.top_k, dim=-1)
            for row, values, indices, every in zip(
                rows, best.values.tolist(), best.indices.tolist(), probabilities, strict=True
            ):
                for index, value in zip(indices, values, strict=True):
                    row += [self.classes[index], round(value, 6)]
                if self.all_probabilities:
                    row += [round(value, 6) for value in every.tolist()]
        return [dict(zip(columns, row, strict=True)) for row in rows]


def predict(
    images: Path | str | ImageLike | Sequence[Path | str | ImageLike],
    classes: ClassPrompts | Sequence[str] | None = None,
    *,
    method: str | Adapter | Sequence[str | Adapter] = DEFAULT_METHOD,
    model: CLIP | str = "micro",
    device: str = "auto",
    seed: int = 0,
    batch_size: int = 64,
    top_k: int = 1,
    all_probabilities: bool = False,
    workers: int = 2,
    state: Path | str | None = None,
    out: Path | str | None = None,
    file_format: str | None = None,
    shard: tuple[int, int] = (1, 1),
    overwrite: bool = False,
    keep_rows: bool = False,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> PredictionRun:
    """Predict the class of every image.

    >>> import numpy as np
    >>> run = predict([np.zeros((32, 32, 3), np.uint8)], ["cat", "dog"], method="zero_shot")
    >>> sorted(run.rows[0])
    ['error', 'path', 'prediction', 'probability']

    Args:
        images: Folders, image files, CSV files with a column of paths (their columns are kept),
            ``-`` for a list of paths on standard input; or PIL images and arrays.
        classes: Class names, or prompts with templates; not needed with an :class:`Adapter`.
        method: Name of a method, an adapter, or several of them; the answers of several stand
            side by side.
        model: Name or path of a model, or a loaded one.
        device: Where to load the model.
        seed: Of the methods' random draws and of views.
        batch_size: Images per batch.
        top_k: Answers per image.
        all_probabilities: Give the probability of every class, too.
        workers: Threads that decode images.
        state: File of one method's adapted state: continued from if it exists, saved at the end.
        out: Output file; ``-`` is standard output. Without it rows are kept in memory.
        file_format: ``csv``, ``jsonl`` or ``parquet``; by the suffix of ``out`` if not given.
        shard: ``(i, n)`` predicts the i-th of n equal parts of the list, counted from 1, into a
            file of its own.
        overwrite: Replace an existing output file.
        keep_rows: Keep rows in memory although they go to a file.
        on_progress: Called after each batch with the images done, of how many, and those skipped.

    Returns:
        Counts, and the rows unless they went to a file only.

    Raises:
        UserError: Something in the request cannot be used.
        BusyError: Another process writes the same output file.

    """
    adapters = _adapters(method, model, classes, device, seed)
    first = next(iter(adapters.values()))
    if len({adapter.prompts for adapter in adapters.values()}) > 1:
        raise UserError("methods of one run share one class list")
    if state is not None and len(adapters) > 1:
        raise UserError(f"a state belongs to one method, got {', '.join(adapters)}")
    names = first.prompts.names
    answers = Answers(tuple(adapters), names, min(top_k, len(names)), all_probabilities)
    engine = _Engine(adapters, answers, batch_size, seed, workers, on_progress)
    state = None if state is None else Path(state)
    sources = _as_sources(images)
    with _standard_input(sources) as stdin:
        if out is None or str(out) == STDIN:
            given = images if sources is None else list_images(sources, stdin=stdin)
            run, rows, columns = _run_in_memory(engine, given, shard, state)
            if out is None:
                run.rows = list(rows)
            else:
                pick_format(Path(out), file_format).write(rows, columns, sys.stdout.buffer)
            return run
        if sources is None:
            raise UserError("an output file needs paths: folders, image files or CSV files")
        target = shard_path(Path(out), shard)
        return _run_with_parts(
            engine,
            sources,
            target,
            pick_format(target, file_format),
            shard=shard,
            state=state,
            stdin=stdin,
            overwrite=overwrite,
            keep_rows=keep_rows,
        )


def shard_path(out: Path, shard: tuple[int, int]) -> Path:
    """The output file of one shard: ``predictions.2-of-8.csv``."""
    i, n = shard
    if not 1 <= i <= n:
        raise UserError(f"a shard is i/n with i from 1 to n, such as 2/8, got {i}/{n}")
    return out if n == 1 else out.with_name(f"{out.stem}.{i}-of-{n}{out.suffix}")


def check_places(target: Path, state: Path | None, *, overwrite: bool = False) -> None:
    """Refuse an output or a state that cannot be written, before anything is read."""
    if target.is_dir():
        raise UserError(f"{target} is a folder: name a file, such as {target / 'predictions.csv'}")
    if state is not None and state.resolve() == target.resolve():
        raise UserError(f"the output and the state cannot be one file: {target}")
    if target.exists() and not overwrite and not (_parts_folder(target) / "run.json").exists():
        raise UserError(f"{target} exists: choose another --out, or pass --overwrite")
    for path in (target, state):
        if path is None or str(path) == STDIN:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror} ({error.filename})") from None


def _parts_folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.parts")


def _adapters(
    method: str | Adapter | Sequence[str | Adapter],
    model: CLIP | str,
    classes: ClassPrompts | Sequence[str] | None,
    device: str,
    seed: int,
) -> dict[str, Adapter]:
    """Adapters by the name of their method, built where only a name is given."""
    wanted = [method] if isinstance(method, str | Adapter) else list(method)
    if any(isinstance(one, str) for one in wanted):
        if classes is None:
            raise UserError("no class names: give a list such as ['cat', 'dog']")
        model = create_model(model, device=device) if isinstance(model, str) else model
    found: dict[str, Adapter] = {}
    for one in wanted:
        if isinstance(one, str):
            assert isinstance(model, CLIP) and classes is not None
            one = create_method(one, model, classes, seed=seed)
        if found.setdefault(name_of(one), one) is not one:
            raise UserError(f"{name_of(one)} is named twice: name every method once")
    if not found:
        raise UserError("no method given")
    return found


class _Pictures(Dataset):
    """Images in memory, named by their place."""

    def __init__(self, images: Sequence[ImageLike], start: int, names: Sequence[str]) -> None:
        keys = [str(start + place) for place in range(len(images))]
        super().__init__("images", names=names, keys=keys, labels=None)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Image ``index`` in RGB."""
        return to_picture(self.images[index])[1]


@dataclass
class _Engine:
    """Methods over a list of images: batches in, rows out."""

    adapters: Mapping[str, Adapter]
    answers: Answers
    batch_size: int
    seed: int
    workers: int
    on_progress: Callable[[int, int, int], None] | None

    def run(self, source: _Source, start: int, stop: int, origin: int) -> Iterator[list[Row]]:
        """The rows of each batch from image ``start`` up to ``stop`` of a run from ``origin``."""
        skipped, step = 0, _SEGMENT * self.batch_size
        for begin in range(start, stop, step):
            dataset, columns = source.segment(begin, min(begin + step, stop))
            place = 0
            for answers, unreadable in self._segment(dataset):
                rows = []
                for _ in range(min(self.batch_size, len(dataset) - place)):
                    key = dataset.keys[place]
                    row = {"path": shown_path(key), **columns[place], **answers.get(key, {})}
                    rows.append(row | {"error": unreadable.get(key, "")})
                    place += 1
                skipped += len(unreadable)
                yield rows
                if self.on_progress is not None:
                    self.on_progress(begin + place - origin, stop - origin, skipped)

    def _segment(self, dataset: Dataset) -> Iterator[tuple[dict[str, Row], dict[str, str]]]:
        """Answers and reasons of unreadable files, by key, batch by batch.

        Methods that want the same views share a stream.
        """
        first = next(iter(self.adapters.values()))
        streams = {
            adapter.views: Stream(
                dataset,
                first.model.preprocess,
                self.batch_size,
                order="sequential",
                views=adapter.views,
                view_seed=self.seed,
                workers=self.workers,
                pin=first.model.device.type == "cuda",
            )
            for adapter in self.adapters.values()
        }
        seen = 0
        with ExitStack() as stack:
            started = [stack.enter_context(closing(s.batches())) for s in streams.values()]  # type: ignore[type-var]
            for batches in zip(*started, strict=True):
                by_views = dict(zip(streams, (batch for batch, _ in batches), strict=True))
                keys = batches[0][0].keys
                logits = {
                    name: self._logits(name, adapter, by_views[adapter.views])
                    for name, adapter in self.adapters.items()
                }
                fresh = next(iter(streams.values())).skipped[seen:]
                seen += len(fresh)
                rows = dict(zip(keys, self.answers.rows(logits), strict=True))
                yield rows, {entry.key: entry.reason for entry in fresh}

    def _logits(self, name: str, adapter: Adapter, batch: Any) -> torch.Tensor:
        logits = adapter.predict(batch).logits
        if not bool(torch.isfinite(logits).all()):
            raise UserError(
                f"{name} gave answers that are not finite at {batch.keys[0]!r} and after: lower "
                "its learning rate, or start without the state; nothing of this batch was kept"
            )
        return logits


class _Source:
    """Files of a list, or images in memory, as datasets of consecutive images."""

    def __init__(self, images: Listing | Sequence[ImageLike], answers: Answers) -> None:
        self.images = images
        self.names = answers.classes
        self.columns: dict[str, str] = {}
        """Columns of input tables and what they are called in the output."""
        taken = {"path", "error", *answers.columns()}
        for name in images.columns if isinstance(images, Listing) else ():
            while (shown := self.columns.get(name, name)) in taken:
                self.columns[name] = f"input_{shown}"
            self.columns[name] = shown
            taken.add(shown)

    def segment(self, start: int, stop: int) -> tuple[Dataset, list[Row]]:
        """The dataset of some images, and the columns that were given for each."""
        if not isinstance(self.images, Listing):
            pictures = _Pictures(self.images[start:stop], start, self.names)
            return pictures, [{} for _ in pictures.keys]
        entries = self.images.entries(start, stop)
        files = FileDataset("files", [e[0] for e in entries], names=self.names, labels=None)
        shown = self.columns.items()
        return files, [{new: row.get(name, "") for name, new in shown} for _, row in entries]


def _as_sources(images: Any) -> list[Path | str] | None:
    """Paths, if all images are given by them."""
    if isinstance(images, str | os.PathLike):
        return [Path(images)]
    paths = [image for image in images if isinstance(image, str | os.PathLike)]
    return [Path(path) for path in paths] if paths and len(paths) == len(images) else None


@contextmanager
def _standard_input(sources: Sequence[Path | str] | None) -> Iterator[Path | None]:
    """A copy of standard input in a file, where it is a source."""
    if STDIN not in map(str, sources or ()):
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="cliquetta-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def _range(count: int, shard: tuple[int, int], batch_size: int) -> tuple[int, int]:
    """First and last image of a shard, in whole batches of the list."""
    (i, n), batches = shard, -(-count // batch_size)
    ends = (batches * (i - 1) // n, batches * i // n)
    return min(ends[0] * batch_size, count), min(ends[1] * batch_size, count)


def _tally(run: PredictionRun, answers: Answers, row: Row) -> None:
    run.images += 1
    run.skipped += bool(row["error"])
    for method in answers.methods:
        found = row.get(f"{answers.prefix(method)}prediction")
        if found is not None:
            run.classes.setdefault(method, Counter())[found] += 1


def _load(adapters: Mapping[str, Adapter], state: Path | None) -> int:
    """Continue from a state file if there is one; returns how many images it has seen.

    Of a state of another class list a method may keep what it has learned apart from the classes.
    """
    if state is None or not state.exists():
        return 0
    (adapter,) = adapters.values()
    saved = load_state(adapter, state, other_classes=True)
    if saved.classes_changed:
        warnings.warn(
            f"{state} was saved with another class list: what was learned about the images is "
            "kept, what was counted per class starts again",
            stacklevel=2,
        )
    return int(saved.notes.get("images", 0))


def _save(adapters: Mapping[str, Adapter], state: Path | None, images: int) -> None:
    if state is not None:
        (adapter,) = adapters.values()
        write_atomically(state, pack_state(adapter, notes={"images": images}))


def _columns(source: _Source, answers: Answers) -> dict[str, type]:
    """All columns of a table, in order."""
    given = dict.fromkeys(source.columns.values(), str)
    return {"path": str, **given, **answers.columns(), "error": str}


def _run_in_memory(
    engine: _Engine, given: Any, shard: tuple[int, int], state: Path | None
) -> tuple[PredictionRun, Iterator[Row], dict[str, type]]:
    """A run that keeps nothing for another start: its rows are yielded while it goes on."""
    source, run = _Source(given, engine.answers), PredictionRun()
    if isinstance(given, Listing):
        run.repeated, run.unused = given.repeated, given.unused

    def rows() -> Iterator[Row]:
        seen, begun = _load(engine.adapters, state), time.perf_counter()
        start, stop = _range(len(given), shard, engine.batch_size)
        for batch in engine.run(source, start, stop, start):
            for row in batch:
                _tally(run, engine.answers, row)
                yield row
        run.seconds = time.perf_counter() - begun
        _save(engine.adapters, state, seen + run.images - run.skipped)

    return run, rows(), _columns(source, engine.answers)


def _run_with_parts(
    engine: _Engine,
    sources: Sequence[Path | str],
    target: Path,
    table: TableFormat,
    *,
    shard: tuple[int, int],
    state: Path | None,
    stdin: Path | None,
    overwrite: bool,
    keep_rows: bool,
) -> PredictionRun:
    """A run into a file: begun or continued, then put together."""
    parts = Parts(_parts_folder(target))
    check_places(target, state, overwrite=overwrite)
    with parts.held():
        asked = {
            "format": _FORMAT,
            "list of images": digest(sources, stdin),
            "shard": list(shard),
            "batch size": engine.batch_size,
            "seed": engine.seed,
            "top k": engine.answers.top_k,
            "all probabilities": engine.answers.all_probabilities,
            "state": None if state is None else str(state),
            "method": {name: describe(adapter) for name, adapter in engine.adapters.items()},
        }
        facts = parts.read()
        differing = [key for key in asked if facts and facts["asked"].get(key) != asked[key]]
        if differing and not overwrite:
            raise UserError(
                f"{parts.folder} holds an unfinished run with another {differing[0]}: repeat its "
                "command to continue it, or pass --overwrite to start again"
            )
        if differing or not facts:
            parts.clear()
            seen = _load(engine.adapters, state)
            listing = list_images(sources, parts.folder / "images.sqlite", stdin)
            start, stop = _range(len(listing), shard, engine.batch_size)
            parts.save_states(start, engine.adapters)
            facts = {"asked": asked, "start": start, "stop": stop, "seen": seen}
            parts.begin(facts)
        else:
            listing = Listing(parts.folder / "images.sqlite")
        with closing(listing):
            source = _Source(listing, engine.answers)
            run = PredictionRun(repeated=listing.repeated, unused=listing.unused, out=target)
            begun = time.perf_counter()
            run.before = _work_off(engine, source, parts, facts["start"], facts["stop"])
            run.seconds = time.perf_counter() - begun
            rows = _collect(run, engine.answers, parts, facts["start"], keep_rows)
            _put_together(rows, table, target, parts.folder, _columns(source, engine.answers))
        if run.images != facts["stop"] - facts["start"]:
            raise RuntimeError(f"{run.images} rows for {facts['stop'] - facts['start']} images")
        _save(engine.adapters, state, facts["seen"] + run.images - run.skipped)
        (parts.folder / "run.json").unlink()  # the run is over, and its folder goes
    return run


def _work_off(engine: _Engine, source: _Source, parts: Parts, start: int, stop: int) -> int:
    """Predict what is not in a part yet; returns how many images were there already."""
    finished = parts.finished(start)
    done = finished[-1][0] if finished else start
    parts.load_states(done, engine.adapters)
    waiting: list[Row] = []
    first, saved = done, time.monotonic()
    for rows in engine.run(source, done, stop, start):
        waiting += rows
        late = time.monotonic() - saved > PART_SECONDS
        if late or len(waiting) >= PART_ROWS or first + len(waiting) == stop:
            last = first + len(waiting)
            parts.save_states(last, engine.adapters)
            parts.add(first, last, waiting)
            waiting, first, saved = [], last, time.monotonic()
    return done - start


def _collect(
    run: PredictionRun, answers: Answers, parts: Parts, start: int, keep_rows: bool
) -> Iterator[Row]:
    """All rows of the parts, counted on the way."""
    for _, path in parts.finished(start):
        with path.open(encoding="utf-8") as file:
            for line in file:
                row: Row = json.loads(line)
                _tally(run, answers, row)
                if keep_rows:
                    run.rows.append(row)
                yield row


def _put_together(
    rows: Iterator[Row], table: TableFormat, target: Path, folder: Path, columns: dict[str, type]
) -> None:
    """Make the output file of the rows; it appears complete or not at all."""
    path = folder / "table"
    with path.open("wb") as file:
        table.write(rows, columns, file)
        file.flush()
        os.fsync(file.fileno())
    path.replace(target)
    sync_folder(target.parent)
