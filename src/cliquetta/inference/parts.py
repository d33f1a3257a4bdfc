"""The folder of an unfinished prediction run, from which it continues after being stopped.

It holds the list of images (``images.sqlite``), the request (``run.json``), finished
parts (``FIRST-LAST.jsonl``, complete or absent) and the methods' state after the last
of every lane. A state is written before its part and removed after the next, so that the
last part has one; that of a finished lane is kept only where a state is asked for.
"""

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cliquetta.atomic import exclusive, write_atomically
from cliquetta.inference.predictor import Predictor, States
from cliquetta.inference.tables import Row

PART_SECONDS = 20.0  # how much work a run that is stopped may lose
PART_ROWS = 4096
_START = "start"
_OURS = (
    "images.sqlite*",
    ".images.sqlite*",
    "sorted.sqlite*",
    "*-*.jsonl",
    "*.safetensors",
    ".*.tmp",
    "table",
)
_WAITING = 4  # batches whose rows are not made yet, at most

T = TypeVar("T")


@dataclass(frozen=True)
class Lane:
    """Consecutive images of a list that one state passes through, batch after batch."""

    start: int
    stop: int
    group: str = ""  # what its images share in the column that the list is grouped by


@dataclass(frozen=True)
class Part:
    """Finished images of a lane and the methods' state after them."""

    lane: Lane
    first: int
    last: int
    rows: Sequence[Row]  # empty until they are made
    states: States


@dataclass
class PartCutter:
    """Counts the images of a lane until a part is due."""

    predictor: Predictor
    lane: Lane
    first: int  # the first image that is in no part yet
    keep_state: bool  # whether the state at the end of the lane is wanted
    most_rows: int = field(default_factory=lambda: PART_ROWS)
    seconds: float = field(default_factory=lambda: PART_SECONDS)

    def __post_init__(self) -> None:
        self.next = self.first  # the image whose turn it is
        self._begun = time.monotonic()

    def add(self, images: int, *, due: bool = False) -> Part | None:
        """Return the part that these images end, if it is time, full, due, or the lane's last."""
        self.next += images
        late = time.monotonic() - self._begun > self.seconds
        full = self.next - self.first >= self.most_rows
        complete = self.next == self.lane.stop
        if not (due or late or full or complete):
            return None
        # at the end of a lane nothing continues from the states
        needed = self.keep_state or not complete
        part = Part(
            lane=self.lane,
            first=self.first,
            last=self.next,
            rows=(),
            states=self.predictor.states() if needed else {},
        )
        self.first = self.next
        self._begun = time.monotonic()
        return part


@contextmanager
def interrupted_after() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []

    def note(number: int, _: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


class Writer:
    """A thread that makes and writes rows, in order, while the next batch is predicted.

    What it was given is done when it is closed, unless something before it failed.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "cliquetta-writer")
        self._waiting: deque[Future[Any]] = deque()

    def submit(self, function: Callable[..., T], *given: Any) -> Future[T]:
        """Have something done later; raise what went wrong before. A few things wait at most."""
        while self._waiting and (
            len(self._waiting) > _WAITING or self._waiting[0].done()
        ):
            self._waiting.popleft().result()
        before = self._waiting[-1] if self._waiting else None

        def after() -> T:
            if before is not None:
                before.result()
            return function(*given)

        self._waiting.append(job := self._thread.submit(after))
        return job

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            for job in self._waiting:
                job.result()


@dataclass
class Parts:
    """The folder of a run with an output file; used by one process at a time."""

    folder: Path
    methods: Sequence[str]  # those that have a state, by name

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out; a run that could not begin leaves nothing behind."""
        try:
            with exclusive(self.folder):
                try:
                    yield
                finally:
                    if not self.read():
                        self.clear()
        finally:
            with suppress(
                OSError
            ):  # something is to be continued, or another run begins here
                self.folder.rmdir()

    def remove_finished(self) -> None:
        """Remove what a run left that was killed after its last step, or before its first."""
        if self.folder.is_dir() and not self.read():
            with self.held():
                pass

    def read(self) -> dict[str, Any]:
        """Read the facts of the run; empty if it was not begun."""
        try:
            return dict(
                json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
            )
        except FileNotFoundError:
            return {}

    def begin(self, facts: Mapping[str, Any], states: States) -> None:
        """From here on the run can be continued; lanes start from ``states``."""
        for name, data in states.items():
            write_atomically(self.folder / f"{_START}.{name}.safetensors", data)
        write_atomically(self.folder / "run.json", json.dumps(facts).encode())

    def finish(self) -> None:
        """End the run: its folder may be deleted, at the next start if not by this one."""
        (self.folder / "run.json").unlink()

    def clear(self) -> None:
        """Remove all files of a run but the lock; those of others stay."""
        self.__dict__.pop("_ends", None)
        # first of all what makes it a run, so that none is continued without its parts
        (self.folder / "run.json").unlink(missing_ok=True)
        for pattern in _OURS:
            for path in self.folder.glob(pattern):
                path.unlink()

    @cached_property
    def _ends(self) -> dict[int, int]:
        """The end of every part, by its first image."""
        ends = {}
        for path in self.folder.glob("*-*.jsonl"):
            first, last = path.stem.split("-")
            ends[int(first)] = int(last)
        return ends

    def _spans(self, lane: Lane) -> Iterator[tuple[int, int]]:
        """Yield first and last image of a lane's parts, in order without a gap."""
        first = lane.start
        while first < lane.stop and first in self._ends:
            last = self._ends[first]
            yield first, last
            first = last

    def finished(self, lane: Lane) -> list[Path]:
        """Return the files of a lane's parts, in order."""
        return [self._part(*span) for span in self._spans(lane)]

    def done(self, lane: Lane) -> int:
        """Return the first image of a lane that is in no part."""
        return max((last for _, last in self._spans(lane)), default=lane.start)

    def add(self, part: Part) -> None:
        """Add a part; its rows are complete or absent."""
        # the state first: a part without one could not be continued
        for name, state in part.states.items():
            write_atomically(self._state(part.lane, part.last, name), state)
        lines = [json.dumps(row) + "\n" for row in part.rows]
        data = "".join(lines).encode()
        write_atomically(self._part(part.first, part.last), data)
        self._ends[part.first] = part.last
        # the state before this part has served
        if part.first > part.lane.start:
            for name in self.methods:
                self._state(part.lane, part.first, name).unlink(missing_ok=True)

    def states(self, lane: Lane) -> States:
        """Return the states after the last part of a lane; those of the start if there is none."""
        done = self.done(lane)
        return {
            name: self._state(lane, done, name).read_bytes() for name in self.methods
        }

    def _part(self, first: int, last: int) -> Path:
        return self.folder / f"{first:012d}-{last:012d}.jsonl"

    def _state(self, lane: Lane, image: int, name: str) -> Path:
        when = _START if image == lane.start else f"{lane.start:012d}-{image:012d}"
        return self.folder / f"{when}.{name}.safetensors"
