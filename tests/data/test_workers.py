"""Loading ahead keeps the order, the bound and the errors."""

import logging
import multiprocessing
import os
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.data import workers
from cliquetta.data.workers import map_ahead, map_in_processes


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_order(workers: int) -> None:
    def slow_square(x: int) -> int:
        time.sleep(0.002 * (x % 3))
        return x * x

    results = map_ahead(slow_square, range(20), workers=workers, ahead=5)
    assert list(results) == [x * x for x in range(20)]


def test_no_more_than_the_bound_waits_and_no_thread_stays() -> None:
    started: list[int] = []

    def start(item: int) -> int:
        started.append(item)
        return item

    results = map_ahead(start, range(100), workers=2, ahead=3)
    next(results)
    time.sleep(0.05)
    assert len(started) <= 4
    results.close()
    assert not [
        t for t in threading.enumerate() if t.name.startswith("cliquetta-loader")
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_at_its_turn(workers: int) -> None:
    def fail_at_three(x: int) -> int:
        if x == 3:
            raise RuntimeError("three")
        return x

    results = map_ahead(fail_at_three, range(10), workers=workers, ahead=4)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="three"):
        next(results)


def squares(number: int) -> tuple[tuple[np.ndarray, ...], int]:
    """Two arrays whose shapes change with the number, and the number."""
    first = np.full((number % 3, 2), number)
    second = np.arange(number % 2)
    return (first, second), number


def test_arrays_of_changing_shapes_come_in_order() -> None:
    rows = map_in_processes(squares, range(50), workers=3, room=100)
    for number, ((first, second), note) in enumerate(rows):
        (expected_first, expected_second), _ = squares(number)
        assert note == number
        assert np.array_equal(first, expected_first)
        assert np.array_equal(second, expected_second)


@pytest.mark.slow
def test_spawned_processes_share_memory_as_forked_ones_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        multiprocessing, "get_all_start_methods", lambda: ["spawn"]
    )  # Windows
    test_arrays_of_changing_shapes_come_in_order()
    assert "threads read images" not in caplog.text


@pytest.mark.slow
def test_processes_start_again_after_runs_that_were_left_early(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    for count in (1, 0, 7, 50, 3, 50):
        rows = map_in_processes(squares, range(50), workers=4, room=100)
        read = [note for _, note in islice(rows, count)]
        assert read == list(range(count))
        rows.close()
    assert not multiprocessing.active_children()
    assert "threads read images" not in caplog.text


def test_large_items_are_given_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ROOMY", 100)
    items = iter(range(50))
    rows = map_in_processes(squares, items, workers=3, room=100)
    next(rows)
    # one for each worker, and one in position of the first, were taken
    assert next(items) == 4
    rows.close()
    test_arrays_of_changing_shapes_come_in_order()


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    """Half a core's time is one core; without a limit all that the process may use."""
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert workers.usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert workers.usable_cores(tmp_path) == len(os.sched_getaffinity(0))
