"""Work ahead of its consumer, in order: by worker processes, by threads, or in the caller's thread.

Threads share one interpreter lock: more than a few of them decode no faster, and hold up the
thread that feeds a GPU. Processes scale with the cores. They are those of PyTorch's
:class:`~torch.utils.data.DataLoader`, which notices one that dies; arrays come back in a ring of
shared memory that is laid out once, because a segment per array costs a connection for each.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Dataset

from cliquetta.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

Array = npt.NDArray[Any]
Made = tuple[tuple[Array, ...], Any]
"""Arrays, and anything small that can be pickled."""

PREFETCH = 2
"""Items that a worker process has been given, at most."""
_ROOMY = 2**23
"""Bytes of an item, many views, from which a worker is given one at a time."""
_LARGEST = 2**26
"""Bytes of a pickled function beyond which it stays in this process."""

_PRELOAD = ("cliquetta.data.stream", "cliquetta.data.listing")
"""What the functions of this package are imported from, by name only."""

_Shapes = list[tuple[tuple[int, ...], str]]
_log = logging.getLogger(__name__)


class WorkerError(RuntimeError):
    """A worker process ended before its work was done."""


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, and the limits of its container."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for quota, period in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (cgroup / quota).read_text().split()
            words += [] if period is None else (cgroup / period).read_text().split()
            limit = int(words[0]) / int(words[1])
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue  # there is no such limit, or it says "max"
        if limit > 0:
            cores = min(cores, math.ceil(limit))
    return cores


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, ahead: int
) -> Generator[Result, None, None]:
    """``function`` of every item, in order, with at most ``ahead`` results waiting.

    ``workers`` threads compute; 0 computes in the caller's thread when asked. An exception of
    ``function`` reaches the caller at its item's turn; a caller that stops early leaves no work
    behind.
    """
    if workers < 0 or ahead < 1:
        raise UserError(f"workers is 0 or more and ahead 1 or more, got {workers} and {ahead}")
    if workers == 0:
        yield from map(function, items)
        return
    source = iter(items)
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="cliquetta-loader")
    waiting: deque[Future[Result]] = deque()
    try:
        waiting.extend(pool.submit(function, item) for item in islice(source, ahead))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(source, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def map_in_processes(
    function: Callable[[Item], Made], items: Iterable[Item], *, workers: int, room: int
) -> Generator[Made, None, None]:
    """``function`` of every item, in order, by worker processes, or by threads if there are none.

    Args:
        function: Is pickled once, for each worker.
        items: Plain data: they are pickled one by one.
        workers: Processes, at least one.
        room: Bytes that the arrays of an item take, at most.

    Returns:
        What ``function`` makes; arrays are valid until the next is asked for.

    Raises:
        WorkerError: A worker was killed, or ran out of memory.

    """
    pickled = _pickled(function)
    started = None if pickled is None else _start(pickled, items, workers, room)
    if started is None:
        yield from map_ahead(function, items, workers=workers, ahead=workers + 1)
        return
    work, results = started
    try:
        for slot, (shapes, note) in enumerate(_results(results)):
            yield tuple(work.arrays(slot, shapes)), note
    finally:
        results._shutdown_workers()


def _results(started: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from started
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise WorkerError(
            "a process that decodes images was killed, most likely for want of memory: use fewer "
            "(--workers), or decode in this process (--workers 0)"
        ) from error


@dataclass(eq=False)
class _Work(Dataset[Any]):
    """What a worker process holds: the function, and the ring that its arrays go to."""

    pickled: bytes
    ring: Any
    """Bytes of ``slots`` times ``room``, which are gone with the last process that holds them."""
    room: int
    slots: int
    pillow: tuple[bool, int | None]
    """Pillow's settings in the process that started it: truncated files, and most pixels."""

    @cached_property
    def function(self) -> Callable[[Any], Made]:
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = self.pillow
        function: Callable[[Any], Made] = pickle.loads(self.pickled)
        return function

    def __getitem__(self, job: tuple[int, Any]) -> tuple[_Shapes, Any]:
        """Shapes of the arrays, which are in their slot then, and the note."""
        slot, item = job
        arrays, note = self.function(item)
        shapes: _Shapes = [(array.shape, array.dtype.str) for array in arrays]
        for place, array in zip(self.arrays(slot, shapes), arrays, strict=True):
            place[...] = array
        return shapes, note

    def arrays(self, slot: int, shapes: _Shapes) -> Iterator[Array]:
        """The arrays of a slot."""
        first = slot % self.slots * self.room
        for shape, kind in shapes:
            size = math.prod(shape)
            yield np.frombuffer(self.ring, kind, size, first).reshape(shape)
            first += size * np.dtype(kind).itemsize


def _pickled(function: Callable[[Any], Made]) -> bytes | None:
    """The function as worker processes can take it; ``None`` where there can be none."""
    process = multiprocessing.current_process()
    reason = ""
    pickled = b""
    if process.daemon:
        reason = "a daemonic process may not start others"
    elif getattr(process, "_inheriting", False):
        reason = "this process is itself just starting"
    else:
        try:
            pickled = pickle.dumps(function, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever a dataset of the caller's raises
            reason = f"they cannot be sent what to read ({error})"
    if b"__main__" in pickled:
        reason = "they cannot import what was defined in the main script"
    elif len(pickled) > _LARGEST:
        reason = f"they would each hold {len(pickled) / 2**20:,.0f} MB of images"
    if reason:
        _log.info("threads read images, not processes: %s", reason)
        return None
    return pickled


def start_server() -> Any:
    """Begin to start the server that workers are forked from, and give the way to start them.

    It imports torch once, for all of them, while the caller goes on.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver  # not on Windows

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOAD])
    forkserver.ensure_running()
    return context


def _start(
    pickled: bytes, items: Iterable[Any], workers: int, room: int
) -> tuple[_Work, Any] | None:
    """Worker processes and an iterator over their results; ``None`` if the system grants none."""
    prefetch = PREFETCH if room < _ROOMY else 1
    slots = workers * prefetch + 1
    try:
        context = start_server()
        pillow = (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)
        work = _Work(pickled, context.RawArray("B", slots * room), room, slots, pillow)
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=zip(count(), items, strict=False),
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=_same,
            worker_init_fn=_settle,
            multiprocessing_context=context,
            generator=torch.Generator(),  # of the workers' seeds: the global one is left alone
        )
        with _without_main():
            return work, iter(loader)
    except OSError as error:
        _log.warning("threads read images: no worker processes can be started (%s)", error)
        return None


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script from processes that start: without a guard they would run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _same(made: Any) -> Any:
    return made


def _settle(worker: int) -> None:
    """End with the process that started the workers, however it ends; Ctrl-C is for it alone."""
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
