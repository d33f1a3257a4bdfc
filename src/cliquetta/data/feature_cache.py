"""Encoded features on disk: memory-mapped, checked block by block, shared by processes.

A table is a folder named by the hash of all that it depends on: ``features.npy``, and a
checksum per block in ``table.json``. A block counts if its checksum is there and right:
so builds continue, damage is made again, and readers need no lock.
"""

import hashlib
import json
import logging
import math
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
RESIDENT = (
    2**28
)  # bytes of a table that a process may hold in memory before it lets go of them
SAVE_SECONDS = 20.0  # how much work an interrupted build may lose

_log = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FeatureBlock:
    """Consecutive rows of a table."""

    features: (
        FloatArray  # (rows, V, E); any finite value where an image could not be read
    )
    unreadable: Mapping[int, str] = field(
        default_factory=dict
    )  # why, by row of the table

    def checksum(self) -> int:
        """CRC-32 of features and notes: notices a torn or flipped block, and costs little."""
        notes = json.dumps(sorted(self.unreadable.items())).encode()
        return zlib.crc32(notes, zlib.crc32(np.ascontiguousarray(self.features).data))


@dataclass(frozen=True)
class TableLayout:
    """Shape of a table and all that decides it; equal layouts share a table."""

    depends_on: Mapping[str, Any]  # everything that decides the features, as JSON types
    shape: tuple[int, int, int]  # images, views of each, entries of a feature
    rows: int

    @property
    def name(self) -> str:
        """Hash of the layout."""
        text = json.dumps(
            [FORMAT, dict(self.depends_on), self.shape, self.rows], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def blocks(self) -> list[range]:
        """The rows of every block."""
        count = self.shape[0]
        return [range(i, min(i + self.rows, count)) for i in range(0, count, self.rows)]


class FeatureTable:
    """A finished table: ``features`` (n, V, E) are mapped, not loaded."""

    def __init__(self, features: FloatArray, unreadable: Mapping[int, str]) -> None:
        self.features = features
        self.unreadable = unreadable  # rows whose image could not be read, and why
        self._touched = 0

    def take(self, rows: npt.NDArray[np.int64]) -> FloatArray:
        """Copies of some rows (n, V, E); a pass over a large table stays small in memory."""
        values = self.features[rows]
        self._touched += values.nbytes
        if self._touched > RESIDENT:
            _let_go(self.features)
            self._touched = 0
        return values


def _let_go(mapped: FloatArray) -> None:
    """Tell the system that this process needs no page of the file at present."""
    source: object = mapped.base
    if isinstance(source, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        source.madvise(mmap.MADV_DONTNEED)


Encode = Callable[
    [Sequence[range]], Iterator[FeatureBlock]
]  # the blocks of rows, in their order


def open_table(
    root: Path,
    layout: TableLayout,
    encode: Encode,
    *,
    title: str = "features",
    on_progress: Callable[[int, int], None] | None = None,
) -> FeatureTable:
    """The table of ``layout`` under ``root``; one process encodes what is missing, others wait."""
    store = _Store(root / layout.name, layout, title)
    if store.missing():
        store.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(store.folder / ".lock"):
            if (
                missing := store.missing()
            ):  # another process may have made it in the meantime
                store.fill(missing, encode, on_progress)
    return store.table()


@dataclass
class _Store:
    """One table's folder."""

    folder: Path
    layout: TableLayout
    title: str

    def __post_init__(self) -> None:
        self.path = self.folder / FEATURES
        # by the first row of a block: its checksum and its unreadable rows
        self.known: dict[int, tuple[int, dict[int, str]]] = {}

    def missing(self) -> list[range]:
        """The blocks that are not there, or not as they were written."""
        mapped = self._map()
        self.known = {} if mapped is None else self._read_known()
        if mapped is None:
            return self.layout.blocks()
        wanted, damaged = [], 0
        step = max(1, RESIDENT // (mapped[:1].nbytes * self.layout.rows))
        for number, rows in enumerate(self.layout.blocks()):
            if number % step == 0:
                _let_go(mapped)
            checksum, unreadable = self.known.get(rows.start, (None, {}))
            block = FeatureBlock(mapped[rows.start : rows.stop], unreadable)
            if checksum is None or block.checksum() != checksum:
                wanted.append(rows)
                damaged += checksum is not None
        if damaged:
            _log.warning(
                "%d of %d blocks of %s in %s are damaged: encoding them again",
                *(damaged, len(self.layout.blocks()), self.title, self.folder),
            )
        return wanted

    def fill(
        self,
        missing: Sequence[range],
        encode: Encode,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Write the blocks, and every so often down which are there; needs the lock."""
        if self._map() is None:  # those who mapped an old file keep it
            self.path.unlink(missing_ok=True)
            shape = self.layout.shape
            np.lib.format.open_memmap(
                self.path, mode="w+", dtype=np.float32, shape=shape
            )
        for rows in missing:
            self.known.pop(rows.start, None)
        images, saved = self.layout.shape[0], time.monotonic()
        done = images - sum(map(len, missing))
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
        """The finished table."""
        mapped = self._map()
        if mapped is None:
            raise OSError(f"{self.path} was changed while it was being read; run again")
        unreadable = {
            row: why for _, notes in self.known.values() for row, why in notes.items()
        }
        return FeatureTable(mapped, unreadable)

    def _read_known(self) -> dict[int, tuple[int, dict[int, str]]]:
        try:
            stated = json.loads((self.folder / TABLE).read_text(encoding="utf-8"))
            return {
                int(first): (int(crc), {int(row): str(why) for row, why in notes})
                for first, crc, notes in stated["blocks"]
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # not there, or damaged: then nothing is known

    def _map(self) -> FloatArray | None:
        """The mapped file, if its header and its length are right."""
        try:
            mapped: FloatArray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        fits = mapped.shape == self.layout.shape and mapped.dtype == np.float32
        return mapped if fits and not np.isfortran(mapped) else None

    def _write(self, file: BinaryIO, rows: range, block: FeatureBlock) -> None:
        images, *row = self.layout.shape
        data = np.ascontiguousarray(block.features, dtype=np.float32).reshape(
            len(rows), *row
        )
        file.seek(self.path.stat().st_size - 4 * (images - rows.start) * math.prod(row))
        file.write(data.data)
        notes = dict(block.unreadable)
        self.known[rows.start] = FeatureBlock(data, notes).checksum(), notes

    def _save(self, file: BinaryIO) -> None:
        """Features first, then the list that says which of them count."""
        file.flush()
        os.fsync(file.fileno())
        stated = {
            "format": FORMAT,
            "title": self.title,
            "depends_on": dict(self.layout.depends_on),
            "shape": self.layout.shape,
            "rows": self.layout.rows,
            "blocks": [
                [first, crc, sorted(notes.items())]
                for first, (crc, notes) in sorted(self.known.items())
            ],
        }
        write_atomically(
            self.folder / TABLE, json.dumps(stated, ensure_ascii=False).encode()
        )
