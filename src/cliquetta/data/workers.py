"""Work ahead of its consumer, in order: by worker processes, by threads, or in the caller's thread.

Threads share one interpreter lock and hold up the thread that feeds a GPU; processes
scale. A free one takes the next item, where :class:`~torch.utils.data.DataLoader` waits
for the slowest core. Arrays come back in a ring of shared memory: a segment per array
costs a connection for each.
"""

import gc
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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile

Item = TypeVar("Item")
Result = TypeVar("Result")

Array = npt.NDArray[Any]
Made = tuple[tuple[Array, ...], Any]  # arrays, and anything small that can be pickled

# Items per worker process that are ahead of the caller, at most.
PREFETCH = 2
# Bytes of an item, many views, from which there is one per worker.
_ROOMY = 2**23
# Bytes of a pickled function beyond which it stays in this process.
_LARGEST = 2**26
# Where the functions of workers are.
_PRELOAD = ("cliquetta.data.stream", "cliquetta.data.listing")

_Shapes = list[tuple[tuple[int, ...], str]]
_Result: TypeAlias = "Future[tuple[_Shapes, Any]]"
_log = logging.getLogger(__name__)


class WorkerError(RuntimeError):
    """End of a worker process before its work was done."""


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the cores that this process may use: its affinity, and limits of its container."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1

    # Two generations of control groups; each says quota and period.
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            text = " ".join((cgroup / name).read_text() for name in names)
            quota, period = text.split()
            limit = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # there is no such limit, or it says "max"
        if limit > 0:
            cores = min(cores, math.ceil(limit))
    return cores


def map_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    ahead: int,
) -> Generator[Result, None, None]:
    """Map a function over items, in order, by threads, with at most ``ahead`` results waiting.

    0 ``workers``: in the caller's thread. An exception reaches the caller at its item's
        turn.
    """
    if workers == 0:
        yield from map(function, items)
        return
    source = iter(items)
    pool = ThreadPoolExecutor(
        max_workers=workers, thread_name_prefix="cliquetta-loader"
    )

    # Results in order, at most `ahead` of them.
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
    """Map a function over items, in order, by worker processes, or by threads if there are none.

    ``room`` is the most bytes that the arrays of an item take; they are valid until the
    next item.
    """
    pickled = _pickle_function(function)
    ahead = workers * (PREFETCH if room < _ROOMY else 1)

    # Start with as many items as may be ahead of the caller.
    jobs = enumerate(items)
    first = list(islice(jobs, ahead))
    started = None if pickled is None else _start(pickled, first, workers, room)
    if started is None:
        rest = (item for _, item in chain(first, jobs))
        yield from map_ahead(function, rest, workers=workers, ahead=workers + 1)
        return

    executor, ring, waiting = started
    try:
        for slot in count():
            if not waiting:
                return

            shapes, note = waiting.popleft().result()
            for number, item in islice(jobs, 1):
                waiting.append(_submit(executor, number, item))
            yield tuple(ring.arrays(slot, shapes)), note
    except BrokenProcessPool as error:
        raise WorkerError(
            "a process that decodes images was killed, most likely for want of memory: use fewer "
            "(--workers), or decode in this process (--workers 0)"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class _Ring:
    """Slots of shared memory for the arrays of an item each, in turn."""

    # `slots` times `room` bytes, gone with the last process that holds them.
    memory: Any
    room: int
    slots: int

    def arrays(self, slot: int, shapes: _Shapes) -> Iterator[Array]:
        """Yield the arrays of a slot, which lie one behind the other."""
        start = slot % self.slots * self.room
        for shape, kind in shapes:
            flat = np.frombuffer(
                self.memory,
                dtype=kind,
                count=math.prod(shape),
                offset=start,
            )
            yield flat.reshape(shape)
            start += flat.nbytes


def _submit(executor: ProcessPoolExecutor, slot: int, item: Any) -> _Result:
    """Give an item to the next free worker; those that start must not run the main script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        return executor.submit(_work, slot, item)
    finally:
        sys.modules["__main__"] = main


# In a worker: its function, and where the results go.
_here: tuple[Callable[[Any], Made], _Ring] | None = None


def _initialise(
    pickled: bytes, ring: _Ring, truncated: bool, pixels: int | None
) -> None:
    """Initialise a worker process; ``truncated`` and ``pixels`` are settings of Pillow."""
    global _here
    gc.freeze()  # collecting what was forked would write to it, and so copy its pages

    # Ctrl-C is the main process's to handle; without it, this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    ImageFile.LOAD_TRUNCATED_IMAGES = truncated
    Image.MAX_IMAGE_PIXELS = pixels
    _here = (pickle.loads(pickled), ring)


def _work(slot: int, item: Any) -> tuple[_Shapes, Any]:
    """Put an item's arrays into their slot; return their shapes, and its note. Runs in a worker."""
    assert _here is not None
    function, ring = _here
    arrays, note = function(item)
    shapes: _Shapes = [(array.shape, array.dtype.str) for array in arrays]

    places = ring.arrays(slot, shapes)
    for place, array in zip(places, arrays, strict=True):
        place[...] = array
    return shapes, note


def _pickle_function(function: Callable[[Any], Made]) -> bytes | None:
    """Pickle a function for worker processes; return ``None`` where there can be none."""
    process = multiprocessing.current_process()
    pickled = b""
    reason = ""
    try:
        pickled = pickle.dumps(function, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a dataset of the caller's raises
        reason = f"they cannot be sent what to read ({error})"
    if process.daemon:
        reason = "a daemonic process may not start others"
    elif getattr(process, "_inheriting", False):
        reason = "this process is itself just starting"
    elif b"__main__" in pickled:
        reason = "they cannot import what was defined in the main script"
    elif len(pickled) > _LARGEST:
        reason = f"they would each hold {len(pickled) / 2**20:,.0f} MB of images"
    if reason:
        _log.info("threads read images, not processes: %s", reason)
        return None
    return pickled


def start_server() -> Any:
    """Start the server that workers are forked from, which imports torch once; give its context."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver  # not on Windows

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOAD])
    forkserver.ensure_running()
    return context


def _start(
    pickled: bytes, jobs: Sequence[tuple[int, Any]], workers: int, room: int
) -> tuple[ProcessPoolExecutor, _Ring, deque[_Result]] | None:
    """Start worker processes on their first jobs; return ``None`` if the system grants none."""
    slots = len(jobs) + 1
    executor = None
    try:
        context = start_server()
        ring = _Ring(context.RawArray("B", slots * room), room, slots)
        executor = ProcessPoolExecutor(
            workers,
            mp_context=context,
            initializer=_initialise,
            initargs=(
                pickled,
                ring,
                ImageFile.LOAD_TRUNCATED_IMAGES,
                Image.MAX_IMAGE_PIXELS,
            ),
        )
        waiting = deque(_submit(executor, slot, item) for slot, item in jobs)
    except OSError as error:
        _log.warning(
            "threads read images: no worker processes can be started (%s)", error
        )
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        return None
    return executor, ring, waiting


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
