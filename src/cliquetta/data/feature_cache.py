"""Encoded features on disk: memory-mapped, checked block by block, shared by processes.

A table is a folder named by the hash of all that it depends on: ``features.npy``, and a
checksum per block in ``table.json``. A block counts if its checksum is there and right:
so builds continue, damage is made again, and readers need no lock.
"""

import hashlib
import json
import logging
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from cliquetta.atomic import write_atomically

FORMAT = "cliquetta-features-1"
FEATURES = "features.npy"
TABLE = "table.json"
# Bytes of a table that a process may hold in memory before it releases them.
RESIDENT = 2**28
# How much work an interrupted build may lose.
SAVE_SECONDS = 20.0

_log = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FeatureBlock:
    """Consecutive rows of a table."""

    # (rows, V, E); any finite value where an image could not be read.
    features: FloatArray
    # Why images could not be read, by row of the table.
    unreadable: Mapping[int, str] = field(default_factory=dict)

    def checksum(self) -> int:
        """CRC-32 of features and notes: notices a torn or flipped block, and costs little."""
        features = np.ascontiguousarray(self.features)
        notes = json.dumps(sorted(self.unreadable.items()))
        return zlib.crc32(notes.encode(), zlib.crc32(features.data))


@dataclass(frozen=True)
class TableLayout:
    """Shape of a table and all that decides it; equal layouts share a table."""

    # Everything that decides the features, as JSON types.
    depends_on: Mapping[str, Any]
    # Images, views of each, entries of a feature.
    shape: tuple[int, int, int]
    # Of a block.
    rows: int

    @property
    def name(self) -> str:
        """Hash of the layout."""
        facts = [FORMAT, dict(self.depends_on), self.shape, self.rows]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def blocks(self) -> list[range]:
        """Return the rows of every block."""
        count = self.shape[0]
        firsts = range(0, count, self.rows)
        return [range(first, min(first + self.rows, count)) for first in firsts]


class FeatureTable:
    """Finished table: ``features`` (n, V, E) are mapped, not loaded."""

    def __init__(self, features: FloatArray, unreadable: Mapping[int, str]) -> None:
        self.features = features
        # Rows whose image could not be read, and why.
        self.unreadable = unreadable
        self._touched = 0

    def take(self, rows: npt.NDArray[np.int64]) -> FloatArray:
        """Copy some rows (n, V, E); a pass over a large table stays small in memory."""
        values = self.features[rows]
        self._touched += values.nbytes
        if self._touched > RESIDENT:
            _release(self.features)
            self._touched = 0
        return values


def _release(mapped: FloatArray) -> None:
    """Tell the system that this process needs no page of the file at present."""
    source: object = mapped.base
    if isinstance(source, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        source.madvise(mmap.MADV_DONTNEED)


# Encodes blocks of rows, in their order.
Encode = Callable[[Sequence[range]], Iterator[FeatureBlock]]


def open_table(
    root: Path,
    layout: TableLayout,
    encode: Encode,
    *,
    title: str = "features",
    on_progress: Callable[[int, int], None] | None = None,
) -> FeatureTable:
    """Open the table of ``layout`` under ``root``; one process encodes what is missing."""
    store = _Store(root / layout.name, layout, title)
    if store.missing():
        store.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(store.folder / ".lock"):
            # Another process may have made it in the meantime.
            if missing := store.missing():
                store.fill(missing, encode, on_progress)
    return store.table()


@dataclass(frozen=True)
class _Written:
    """Entry of a block in the list of a table."""

    checksum: int
    # Why images could not be read, by row of the table.
    unreadable: Mapping[int, str]


@dataclass
class _Store:
    """Folder of one table."""

    folder: Path
    layout: TableLayout
    title: str

    def __post_init__(self) -> None:
        self.path = self.folder / FEATURES
        # By the first row of a block.
        self.written: dict[int, _Written] = {}

    def missing(self) -> list[range]:
        """Return the blocks that are not there, or not as they were written."""
        blocks = self.layout.blocks()
        mapped = self._map()
        if mapped is None:
            self.written = {}
            return blocks
        self.written = self._read_written()

        missing = []
        damaged = 0
        bytes_of_block = mapped[:1].nbytes * self.layout.rows
        step = max(1, RESIDENT // bytes_of_block)
        for number, rows in enumerate(blocks):
            if number % step == 0:
                _release(mapped)
            written = self.written.get(rows.start)
            if written is None:
                missing.append(rows)
                continue

            features = mapped[rows.start : rows.stop]
            block = FeatureBlock(features, written.unreadable)
            if block.checksum() != written.checksum:
                missing.append(rows)
                damaged += 1
        if damaged:
            _log.warning(
                "%d of %d blocks of %s in %s are damaged: encoding them again",
                damaged,
                len(blocks),
                self.title,
                self.folder,
            )
        return missing

    def fill(
        self,
        missing: Sequence[range],
        encode: Encode,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Write the blocks, and every so often which of them are there; needs the lock."""
        if self._map() is None:  # those who mapped an old file keep it
            self.path.unlink(missing_ok=True)
            np.lib.format.open_memmap(
                self.path, mode="w+", dtype=np.float32, shape=self.layout.shape
            )

        # What is written anew does not count until it is saved.
        for rows in missing:
            self.written.pop(rows.start, None)

        images = self.layout.shape[0]
        done = images - sum(map(len, missing))
        saved = time.monotonic()
        # Not through the map: a full disk would end the process there, here it raises.
        with self.path.open("r+b") as file:
            for rows, block in zip(missing, encode(missing), strict=True):
                self._write(file, rows, block)
                done += len(rows)
                if on_progress is not None:
                    on_progress(done, images)
                if done == images or time.monotonic() - saved > SAVE_SECONDS:
                    self._save(file)
                    saved = time.monotonic()

    def table(self) -> FeatureTable:
        """Open the finished table."""
        mapped = self._map()
        if mapped is None:
            raise OSError(f"{self.path} was changed while it was being read; run again")

        unreadable: dict[int, str] = {}
        for written in self.written.values():
            unreadable.update(written.unreadable)
        return FeatureTable(mapped, unreadable)

    def _read_written(self) -> dict[int, _Written]:
        """Read which blocks are there; none where the list is missing or damaged."""
        written = {}
        try:
            text = (self.folder / TABLE).read_text(encoding="utf-8")
            for first, checksum, notes in json.loads(text)["blocks"]:
                unreadable = {int(row): str(reason) for row, reason in notes}
                written[int(first)] = _Written(int(checksum), unreadable)
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return written

    def _map(self) -> FloatArray | None:
        """Map the file, if its header and its length are right."""
        try:
            mapped: FloatArray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if mapped.shape != self.layout.shape or mapped.dtype != np.float32:
            return None
        return None if np.isfortran(mapped) else mapped

    def _write(self, file: BinaryIO, rows: range, block: FeatureBlock) -> None:
        """Write one block at its place, which is counted from the end of the file."""
        images, views, width = self.layout.shape
        features = np.ascontiguousarray(block.features, dtype=np.float32)
        features = features.reshape(len(rows), views, width)
        row_bytes = features.itemsize * views * width

        # The header comes first, of a length that numpy chooses.
        end = self.path.stat().st_size
        file.seek(end - (images - rows.start) * row_bytes)
        file.write(features.data)

        unreadable = dict(block.unreadable)
        checksum = FeatureBlock(features, unreadable).checksum()
        self.written[rows.start] = _Written(checksum, unreadable)

    def _save(self, file: BinaryIO) -> None:
        """Save features first, then the list that says which of them count."""
        file.flush()
        os.fsync(file.fileno())
        blocks = [
            [first, written.checksum, sorted(written.unreadable.items())]
            for first, written in sorted(self.written.items())
        ]
        table = {
            "format": FORMAT,
            "title": self.title,
            "depends_on": dict(self.layout.depends_on),
            "shape": self.layout.shape,
            "rows": self.layout.rows,
            "blocks": blocks,
        }

        text = json.dumps(table, ensure_ascii=False)
        write_atomically(self.folder / TABLE, text.encode())
