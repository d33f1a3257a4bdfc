"""Decoding ahead of the consumer: worker threads, a bounded queue, order kept.

Threads are enough: Pillow and torch let go of the interpreter lock while they decode, resize and
multiply, and nothing has to be copied between processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from cliquetta.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, ahead: int
) -> Generator[Result, None, None]:
    """``function`` of every item, in order, with at most ``ahead`` results waiting.

    ``workers`` = 0 computes in the caller's thread when asked. An exception of ``function``
    reaches the caller at its item's turn; a caller that stops early leaves no work behind.
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
