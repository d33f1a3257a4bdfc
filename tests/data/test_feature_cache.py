"""Tables of features: neither damage nor company hurts them."""

import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.data import feature_cache
from cliquetta.data.feature_cache import (
    FEATURES,
    TABLE,
    FeatureBlock,
    FeatureTable,
    TableLayout,
    open_table,
)

LAYOUT = TableLayout({"of": "squares"}, (50, 1, 4), rows=8)
BLOCKS = 7  # of 50 rows: six of 8 and a last one of 2


class Squares:
    """Row i is i squared; counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[range] = []

    def __call__(self, blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        for rows in blocks:
            self.asked.append(rows)
            values = np.array(rows, dtype=np.float32)[:, None, None] ** 2
            unreadable = {7: "torn"} if 7 in rows else {}
            yield FeatureBlock(np.tile(values, (1, 1, 4)), unreadable)


def squares() -> np.ndarray:
    return np.tile(np.arange(50, dtype=np.float32)[:, None, None] ** 2, (1, 1, 4))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder of a finished table."""
    open_table(tmp_path, LAYOUT, Squares())
    return tmp_path / LAYOUT.name


def test_a_table_is_made_once(made: Path) -> None:
    encode = Squares()
    table = open_table(made.parent, LAYOUT, encode)
    assert encode.asked == []
    assert isinstance(table.features, np.memmap)
    np.testing.assert_array_equal(table.features, squares())
    assert table.unreadable == {7: "torn"}


@pytest.mark.parametrize("byte", [-1, -400, 200])
def test_a_flipped_bit_costs_its_block_only(
    made: Path, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray((made / FEATURES).read_bytes())
    data[byte] ^= 0x10
    (made / FEATURES).write_bytes(data)
    encode = Squares()
    table = open_table(made.parent, LAYOUT, encode)
    np.testing.assert_array_equal(table.features, squares())
    assert len(encode.asked) == 1
    assert re.search(f"1 of {BLOCKS} blocks .* damaged", caplog.text)


DAMAGES: list[tuple[str, Callable[[bytes], bytes]]] = [
    (FEATURES, lambda _: b""),
    (FEATURES, lambda data: data[:5]),
    (FEATURES, lambda data: data[:128]),
    (FEATURES, lambda data: data[:500]),
    # another shape of the same size
    (FEATURES, lambda data: data.replace(b"(50, 1, 4)", b"(40, 1, 5)")),
    (TABLE, lambda _: b""),
    (TABLE, lambda _: b"{"),
    (TABLE, lambda _: b"[]"),
    (TABLE, lambda _: b'{"blocks": [[0]]}'),
    (TABLE, lambda _: b'{"blocks": 3}'),
    (TABLE, lambda data: data.replace(b'[7, "torn"]', b'[6, "torn"]')),
]
DAMAGE_IDS = [
    "no features",
    "features without a header",
    "features without rows",
    "features cut off",
    "features of another shape",
    "no table",
    "half a table",
    "a list for a table",
    "a block without its digest",
    "a number of blocks",
    "another unreadable image",
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=DAMAGE_IDS)
def test_a_cut_damaged_or_foreign_file_is_made_again(
    made: Path, name: str, damage: Any
) -> None:
    file = made / name
    before = file.read_bytes()
    after = damage(before)
    assert after != before
    file.write_bytes(after)
    table = open_table(made.parent, LAYOUT, Squares())
    np.testing.assert_array_equal(table.features, squares())
    assert table.unreadable == {7: "torn"}


def test_an_interrupted_build_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_cache, "SAVE_SECONDS", 0.0)
    progress: list[tuple[int, int]] = []

    def die(done: int, total: int) -> None:
        if done > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_table(tmp_path, LAYOUT, Squares(), on_progress=die)
    encode = Squares()
    table = open_table(
        tmp_path, LAYOUT, encode, on_progress=lambda *now: progress.append(now)
    )
    np.testing.assert_array_equal(table.features, squares())
    # three blocks were written down, the fourth was not
    assert encode.asked[0].start == 24
    assert progress[-1] == (50, 50)


class WaitingSquares(Squares):
    """Squares that are made only once another process wants them, too."""

    def __init__(self, begun: Any, wanted: Any) -> None:
        super().__init__()
        self.begun = begun
        self.wanted = wanted

    def __call__(self, blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        self.begun.set()
        assert self.wanted.wait(timeout=20)
        time.sleep(0.3)  # the other process has time to see that blocks are missing
        yield from super().__call__(blocks)


def report(table: FeatureTable, encode: Squares, replies: Any) -> None:
    """Say how many blocks this process encoded, and whether its table is right."""
    replies.put((len(encode.asked), bool((table.features == squares()).all())))


def build_first(folder: Path, begun: Any, wanted: Any, replies: Any) -> None:
    encode = WaitingSquares(begun, wanted)
    report(open_table(folder, LAYOUT, encode), encode, replies)


def build_second(folder: Path, begun: Any, wanted: Any, replies: Any) -> None:
    encode = Squares()
    assert begun.wait(timeout=20)
    wanted.set()
    report(open_table(folder, LAYOUT, encode), encode, replies)


def test_two_processes_share_one_table(tmp_path: Path) -> None:
    """The second one opens the table while the first encodes it, and waits for its blocks."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    wanted = context.Event()
    queue = context.Queue()
    shared = (tmp_path, begun, wanted, queue)
    both = [
        context.Process(target=build, args=shared)
        for build in (build_first, build_second)
    ]
    for process in both:
        process.start()
    replies = sorted(queue.get(timeout=30) for _ in both)
    for process in both:
        process.join()
    assert replies == [(0, True), (BLOCKS, True)]


def test_features_are_on_disk_before_the_list_that_counts_them(
    tmp_path: Path, disk_events: list[tuple[str, str]]
) -> None:
    open_table(tmp_path, LAYOUT, Squares())
    assert disk_events == [
        ("flush", FEATURES),
        ("flush", f".{TABLE}.tmp"),
        ("rename", TABLE),
        ("flush", LAYOUT.name),  # the folder
    ]
