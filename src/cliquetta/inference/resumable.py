"""A prediction run into a file, which survives being stopped at any moment.

Finished parts lie in a folder beside the output file (:mod:`.parts`). The same command continues
from there; batches, and so predictions, do not depend on where a run was stopped. When all parts
are there they become the output file, and the folder goes.
"""

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cliquetta.atomic import sync_folder
from cliquetta.data.features import FeatureDataset
from cliquetta.data.listing import STDIN, ImageList, Source, digest, list_images
from cliquetta.data.remote import find_filesystem, is_url
from cliquetta.errors import UserError
from cliquetta.inference.parts import Lane, Part, PartCutter, Parts, Writer, interrupted_after
from cliquetta.inference.predictor import ImageSource, Predictor, States
from cliquetta.inference.rows import PredictionRun, Row, WriteTable
from cliquetta.methods.state import describe, merge_states

if TYPE_CHECKING:
    from cliquetta.inference.ray_driver import RayCluster, RayWorkers

_FORMAT = "cliquetta-predict-2"
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
    remote = find_filesystem(str(target)) if is_url(target) else None
    local = Path(target) if remote is None else parts_folder(target)
    if remote is None and local.is_dir():
        raise UserError(f"{local} is a folder: name a file, such as {local / 'predictions.csv'}")
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
    """First and last image of a shard, in full batches of the list."""
    (i, n), batches = shard, -(-count // batch_size)
    ends = (batches * (i - 1) // n, batches * i // n)
    return min(ends[0] * batch_size, count), min(ends[1] * batch_size, count)


Progress = Callable[[int, int, int], None]  # images that are done, of how many, and those skipped


@dataclass
class FileRun:
    """A run into a file: begun or continued, here or on a cluster, then put together."""

    predictor: Predictor
    images: Sequence[Source] | FeatureDataset
    target: Path | str  # a file, or a URL
    write_table: WriteTable
    shard: tuple[int, int] = (1, 1)
    group_by: str | None = None
    state: Path | None = None  # a file; with `group_by` a folder with a file per group
    stdin: Path | None = None
    overwrite: bool = False
    keep_rows: bool = False
    on_progress: Progress | None = None
    source: ImageSource = field(init=False)
    lanes: list[Lane] = field(init=False)
    total: int = field(init=False)  # images in all lanes
    seen: int = field(init=False)  # images that are in parts or were predicted since the start
    skipped: int = 0  # of those predicted since the start

    def __post_init__(self) -> None:
        self.parts = Parts(parts_folder(self.target), tuple(self.predictor.adapters))
        self.database = self.parts.folder / "images.sqlite"
        self.result = PredictionRun(out=self.target)

    def complete(self, cluster: "RayCluster | None" = None) -> PredictionRun:
        """Do what is left of the run."""
        self.parts.remove_finished()
        check_writable(self.target, self.state, overwrite=self.overwrite)
        if self.group_by is not None and self.shard[1] > 1:
            raise UserError("a shard would cut groups apart: leave out --shard or --group-by")
        # the folder goes before a cluster is left, which takes seconds
        with ExitStack() as connection, self.parts.held(), ExitStack() as stack:
            # once more: a run of the same command may have ended just before the lock was ours
            check_writable(self.target, self.state, overwrite=self.overwrite)
            workers = None if cluster is None else connection.enter_context(cluster.connect())
            facts = self._begin_or_continue(workers)
            self.lanes = [Lane(*lane) for lane in facts["lanes"]]
            self.total = sum(lane.stop - lane.start for lane in self.lanes)
            row_format, run = self.predictor.row_format, self.result
            if isinstance(self.images, FeatureDataset):
                self.source = ImageSource(self.images, row_format)
            else:
                listing = stack.enter_context(closing(ImageList(self.database)))
                self.source = ImageSource(listing, row_format)
                run.repeated, run.unused = listing.repeated, listing.unused
            self.seen = run.before = sum(self.parts.done(lane) - lane.start for lane in self.lanes)
            begun = time.perf_counter()
            self.do() if workers is None else workers.do(self)
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

    def _begin_or_continue(self, workers: "RayWorkers | None") -> dict[str, Any]:
        """The facts of the run in the folder of parts; begun if there is none to continue.

        A run that was asked for something else is continued by its own command, or given up.
        """
        predictor, parts, row_format = self.predictor, self.parts, self.predictor.row_format
        groups = self.group_by is not None
        if isinstance(self.images, FeatureDataset):
            listed = hashlib.sha256(self.images.rows.tobytes()).hexdigest()
        else:
            listed = digest(self.images, self.stdin)
        asked = {
            "format": _FORMAT,
            "list of images": listed,
            "output": str(self.target),
            "column to group by": self.group_by,
            "number of actors": None if groups or workers is None else workers.actors,
            "shard": list(self.shard),
            "batch size": predictor.batch_size,
            "decoding": predictor.decode,
            "seed": predictor.seed,
            "top k": row_format.top_k,
            "all probabilities": row_format.all_probabilities,
            "multi label": row_format.multi_label,
            "share to reject": row_format.reject,
            "calibration": row_format.calibrate,
            "state": None if self.state is None else str(self.state),
            "method": {name: describe(adapter) for name, adapter in predictor.adapters.items()},
        }
        facts = parts.read()
        differing = [key for key in asked if facts and facts["asked"].get(key) != asked[key]]
        if differing and not self.overwrite:
            remedy = "repeat its command to continue it, or pass --overwrite to start again"
            unfinished = f"an unfinished run with another {differing[0]}"
            raise UserError(f"{parts.folder} holds {unfinished}: {remedy}")
        if facts and not differing:
            return facts
        parts.clear()
        states = predictor.states()
        if self.state is not None and workers is not None and not groups:
            (adapter,) = predictor.adapters.values()
            adapter.merge([adapter.state_dict()])  # refused before the first image, if at all
        lanes = self._list_lanes(1 if workers is None else workers.actors)
        files = {lane.group: self.state_file(lane) for lane in lanes}
        files = files if groups else {"": self.state}  # a shard may be empty
        seen = {group: predictor.load(file) for group, file in files.items()}
        facts = {"asked": asked, "lanes": [astuple(lane) for lane in lanes], "seen": seen}
        facts["classes changed"] = predictor.classes_changed
        parts.begin(facts, states if groups else predictor.states())
        return facts

    def _list_lanes(self, actors: int) -> list[Lane]:
        """One lane per group; else equal parts, in full batches, for each of the actors."""
        count = len(self.images)
        if not isinstance(self.images, FeatureDataset):
            given = self.images, self.database, self.stdin, self.group_by
            with closing(list_images(*given)) as listing:
                count = len(listing)
                groups = listing.groups() if self.group_by is not None else []  # slow if many
            if groups:
                ends = list(accumulate(size for _, size in groups))
                return list(map(Lane, [0, *ends], ends, [name for name, _ in groups]))
        size = self.predictor.batch_size
        start, stop = shard_range(count, self.shard, size)
        ranges = [shard_range(stop - start, (i, actors), size) for i in range(1, actors + 1)]
        return [Lane(start + first, start + last) for first, last in ranges if first < last]

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

    def left(self, lanes: Sequence[Lane]) -> list[tuple[Lane, int]]:
        """Lanes with images that are in no part, and the first of these."""
        firsts = [(lane, self.parts.done(lane)) for lane in lanes]
        return [(lane, first) for lane, first in firsts if first < lane.stop]

    def states(self, lane: Lane) -> States:
        """The states that a lane continues from."""
        file = self.state_file(lane)
        if self.group_by and self.parts.done(lane) == lane.start and file and file.exists():
            self.predictor.load(file)
            return self.predictor.states()
        return self.parts.states(lane)

    def advance(self, images: int, skipped: int) -> None:
        """Report that images were predicted."""
        self.seen, self.skipped = self.seen + images, self.skipped + skipped
        if self.on_progress is not None:
            self.on_progress(self.seen, self.total, self.skipped)

    def do(self) -> None:
        """Predict here what is in no part yet, one lane after the other."""
        begun = time.perf_counter()
        with Writer() as writer:
            for lane, first in self.left(self.lanes):
                self.predictor.restore(self.states(lane))
                cutter = PartCutter(self.predictor, lane, first, self.state is not None)
                rows: list[Future[list[Row]]] = []
                consistent = True  # rows and states are of the same images
                try:
                    for read in self.predictor.reader.batches(self.source, first, lane.stop):
                        with interrupted_after():
                            consistent = False
                            rows.append(writer.submit(self.predictor.ask(read)))
                            if part := cutter.add(len(read.keys)):
                                writer.submit(self._write, part, rows)
                                rows = []
                            consistent = True
                        self.advance(len(read.keys), len(read.unreadable))
                except KeyboardInterrupt:
                    if consistent and rows and (part := cutter.add(0, due=True)):
                        writer.submit(self._write, part, rows)
                    raise
        self.result.busy = self.predictor.busy
        self.result.waited = time.perf_counter() - begun - self.predictor.busy

    def _write(self, part: Part, rows: Sequence[Future[list[Row]]]) -> None:
        self.parts.add(replace(part, rows=[row for some in rows for row in some.result()]))

    def _rows(self, predicted: Counter[Lane]) -> Iterator[Row]:
        """All rows of the parts, counted on the way; ``predicted`` counts those without error."""
        for lane in self.lanes:
            for path in self.parts.finished(lane):
                with path.open(encoding="utf-8") as file:
                    for line in file:
                        row: Row = json.loads(line)
                        self.result.count(self.predictor.row_format, row)
                        predicted[lane] += not row["error"]
                        if self.keep_rows:
                            self.result.rows.append(row)
                        yield row

    def _assemble_table(self, rows: Iterator[Row]) -> None:
        """Make the output file of the rows; it appears complete or not at all."""
        path = self.parts.folder / "table"
        with path.open("wb") as file:
            self.write_table(rows, self.source.table_columns(), file)
            file.flush()
            os.fsync(file.fileno())
        if is_url(self.target):
            filesystem, remote = find_filesystem(str(self.target))
            filesystem.put_file(str(path), remote)
            return
        path.replace(self.target)
        sync_folder(Path(self.target).parent)

    def _save_states(self, file: Path, seen: dict[str, int], predicted: Counter[Lane]) -> None:
        """Write the state of the one lane, one per group, or the joint one of several lanes."""
        predictor = self.predictor
        if self.group_by is None:
            (adapter,) = predictor.adapters.values()
            ends = [state for lane in self.lanes for state in self.parts.states(lane).values()]
            (start,) = self.parts.states(Lane(0, 0)).values()  # before the first image
            merge_states(adapter, ends, start)
            predictor.save(file, seen[""] + sum(predicted.values()))
            return
        for lane in self.lanes:
            own_file = self.state_file(lane)
            assert own_file is not None
            predictor.restore(self.parts.states(lane))
            predictor.save(own_file, seen[lane.group] + predicted[lane])
