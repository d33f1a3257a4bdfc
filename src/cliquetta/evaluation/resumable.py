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
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from cliquetta.atomic import sync_folder
from cliquetta.data.listing import STDIN, Listing, digest, list_images
from cliquetta.errors import UserError
from cliquetta.evaluation.answers import Answers, PredictionRun
from cliquetta.evaluation.inference import ImageSource, Predictor
from cliquetta.evaluation.parts import Parts
from cliquetta.evaluation.table_files import Row, TableFormat
from cliquetta.methods._shared.state import describe

PART_SECONDS = 20.0
"""How much work a run that is stopped may lose."""
PART_ROWS = 4096
_FORMAT = "cliquetta-predict-1"


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


def shard_range(count: int, shard: tuple[int, int], batch_size: int) -> tuple[int, int]:
    """First and last image of a shard, in whole batches of the list."""
    (i, n), batches = shard, -(-count // batch_size)
    ends = (batches * (i - 1) // n, batches * i // n)
    return min(ends[0] * batch_size, count), min(ends[1] * batch_size, count)


def run_with_parts(
    predictor: Predictor,
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
            "batch size": predictor.batch_size,
            "seed": predictor.seed,
            "top k": predictor.answers.top_k,
            "all probabilities": predictor.answers.all_probabilities,
            "state": None if state is None else str(state),
            "method": {name: describe(adapter) for name, adapter in predictor.adapters.items()},
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
            seen = predictor.load(state)
            listing = list_images(sources, parts.folder / "images.sqlite", stdin)
            start, stop = shard_range(len(listing), shard, predictor.batch_size)
            parts.save_states(start, predictor.adapters)
            facts = {"asked": asked, "start": start, "stop": stop, "seen": seen}
            parts.begin(facts)
        else:
            listing = Listing(parts.folder / "images.sqlite")
        with closing(listing):
            source = ImageSource(listing, predictor.answers)
            run = PredictionRun(repeated=listing.repeated, unused=listing.unused, out=target)
            begun = time.perf_counter()
            run.before = _work_off(predictor, source, parts, facts["start"], facts["stop"])
            run.seconds = time.perf_counter() - begun
            rows = _collect(run, predictor.answers, parts, facts["start"], keep_rows)
            put_together(rows, table, target, parts.folder, source.table_columns())
        if run.images != facts["stop"] - facts["start"]:
            raise RuntimeError(f"{run.images} rows for {facts['stop'] - facts['start']} images")
        predictor.save(state, facts["seen"] + run.images - run.skipped)
        (parts.folder / "run.json").unlink()  # the run is over, and its folder goes
    return run


def _work_off(
    predictor: Predictor, source: ImageSource, parts: Parts, start: int, stop: int
) -> int:
    """Predict what is not in a part yet; returns how many images were there already."""
    finished = parts.finished(start)
    done = finished[-1][0] if finished else start
    parts.load_states(done, predictor.adapters)
    waiting: list[Row] = []
    first, saved = done, time.monotonic()
    for rows in predictor.run(source, done, stop, start):
        waiting += rows
        late = time.monotonic() - saved > PART_SECONDS
        if late or len(waiting) >= PART_ROWS or first + len(waiting) == stop:
            last = first + len(waiting)
            parts.save_states(last, predictor.adapters)
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
                run.count(answers, row)
                if keep_rows:
                    run.rows.append(row)
                yield row


def put_together(
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
