"""Loading ahead keeps the order, the bound and the errors."""

from __future__ import annotations

import threading
import time

import pytest

from cliquetta.data.workers import map_ahead


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_order(workers: int) -> None:
    def slow_square(x: int) -> int:
        time.sleep(0.002 * (x % 3))
        return x * x

    found = list(map_ahead(slow_square, range(20), workers=workers, ahead=5))
    assert found == [x * x for x in range(20)]


def test_no_more_than_the_bound_waits() -> None:
    started: list[int] = []
    results = map_ahead(lambda x: started.append(x) or x, range(100), workers=2, ahead=3)  # type: ignore[func-returns-value]
    next(results)
    time.sleep(0.05)
    assert len(started) <= 4
    results.close()


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


def test_stopping_early_leaves_no_thread() -> None:
    results = map_ahead(lambda x: x, range(10), workers=3, ahead=4)
    next(results)
    results.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("cliquetta-loader")]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="ahead"):
        next(map_ahead(str, [1], workers=1, ahead=0))
