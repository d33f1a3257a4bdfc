"""A prediction run into a file, which survives being stopped at any moment.

Finished parts lie in a folder beside the output file (:mod:`.parts`). The same command
continues from there; batches, and so predictions, do not depend on where a run was
stopped. When all parts are there they become the output file, and the folder goes.
"""

import hashlib
import json
import os
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cliquetta.atomic import sync_folder
from cliquetta.data.features import FeatureDataset
from cliquetta.data.listing import STDIN, ImageList, Source, digest, list_images
from cliquetta.data.remote import find_filesystem, is_url
from cliquetta.errors import UserError
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.order import arrange, say_shuffled
from cliquetta.inference.parts import (
    Lane,
    Part,
    PartCutter,
    Parts,
    Writer,
    interrupted_after,
)
from cliquetta.inference.predictor import ImageSource, Predictor, States
from cliquetta.inference.rows import PredictionRun
from cliquetta.inference.tables import Row
from cliquetta.methods.building.state import describe, merge_states

if TYPE_CHECKING:
    from cliquetta.inference.ray_driver import RayWorkers

_FORMAT = "cliquetta-predict-3"
# rows on their way from the order of prediction to that of the list
SORTED = "sorted.sqlite"
# of a group; file systems take 255 bytes, with a suffix while it is written
_LONGEST_NAME = 200


def parts_folder(target: Path | str) -> Path:
    """Return the folder of a run's parts: beside its output, for a URL in the current folder."""
    path = Path(str(target).rpartition("/")[2]) if is_url(target) else Path(target)
    return path.with_name(f"{path.name}.parts")


def check_writable(
    target: Path | str, state: Path | None, *, overwrite: bool = False
) -> None:
    """Refuse an output or a state that cannot be written, before anything is read."""
    remote = find_filesystem(str(target)) if is_url(target) else None
    local = Path(target) if remote is None else parts_folder(target)
    if remote is None and local.is_dir():
        raise UserError(
            f"{local} is a folder: name a file, such as {local / 'predictions.csv'}"
        )
    if state is not None and state.resolve() == local.resolve():
        raise UserError(f"the output and the state cannot be one file: {local}")
    begun = (parts_folder(target) / "run.json").exists()
    exists = local.is_file() if remote is None else remote[0].exists(remote[1])
    if exists and not overwrite and not begun:
        raise UserError(f"{target} exists: choose another --out, or pass --overwrite")
    if remote is not None:
        filesystem, name = remote
        try:
            filesystem.makedirs(name.rpartition("/")[0] or "/", exist_ok=True)
            filesystem.pipe_file(f"{name}.check", b"")
            filesystem.rm_file(f"{name}.check")
        except Exception as error:  # whatever a file system raises
            raise UserError(f"cannot write {target}: {error}") from None
    for path in (local, state):
        if path is None or str(path) == STDIN:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None


def shard_range(count: int, shard: tuple[int, int], batch_size: int) -> tuple[int, int]:
    """Return the first and last image of a shard, in full batches of the list."""
    number, shards = shard
    batches = -(-count // batch_size)
    first = batches * (number - 1) // shards
    last = batches * number // shards
    return min(first * batch_size, count), min(last * batch_size, count)


def _group_lanes(groups: Sequence[tuple[str, int]]) -> list[Lane]:
    """Return a lane for every group, by name and number of images."""
    lanes = []
    start = 0
    for name, images in groups:
        lanes.append(Lane(start, start + images, name))
        start += images
    return lanes


Progress = Callable[
    [int, int, int], None
]  # images that are done, of how many, and those skipped


@dataclass
class FileRun:
    """A run into a file: begun or continued, here or on a cluster, then put together."""

    predictor: Predictor
    images: Sequence[Source] | FeatureDataset
    options: PredictOptions
    stdin: Path | None = None
    on_progress: Progress | None = None
    source: ImageSource = field(init=False)
    lanes: list[Lane] = field(init=False)
    total: int = field(init=False)  # images in all lanes
    seen: int = field(
        init=False
    )  # images that are in parts or were predicted since the start
    skipped: int = 0  # of those predicted since the start

    def __post_init__(self) -> None:
        target = self.options.target
        assert target is not None, "a run into a file needs one"
        self.target = target
        self.state = self.options.state_path
        self.parts = Parts(parts_folder(target), tuple(self.predictor.adapters))
        self.database = self.parts.folder / "images.sqlite"
        self.result = PredictionRun(out=target)

    def complete(self) -> PredictionRun:
        """Do what is left of the run."""
        cluster = self.options.cluster
        overwrite = self.options.overwrite
        run = self.result
        self.parts.remove_finished()
        check_writable(self.target, self.state, overwrite=overwrite)
        # the folder goes before a cluster is left, which takes seconds
        with ExitStack() as connection, self.parts.held(), ExitStack() as stack:
            # once more: a run of the same command may have ended just before the lock
            # was ours
            check_writable(self.target, self.state, overwrite=overwrite)
            workers = (
                None if cluster is None else connection.enter_context(cluster.connect())
            )
            facts = self._begin_or_continue(workers)
            self.lanes = [Lane(*lane) for lane in facts["lanes"]]
            self.total = sum(lane.stop - lane.start for lane in self.lanes)
            self.source = self._open_source(stack)
            self.seen = sum(self.parts.done(lane) - lane.start for lane in self.lanes)
            run.before = self.seen
            begun = time.perf_counter()
            if workers is None:
                self.predict_here()
            else:
                workers.predict(self)
            run.seconds = time.perf_counter() - begun
            run.classes_changed = facts["classes changed"]
            run.health |= self.predictor.health
            predicted: Counter[Lane] = Counter()
            self._assemble_table(self._rows(predicted))
            if run.images != self.total:
                raise RuntimeError(f"{run.images} rows for the images of {self.lanes}")
            if self.state is not None:
                self._save_states(self.state, facts["seen"], predicted)
            self.parts.finish()
        return run

    def _open_source(self, stack: ExitStack) -> ImageSource:
        """Open the images that the run was begun with."""
        row_format = self.predictor.row_format
        if isinstance(self.images, FeatureDataset):
            return ImageSource(self.images, row_format)
        listing = stack.enter_context(closing(ImageList(self.database)))
        self.result.repeated = listing.repeated
        self.result.unused = listing.unused
        self.result.shuffled = listing.shuffled
        if listing.shuffled:
            say_shuffled(asked=self.options.order == "shuffled")
        return ImageSource(listing, row_format)

    def _begin_or_continue(self, workers: "RayWorkers | None") -> dict[str, Any]:
        """Return the facts of the run in the folder of parts; begin it if there is none.

        A run that was asked for something else is continued by its own command, or
        given up.
        """
        asked = self._request(workers)
        facts = self.parts.read()
        if not facts:
            return self._begin(asked, workers)
        differing = [key for key in asked if facts["asked"].get(key) != asked[key]]
        if not differing:
            return facts
        if not self.options.overwrite:
            remedy = (
                "repeat its command to continue it, or pass --overwrite to start again"
            )
            unfinished = f"an unfinished run with another {differing[0]}"
            raise UserError(f"{self.parts.folder} holds {unfinished}: {remedy}")
        return self._begin(asked, workers)

    def _request(self, workers: "RayWorkers | None") -> dict[str, Any]:
        """Return everything that two runs of one output have to agree in, by its name."""
        options = self.options
        grouped = options.group_by is not None
        if isinstance(self.images, FeatureDataset):
            listed = hashlib.sha256(self.images.rows.tobytes()).hexdigest()
        else:
            listed = digest(self.images, self.stdin)
        methods = {name: describe(one) for name, one in self.predictor.adapters.items()}
        return {
            "format": _FORMAT,
            "list of images": listed,
            "output": str(self.target),
            "column to group by": options.group_by,
            "number of actors": None if grouped or workers is None else workers.actors,
            "shard": list(options.shard),
            "batch size": options.batch_size,
            "decoding": options.decode,
            "seed": options.seed,
            "order": options.order,
            "labels": options.label_source,
            "zero-shot column": self.predictor.row_format.adds_zero_shot,
            "top k": self.predictor.row_format.top_k,
            "all probabilities": options.all_probabilities,
            "multi label": options.multi_label,
            "share to reject": options.reject,
            "calibration": options.calibration,
            "state": None if self.state is None else str(self.state),
            "method": methods,
        }

    def _begin(
        self, asked: dict[str, Any], workers: "RayWorkers | None"
    ) -> dict[str, Any]:
        """Begin the run in an empty folder of parts, and return its facts."""
        predictor = self.predictor
        grouped = self.options.group_by is not None
        self.parts.clear()
        states = predictor.states()
        if self.state is not None and workers is not None and not grouped:
            (adapter,) = predictor.adapters.values()
            adapter.merge(
                [adapter.state_dict()]
            )  # refused before the first image, if at all
        lanes = self._list_lanes(1 if workers is None else workers.actors)
        files: dict[str, Path | None] = {"": self.state}  # a shard may be empty
        if grouped:
            files = {lane.group: self.state_file(lane) for lane in lanes}
        seen = {group: predictor.load(file) for group, file in files.items()}
        facts = {
            "asked": asked,
            "lanes": [astuple(lane) for lane in lanes],
            "seen": seen,
            "classes changed": predictor.classes_changed,
        }
        self.parts.begin(facts, states if grouped else predictor.states())
        return facts

    def _list_lanes(self, actors: int) -> list[Lane]:
        """List the images; return a lane per group, else equal parts for each of the actors."""
        if isinstance(self.images, FeatureDataset):
            return self._equal_lanes(len(self.images), actors)
        listing = list_images(
            self.images,
            self.database,
            stdin=self.stdin,
            group_by=self.options.group_by,
            labels=self.options.label_source,
        )
        with closing(listing):
            ImageSource(
                listing, self.predictor.row_format
            )  # labels are refused before images
            if self.options.group_by is not None:
                lanes = _group_lanes(listing.groups())
                sections = [(lane.start, lane.stop) for lane in lanes]
            else:
                lanes = self._equal_lanes(len(listing), actors)
                sections = [(lanes[0].start, lanes[-1].stop)] if lanes else []
            arrange(listing, self.predictor, sections)
        return lanes

    def _equal_lanes(self, count: int, actors: int) -> list[Lane]:
        """Return lanes of full batches over the shard, one for each of the actors."""
        size = self.options.batch_size
        start, stop = shard_range(count, self.options.shard, size)
        lanes = []
        for number in range(1, actors + 1):
            first, last = shard_range(stop - start, (number, actors), size)
            if first < last:
                lanes.append(Lane(start + first, start + last))
        return lanes

    def state_file(self, lane: Lane) -> Path | None:
        """Return the file that holds the state of a lane after the run."""
        if self.state is None or self.options.group_by is None:
            return self.state
        name = quote(lane.group, safe=" ") or "(empty)"  # quoted names have no brackets
        if len(name) > _LONGEST_NAME:
            raise UserError(
                f"the group {lane.group[:40]!r}... is too long for the name of a state file: "
                "shorten its name, or leave out --state"
            )
        return self.state / f"{name}.safetensors"

    def left(self, lanes: Sequence[Lane]) -> list[tuple[Lane, int]]:
        """Return lanes with images that are in no part, and the first of these."""
        firsts = [(lane, self.parts.done(lane)) for lane in lanes]
        return [(lane, first) for lane, first in firsts if first < lane.stop]

    def states(self, lane: Lane) -> States:
        """Return the states that a lane continues from."""
        file = self.state_file(lane)
        untouched = self.parts.done(lane) == lane.start
        if self.options.group_by and untouched and file is not None and file.exists():
            self.predictor.load(file)
            return self.predictor.states()
        return self.parts.states(lane)

    def advance(self, images: int, skipped: int) -> None:
        """Report that images were predicted."""
        self.seen += images
        self.skipped += skipped
        if self.on_progress is not None:
            self.on_progress(self.seen, self.total, self.skipped)

    def predict_here(self) -> None:
        """Predict in this process what is in no part yet, one lane after the other."""
        begun = time.perf_counter()
        with Writer() as writer:
            for lane, first in self.left(self.lanes):
                self.predictor.restore(self.states(lane))
                self._predict_lane(lane, first, writer)
        self.result.busy = self.predictor.busy
        self.result.waited = time.perf_counter() - begun - self.predictor.busy

    def _predict_lane(self, lane: Lane, first: int, writer: Writer) -> None:
        cutter = PartCutter(self.predictor, lane, first, self.state is not None)
        rows: list[Future[list[Row]]] = []
        consistent = True  # rows and states are of the same images
        try:
            for read in self.predictor.reader.batches(self.source, first, lane.stop):
                with interrupted_after():
                    consistent = False
                    rows.append(writer.submit(self.predictor.predict_deferred(read)))
                    if part := cutter.add(len(read.keys)):
                        writer.submit(self._write, part, rows)
                        rows = []
                    consistent = True
                self.advance(len(read.keys), len(read.unreadable))
        except KeyboardInterrupt:
            if consistent and rows and (part := cutter.add(0, due=True)):
                writer.submit(self._write, part, rows)
            raise

    def _write(self, part: Part, rows: Sequence[Future[list[Row]]]) -> None:
        made = [row for some in rows for row in some.result()]
        self.parts.add(replace(part, rows=made))

    def _rows(self, predicted: Counter[Lane]) -> Iterator[Row]:
        """Yield all rows in the order of the list, counted on the way.

        ``predicted`` counts those without error.
        """
        rows = self._rows_as_predicted(predicted)
        if self.result.shuffled:
            rows = self._in_list_order(rows)
        for row in rows:
            self.result.count(self.predictor.row_format, row)
            if self.options.keep_rows:
                self.result.rows.append(row)
            yield row

    def _rows_as_predicted(self, predicted: Counter[Lane]) -> Iterator[Row]:
        """Yield the rows of the parts in the order of prediction."""
        for lane in self.lanes:
            for path in self.parts.finished(lane):
                with path.open(encoding="utf-8") as file:
                    for line in file:
                        row: Row = json.loads(line)
                        predicted[lane] += not row["error"]
                        yield row

    def _in_list_order(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Sort rows into the order of the list, on disk."""
        assert isinstance(self.source.images, ImageList)
        listing = self.source.images
        turns = (listing.numbers(lane.start, lane.stop) for lane in self.lanes)
        numbers = chain.from_iterable(turns)
        lines = (json.dumps(row) for row in rows)
        path = self.parts.folder / SORTED
        path.unlink(missing_ok=True)  # of a run that was killed while it sorted
        with closing(sqlite3.connect(path)) as table:
            table.execute("PRAGMA journal_mode = OFF")
            table.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, line TEXT)")
            numbered = zip(numbers, lines, strict=True)
            table.executemany("INSERT INTO rows VALUES (?, ?)", numbered)
            for (line,) in table.execute("SELECT line FROM rows ORDER BY number"):
                row: Row = json.loads(line)
                yield row

    def _assemble_table(self, rows: Iterator[Row]) -> None:
        """Make the output file of the rows; it appears complete or not at all."""
        path = self.parts.folder / "table"
        with path.open("wb") as file:
            self.options.write_table(rows, self.source.table_columns(), file)
            file.flush()
            os.fsync(file.fileno())
        if is_url(self.target):
            filesystem, remote = find_filesystem(str(self.target))
            filesystem.put_file(str(path), remote)
            return
        path.replace(self.target)
        sync_folder(Path(self.target).parent)

    def _save_states(
        self, file: Path, seen: dict[str, int], predicted: Counter[Lane]
    ) -> None:
        """Write the state of the one lane, one per group, or the joint one of several lanes."""
        predictor = self.predictor
        if self.options.group_by is None:
            (adapter,) = predictor.adapters.values()
            before_first_image = Lane(0, 0)
            (start,) = self.parts.states(before_first_image).values()
            ends: list[bytes] = []
            for lane in self.lanes:
                ends += self.parts.states(lane).values()
            merge_states(adapter, ends, start)
            predictor.save(file, seen[""] + predicted.total())
            return
        for lane in self.lanes:
            own_file = self.state_file(lane)
            assert own_file is not None
            predictor.restore(self.parts.states(lane))
            predictor.save(own_file, seen[lane.group] + predicted[lane])
