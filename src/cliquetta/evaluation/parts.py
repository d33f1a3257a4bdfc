"""The folder of an unfinished prediction run, from which it continues after being stopped.

It holds the list of images (``images.sqlite``), what the run was asked for (``run.json``), finished
parts (``FIRST-LAST.jsonl``, complete or absent) and the methods' state after the last of them.
States are written before the part they belong to and removed after the next one: whichever step a
crash hits, the last finished part has its state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cliquetta.atomic import exclusive, write_atomically
from cliquetta.evaluation.table_files import Row
from cliquetta.methods._shared.state import pack_state, unpack_state
from cliquetta.methods.base import Adapter


@dataclass
class Parts:
    """The folder of a run with an output file; used by one process at a time."""

    folder: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out; a run that could not begin leaves nothing behind."""
        self.folder.mkdir(exist_ok=True)
        with exclusive(self.folder):
            try:
                yield
            finally:
                if self.folder.exists() and not self.read():
                    shutil.rmtree(self.folder)

    def read(self) -> dict[str, Any]:
        """What the run was asked for; empty if it was not begun."""
        try:
            return dict(json.loads((self.folder / "run.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def begin(self, facts: Mapping[str, Any]) -> None:
        """From here on the run can be continued."""
        write_atomically(self.folder / "run.json", json.dumps(facts).encode())

    def clear(self) -> None:
        """Forget everything but the lock."""
        for path in self.folder.iterdir():
            if path.name != ".lock":
                path.unlink()

    def finished(self, start: int) -> list[tuple[int, Path]]:
        """Where every part ends, and its file, in order from ``start`` without a gap."""
        found, place = [], start
        for path in sorted(self.folder.glob("*-*.jsonl")):
            first, last = map(int, path.stem.split("-"))
            if first == place:
                found.append((last, path))
                place = last
        return found

    def add(self, start: int, stop: int, rows: Sequence[Row]) -> None:
        """Add a part; its rows are complete or absent. States are saved before."""
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        write_atomically(self.folder / f"{start:012d}-{stop:012d}.jsonl", data)
        for path in self.folder.glob(f"{start:012d}.*.safetensors"):
            path.unlink()

    def save_states(self, place: int, adapters: Mapping[str, Adapter]) -> None:
        """The methods' state before image ``place``."""
        for name, adapter in adapters.items():
            write_atomically(self._state(place, name), pack_state(adapter))

    def load_states(self, place: int, adapters: Mapping[str, Adapter]) -> None:
        """Let the methods continue at image ``place``."""
        for name, adapter in adapters.items():
            path = self._state(place, name)
            unpack_state(adapter, path.read_bytes(), source=str(path))

    def _state(self, place: int, name: str) -> Path:
        return self.folder / f"{place:012d}.{name}.safetensors"
