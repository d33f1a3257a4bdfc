"""A prediction run into a file, which survives being stopped at any moment.

Finished parts are kept in a folder beside the output file (:mod:`.parts`). The same command
continues from there; batches do not depend on where a run was stopped, so its answers do not
either. When all parts are there they become the output file, and the folder goes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from cliquetta.atomic import sync_folder
from cliquetta.data.listing import STDIN, ImageList, Source, digest, list_images
from cliquetta.data.remote import find_filesystem, is_url
from cliquetta.errors import UserError
from cliquetta.inference.parts import Lane, Part, PartCutter, Parts, Writer, interrupted_after
from cliquetta.inference.predictor import Predictor, States
from cliquetta.inference.reading import ImageSource
from cliquetta.inference.rows import PredictionRun
from cliquetta.inference.table_files import Row, TableFormat
from cliquetta.methods.state import describe, merge_states

_FORMAT = "cliquetta-predict-1"
_LONGEST_NAME = 200  # of a group; file systems take 255 bytes, with a suffix while it is written


def shard_path(out: Path | str, shard: tuple[int, int]) -> Path | str:
    """The output file of one shard: ``predictions.2-of-8.csv``; a URL stays one."""
    i, n = shard
    if not 1 <= i <= n:
        raise UserError(f"a shard is i/n with i from 1 to n, such as 2/8, got {i}/{n}")
    folder, slash, name = str(out).rpartition("/") if is_url(out) else ("", "", str(out))
    path = Path(name)
    path = path if n == 1 else path.with_name(f"{path.stem}.{i}-of-{n}{path.suffix}")
    return f"{folder}{slash}{path}" if is_url(out) else path


def parts_folder(target: Path | str) -> Path:
    """The folder of a run's parts: beside its output, for a URL in the current folder."""
    path = Path(str(target).rpartition("/")[2]) if is_url(target) else Path(target)
    return path.with_name(f"{path.name}.parts")


def check_writable(target: Path | str, state: Path | None, *, overwrite: bool = False) -> None:
    """Refuse an output or a state that cannot be written, before anything is read."""
    if is_url(target):
        _check_url(str(target), overwrite=overwrite)
        target = parts_folder(target)
    target = Path(target)
    if target.is_dir() and target.suffix != ".parts":
        raise UserError(f"{target} is a folder: name a file, such as {target / 'predictions.csv'}")
    if state is not None and state.resolve() == target.resolve():
        raise UserError(f"the output and the state cannot be one file: {target}")
    begun = (parts_folder(target) / "run.json").exists()
    if target.is_file() and not overwrite and not begun:
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


def _check_url(target: str, *, overwrite: bool) -> None:
    filesystem, path = find_filesystem(target)
    begun = (parts_folder(target) / "run.json").exists()
    if filesystem.exists(path) and not overwrite and not begun:
        raise UserError(f"{target} exists: choose another --out, or pass --overwrite")
    try:
        filesystem.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
        filesystem.pipe_file(f"{path}.check", b"")
        filesystem.rm_file(f"{path}.check")
    except Exception as error:  # whatever a file system raises
        raise UserError(f"cannot write {target}: {error}") from None


def shard_range(count: int, shard: tuple[int, int], batch_size: int) -> tuple[int, int]:
    """First and last image of a shard, in whole batches of the list."""
    (i, n), batches = shard, -(-count // batch_size)
    ends = (batches * (i - 1) // n, batches * i // n)
    return min(ends[0] * batch_size, count), min(ends[1] * batch_size, count)


Progress = Callable[[int, int, int], None]
"""Told the images that are done, how many there are, and how many were skipped."""


class Workers(Protocol):
    """Workers that predict several lanes of a run at a time."""

    @property
    def actors(self) -> int:
        """Number of lanes at a time."""
        ...

    def do(self, work: Work) -> None:
        """Predict what is in no part yet."""
        ...


class Cluster(Protocol):
    """Machines to connect to."""

    def connect(self) -> AbstractContextManager[Workers]:
        """The workers, for as long as a run goes on."""
        ...


@dataclass(frozen=True)
class Request:
    """The request for a run into a file, without its methods."""

    sources: Sequence[Source]
    target: Path | str
    """A file, or a URL."""
    table: TableFormat
    shard: tuple[int, int] = (1, 1)
    group_by: str | None = None
    state: Path | None = None
    """A file; with ``group_by`` a folder with a file per group."""
    stdin: Path | None = None
    overwrite: bool = False
    keep_rows: bool = False
    on_progress: Progress | None = None

    def state_file(self, lane: Lane) -> Path | None:
        """The file that holds the state of a lane after the run."""
        if self.state is None or self.group_by is None:
            return self.state
        name = quote(lane.group, safe=" ") or "(empty)"  # quoted names have no brackets
        if len(name) > _LONGEST_NAME:
            raise UserError(
                f"the group {lane.group[:40]!r}... is too long for the name of a state file: "
                "shorten its name, or leave out --state"
            )
        return self.state / f"{name}.safetensors"


def run_with_parts(
    predictor: Predictor, request: Request, cluster: Cluster | None = None
) -> PredictionRun:
    """A run into a file: begun or continued, here or on a cluster, then put together."""
    parts = Parts(parts_folder(request.target), tuple(predictor.adapters))
    parts.remove_finished()
    check_writable(request.target, request.state, overwrite=request.overwrite)
    if request.group_by is not None and request.shard[1] > 1:
        raise UserError("a shard would cut groups apart: leave out one of --shard and --group-by")
    # the folder goes before a cluster is left, which takes seconds
    with ExitStack() as connection, parts.held(), ExitStack() as stack:
        # once more: a run of the same command may have ended just before the lock was ours
        check_writable(request.target, request.state, overwrite=request.overwrite)
        workers = None if cluster is None else connection.enter_context(cluster.connect())
        facts = _begin_or_continue(predictor, request, parts, workers)
        lanes = [Lane(*lane) for lane in facts["lanes"]]
        listing = stack.enter_context(closing(ImageList(parts.folder / "images.sqlite")))
        source = ImageSource(listing, predictor.row_format)
        run = PredictionRun(repeated=listing.repeated, unused=listing.unused, out=request.target)
        work = Work(predictor, source, parts, lanes, request, run)
        begun = time.perf_counter()
        work.do() if workers is None else workers.do(work)
        run.seconds = time.perf_counter() - begun
        run.classes_changed = facts.get("classes changed", False)
        run.health |= predictor.health
        predicted: Counter[Lane] = Counter()
        rows = _collect(work, predicted)
        assemble_table(rows, request.table, request.target, parts.folder, source.table_columns())
        if run.images != sum(lane.stop - lane.start for lane in lanes):
            raise RuntimeError(f"{run.images} rows for the images of {lanes}")
        if request.state is not None:
            _save_states(work, facts["seen"], predicted)
        parts.finish()
    return run


def _begin_or_continue(
    predictor: Predictor, request: Request, parts: Parts, workers: Workers | None
) -> dict[str, Any]:
    """The facts of the run in the folder of parts; begun if there is none."""
    groups = request.group_by is not None
    asked = {
        "format": _FORMAT,
        "list of images": digest(request.sources, request.stdin),
        "output": str(request.target),
        "column to group by": request.group_by,
        "number of actors": None if groups or workers is None else workers.actors,
        "shard": list(request.shard),
        "batch size": predictor.batch_size,
        "decoding": predictor.decode,
        "seed": predictor.seed,
        "top k": predictor.row_format.top_k,
        "all probabilities": predictor.row_format.all_probabilities,
        "multi label": predictor.row_format.multi_label,
        "share to reject": predictor.row_format.reject,
        "calibration": predictor.row_format.calibrate,
        "state": None if request.state is None else str(request.state),
        "method": {name: describe(adapter) for name, adapter in predictor.adapters.items()},
    }
    if facts := unfinished(parts, asked, overwrite=request.overwrite):
        return facts
    parts.clear()
    states = predictor.states()
    if request.state is not None and workers is not None and not groups:
        (adapter,) = predictor.adapters.values()
        adapter.merge([adapter.state_dict()])  # refused before the first image, if at all
    database = parts.folder / "images.sqlite"
    with closing(
        list_images(request.sources, database, request.stdin, request.group_by)
    ) as listing:
        lanes = _lanes(listing, request, predictor.batch_size, workers)
    files = {lane.group: request.state_file(lane) for lane in lanes}
    files = files if groups else {"": request.state}  # a shard may be empty
    seen = {group: predictor.load(file) for group, file in files.items()}
    facts = {"asked": asked, "lanes": [astuple(lane) for lane in lanes], "seen": seen}
    facts["classes changed"] = predictor.classes_changed
    parts.begin(facts, states if groups else predictor.states())
    return facts


def unfinished(parts: Parts, asked: Mapping[str, Any], *, overwrite: bool) -> dict[str, Any]:
    """The facts of the run in the folder of parts, empty if there is none to continue.

    A run that was asked for something else is continued by its own command, or given up.
    """
    facts = parts.read()
    differing = [key for key in asked if facts and facts["asked"].get(key) != asked[key]]
    if differing and not overwrite:
        raise UserError(
            f"{parts.folder} holds an unfinished run with another {differing[0]}: repeat its "
            "command to continue it, or pass --overwrite to start again"
        )
    return {} if differing else facts


def _lanes(
    listing: ImageList, request: Request, batch_size: int, workers: Workers | None
) -> list[Lane]:
    """One lane per group; else equal parts, in whole batches, for as many actors as there are."""
    if request.group_by is not None:
        ends = list(accumulate(count for _, count in listing.groups()))
        names = [name for name, _ in listing.groups()]
        return list(map(Lane, [0, *ends], ends, names))
    start, stop = shard_range(len(listing), request.shard, batch_size)
    actors = 1 if workers is None else workers.actors
    ranges = [shard_range(stop - start, (i, actors), batch_size) for i in range(1, actors + 1)]
    return [Lane(start + first, start + last) for first, last in ranges if first < last]


@dataclass
class Work:
    """The images of a run, and the parts of it that are done."""

    predictor: Predictor
    source: ImageSource
    parts: Parts
    lanes: Sequence[Lane]
    request: Request
    run: PredictionRun

    def __post_init__(self) -> None:
        self.total = sum(lane.stop - lane.start for lane in self.lanes)
        self.run.before = sum(self.parts.done(lane) - lane.start for lane in self.lanes)
        self.seen, self.skipped = self.run.before, 0

    def unfinished(self) -> list[Lane]:
        """Lanes with images that are in no part."""
        return [lane for lane in self.lanes if self.parts.done(lane) < lane.stop]

    def states(self, lane: Lane) -> States:
        """The states that a lane continues from."""
        file = self.request.state_file(lane)
        if self.request.group_by and self.parts.done(lane) == lane.start and file and file.exists():
            self.predictor.load(file)
            return self.predictor.states()
        return self.parts.states(lane)

    def advance(self, images: int, skipped: int) -> None:
        """Report that images were predicted."""
        self.seen, self.skipped = self.seen + images, self.skipped + skipped
        if self.request.on_progress is not None:
            self.request.on_progress(self.seen, self.total, self.skipped)

    def do(self) -> None:
        """Predict here what is in no part yet, one lane after the other."""
        begun = time.perf_counter()
        with Writer() as writer:
            for lane in self.unfinished():
                self.predictor.restore(self.states(lane))
                first = self.parts.done(lane)
                cutter = PartCutter(self.predictor, lane, first, self.request.state is not None)
                rows: list[Future[list[Row]]] = []
                whole = True  # rows and states are of the same images
                try:
                    for read in self.predictor.reader.batches(self.source, first, lane.stop):
                        with interrupted_after():
                            whole = False
                            rows.append(writer.submit(self.predictor.ask(read)))
                            part = cutter.add(len(read.keys))
                            if part is not None:
                                writer.submit(self._write, part, rows)
                                rows = []
                            whole = True
                        self.advance(len(read.keys), len(read.unreadable))
                except KeyboardInterrupt:
                    if whole and rows and (part := cutter.add(0, due=True)):
                        writer.submit(self._write, part, rows)
                    raise
        self.run.busy, self.run.waited = self.predictor.busy, time.perf_counter() - begun
        self.run.waited -= self.run.busy

    def _write(self, part: Part, rows: Sequence[Future[list[Row]]]) -> None:
        made = [row for some in rows for row in some.result()]
        self.parts.add(replace(part, rows=made))


def _collect(work: Work, predicted: Counter[Lane]) -> Iterator[Row]:
    """All rows of the parts, counted on the way; ``predicted`` counts those without an error."""
    for lane in work.lanes:
        for path in work.parts.finished(lane):
            with path.open(encoding="utf-8") as file:
                for line in file:
                    row: Row = json.loads(line)
                    work.run.count(work.predictor.row_format, row)
                    predicted[lane] += not row["error"]
                    if work.request.keep_rows:
                        work.run.rows.append(row)
                    yield row


def _save_states(work: Work, seen: Mapping[str, int], predicted: Mapping[Lane, int]) -> None:
    """Write the state file of the one lane, one per group, or what several lanes learned."""
    predictor, request = work.predictor, work.request
    if request.group_by is None:
        (adapter,) = predictor.adapters.values()
        ends = [state for lane in work.lanes for state in work.parts.states(lane).values()]
        (start,) = work.parts.start().values()
        merge_states(adapter, ends, start)
        assert request.state is not None
        predictor.save(request.state, seen[""] + sum(predicted.values()))
        return
    for lane in work.lanes:
        file = request.state_file(lane)
        assert file is not None
        predictor.restore(work.parts.states(lane))
        predictor.save(file, seen[lane.group] + predicted[lane])


def assemble_table(
    rows: Iterator[Row],
    table: TableFormat,
    target: Path | str,
    folder: Path,
    columns: dict[str, type],
) -> None:
    """Make the output file of the rows; it appears complete or not at all."""
    path = folder / "table"
    with path.open("wb") as file:
        table.write(rows, columns, file)
        file.flush()
        os.fsync(file.fileno())
    if is_url(target):
        filesystem, remote = find_filesystem(str(target))
        filesystem.put_file(str(path), remote)
        return
    path.replace(target)
    sync_folder(Path(target).parent)
