"""Shared objects of ``predict`` keep their counts and order under 16 threads.

Each test about a lock fails when that lock is taken away.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cliquetta.atomic import exclusive
from cliquetta.data.feature_cache import FeatureBlock, TableLayout, open_table
from cliquetta.data.workers import map_ahead
from cliquetta.errors import BusyError
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.parts import Lane, Part, Writer
from cliquetta.inference.predictor import ImageSource, Predictor
from cliquetta.inference.ray_driver import (
    BatchReport,
    BatchTask,
    RayCluster,
    RayWorkers,
)
from cliquetta.inference.resumable import FileRun
from cliquetta.methods.building.registry import create_method
from cliquetta.model.checkpoints.hub import Fetcher
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.serve_setup import picture
from tests.conftest import THREADS, SlowInt, Together
from tests.inference.conftest import NAMES

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


IMAGES_OF_GROUP = 4


class SlowPredictor(Predictor):
    """Between loading a state and packing it, other threads run."""

    def load(self, state: Path | None) -> int:
        images = super().load(state)
        time.sleep(0.0005)
        return images


@pytest.fixture
def grouped_run(tiny_clip: CLIP, tmp_path: Path) -> FileRun:
    """Sixteen groups of four images; a state file of each is there, of another image."""
    states = tmp_path / "states"
    states.mkdir()
    options = PredictOptions(
        out=tmp_path / "out.csv", batch_size=4, group_by="camera", state=states
    )
    adapter = create_method("tent", tiny_clip, ClassPrompts(NAMES))
    run = FileRun(SlowPredictor({"tent": adapter}, options), [], options)
    run.lanes = [
        Lane(start, start + IMAGES_OF_GROUP, group=f"camera {start}")
        for start in range(0, THREADS * IMAGES_OF_GROUP, IMAGES_OF_GROUP)
    ]
    for number, lane in enumerate(run.lanes):
        adapter.reset()
        adapter.predict([picture(number)])
        adapter.save(states / f"{lane.group}.safetensors")
    # what is read comes from memory: this is about the order of states and progress
    picture_count = THREADS * IMAGES_OF_GROUP
    images = [Image.new("RGB", (32, 32))] * picture_count
    run.source = ImageSource(images, run.predictor.row_format)
    run.parts.folder.mkdir()
    run.seen = 0
    run.total = picture_count
    return run


def make_workers() -> RayWorkers:
    """Actors that are not started: their reports are given by the test."""
    return RayWorkers(ray=None, settings=RayCluster(), actors=THREADS, gpus=0, cores=1)


def test_each_group_begins_with_its_own_state_while_all_begin_at_once(
    grouped_run: FileRun, together: Together
) -> None:
    """All groups' states pass through one method on their way to the actors."""
    workers = make_workers()

    def begin(number: int) -> list[BatchTask]:
        lane = grouped_run.lanes[number]
        tasks: list[BatchTask] = []
        for _ in range(REPEATS):
            tasks += workers._tasks(grouped_run, [lane])
        return tasks

    for lane, tasks in zip(grouped_run.lanes, together(begin), strict=True):
        assert [task.first for task in tasks] == [lane.start] * REPEATS
        grouped_run.predictor.load(grouped_run.state_file(lane))
        expected = grouped_run.predictor.states()
        wrong = [task for task in tasks if task.states != expected]
        assert not wrong, f"{len(wrong)} times {lane.group} began with another state"


def test_reports_of_all_actors_are_counted_and_progress_never_goes_back(
    grouped_run: FileRun, together: Together
) -> None:
    workers = make_workers()
    progress: list[tuple[int, int, int]] = []
    grouped_run.on_progress = lambda *numbers: progress.append(numbers)

    def report(number: int) -> None:
        lane = grouped_run.lanes[number]
        for image in range(lane.start, lane.stop):
            part = Part(lane=lane, first=image, last=image + 1, rows=(), states={})
            given = BatchReport(
                images=SlowInt(1),
                skipped=SlowInt(1),
                busy=SlowInt(2),
                waited=SlowInt(3),
                part=part,
            )
            workers._take(grouped_run, given)

    together(report)
    images = THREADS * IMAGES_OF_GROUP
    assert progress == [(done, images, done) for done in range(1, images + 1)]
    assert grouped_run.result.busy == 2 * images
    assert grouped_run.result.waited == 3 * images
    assert grouped_run.left(grouped_run.lanes) == []
