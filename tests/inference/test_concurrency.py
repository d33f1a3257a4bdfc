"""Shared objects of ``predict`` keep their counts and order under 16 threads.

Each test about a lock fails when that lock is taken away.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from cliquetta.atomic import exclusive
from cliquetta.data.feature_cache import FeatureBlock, TableLayout, open_table
from cliquetta.data.workers import map_ahead
from cliquetta.errors import BusyError
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.parts import Lane, Part, Parts, Writer
from cliquetta.inference.predictor import Predictor
from cliquetta.inference.ray_driver import BatchReport, RayCluster, RayWorkers
from cliquetta.inference.resumable import FileRun
from cliquetta.inference.rows import PredictionRun
from cliquetta.model.checkpoints.hub import Fetcher
from cliquetta.model.clip import CLIP
from tests.conftest import THREADS, Together
from tests.inference.conftest import NAMES, Predict

REPEATS = 20
CHECKPOINT = bytes(range(256)) * 8192  # two mebibytes


class CheckpointServer(ThreadingHTTPServer):
    """Serves one checkpoint under any path, and counts the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CheckpointHandler)
        self.requests = 0


class CheckpointHandler(BaseHTTPRequestHandler):
    """A request of the checkpoint."""

    server: CheckpointServer

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(CHECKPOINT)))
        self.end_headers()
        self.wfile.write(CHECKPOINT)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def checkpoint_server() -> Iterator[CheckpointServer]:
    server = CheckpointServer()
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_sixteen_that_want_one_checkpoint_download_it_once(
    checkpoint_server: CheckpointServer, together: Together, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{checkpoint_server.server_port}/model.pt"
    sha256 = hashlib.sha256(CHECKPOINT).hexdigest()
    paths = together(lambda _: Fetcher(tmp_path).file(url, sha256))
    assert checkpoint_server.requests == 1
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CHECKPOINT


def test_sixteen_that_want_one_table_of_features_encode_it_once(
    together: Together, tmp_path: Path
) -> None:
    layout = TableLayout({"of": "zeros"}, (50, 1, 4), rows=8)
    encoded: list[range] = []

    def encode(blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        for rows in blocks:
            encoded.append(rows)
            yield FeatureBlock(np.zeros((len(rows), 1, 4), dtype=np.float32), {})

    tables = together(lambda _: open_table(tmp_path, layout, encode))
    assert encoded == layout.blocks()
    assert {table.features.shape for table in tables} == {(50, 1, 4)}


def test_one_of_sixteen_gets_the_folder_of_a_run(
    together: Together, tmp_path: Path
) -> None:
    inside: list[int] = []
    most_inside: list[int] = []

    def begin(number: int) -> int:
        entered = 0
        for _ in range(REPEATS):
            try:
                with exclusive(tmp_path / "run"):
                    inside.append(number)
                    most_inside.append(len(inside))
                    inside.remove(number)
                    entered += 1
            except BusyError:
                continue
        return entered

    assert sum(together(begin)) > 0
    assert max(most_inside) == 1


def test_results_of_sixteen_workers_come_in_order_and_once(together: Together) -> None:
    """Sixteen loaders at one time, of sixteen threads each."""

    def load(number: int) -> list[int]:
        started: list[int] = []

        def read(item: int) -> int:
            started.append(item)
            return item * item

        results = map_ahead(read, range(50), workers=THREADS, ahead=THREADS + 4)
        squares = list(results)
        assert sorted(started) == list(range(50)), number
        return squares

    expected = [item * item for item in range(50)]
    assert together(load) == [expected] * THREADS


def test_a_writer_keeps_the_order_of_what_it_was_given(together: Together) -> None:
    """Sixteen writers at one time: each writes after its own last, not beside it."""

    def write(_: int) -> list[int]:
        written: list[int] = []
        with Writer() as writer:
            for number in range(5 * REPEATS):
                writer.submit(written.append, number)
        return written

    assert together(write) == [list(range(100))] * THREADS


class SlowSeconds(float):
    """A number of seconds; while it is added to another, other threads run.

    CPython switches threads at calls and loops only: the sum of two plain floats is
    never interrupted there, but nothing promises that.
    """

    def __radd__(self, other: float) -> float:
        time.sleep(0)
        return float(other) + float(self)


@pytest.fixture
def file_run(tiny_clip: CLIP, photos: Path, tmp_path: Path) -> FileRun:
    """A run into a file whose reports come from a cluster; nothing is predicted here."""
    options = PredictOptions(out=tmp_path / "out.csv", batch_size=4)
    predictor = make_predictor(tiny_clip, options)
    run = FileRun(predictor, [photos], options)
    run.parts = Parts(tmp_path / "parts", ())
    run.parts.folder.mkdir()
    run.seen = 0
    run.total = 4 * THREADS * REPEATS
    return run
