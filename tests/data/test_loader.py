"""Worker processes give the pixels of the caller's own thread, and nothing of them remains."""

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cliquetta.data import loader, workers
from cliquetta.data.dataset import Dataset, FileDataset
from cliquetta.data.files import folder_dataset
from cliquetta.data.stream import Stream
from cliquetta.data.workers import WorkerError, usable_cores
from cliquetta.inference.bulk import predict
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.predictor import Reader
from cliquetta.inference.resumable import parts_folder
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import ViewSpec
from tests._helpers.streaming import made_up_dataset
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.trees import exif_of

PREPROCESS = Preprocess.openai(32)
BROKEN = ["007.png", "040.png", "041.png"]  # no pictures


@pytest.fixture(autouse=True)
def always_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images are enough for processes here."""
    monkeypatch.setattr(loader, "PROCESSES_FROM", 1)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 files of many sizes; three are no pictures, and one is turned."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(90):
        height, width = generator.integers(20, 90, 2)
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        suffix = "png" if number % 3 else "jpg"
        Image.fromarray(pixels).save(folder / f"{number:03d}.{suffix}")

    for name in BROKEN:
        (folder / name).write_bytes(b"no picture")
    Image.fromarray(pixels).save(folder / "003.jpg", exif=exif_of(6))
    return folder


def read(stream: Stream) -> tuple[list[Any], list[Any]]:
    """All that a stream yields, tensors as bytes, and all that it skips."""
    yielded = []
    for batch, labels in stream:
        tensors = [batch.images, labels]
        if batch.views is not None:
            tensors.append(batch.views)
        contents = [tensor.numpy().tobytes() for tensor in tensors]
        yielded.append((batch.keys, contents))
    return yielded, stream.skipped


@pytest.mark.parametrize("kind", [None, "resized-crop", "zoom-crop", "augmix"])
def test_processes_threads_and_the_caller_give_the_same_bits(
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str | None,
) -> None:
    caplog.set_level(logging.INFO)
    views = None if kind is None else ViewSpec(kind, 3)
    data = folder_dataset(photos, TINY_NAMES)

    def stream(count: int) -> Stream:
        return Stream(data, PREPROCESS, 20, seed=1, views=views, workers=count)

    by_caller = read(stream(0))
    state = torch.get_rng_state()
    by_processes = read(stream(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert "threads read images" not in caplog.text
    monkeypatch.setattr(loader, "PROCESSES_FROM", 1000)
    by_threads = read(stream(2))
    assert by_processes == by_caller
    assert by_threads == by_caller

    batches, skipped = by_caller
    assert [len(keys) for keys, _ in batches] != [20] * 5
    assert sorted(entry.key for entry in skipped) == BROKEN


def test_arrays_and_several_datasets_go_through_processes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    parts = [made_up_dataset(20, id="a"), made_up_dataset(12, seed=1, id="b")]

    def stream(count: int) -> Stream:
        return Stream(parts, PREPROCESS, 7, order="mixed", seed=2, workers=count)

    assert read(stream(0)) == read(stream(2))
    assert "threads read images" not in caplog.text


def test_predict_gives_the_same_rows_by_processes(
    photos: Path, tiny_clip: CLIP
) -> None:
    def rows(count: int) -> list[Any]:
        method = ["zero_shot", "tpt"]  # with and without views
        return predict(
            photos, TINY_NAMES, method=method, model=tiny_clip, workers=count
        ).rows

    alone = rows(0)
    assert alone == rows(2)
    assert sum(bool(row["error"]) for row in alone) == 3


class Deadly(FileDataset):
    """Image 30 kills the process that reads it."""

    def load(self, index: int) -> Image.Image:
        if index == 30 and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(index)


def test_a_killed_worker_is_an_error_at_its_turn(photos: Path) -> None:
    data = Deadly(
        "deadly",
        sorted(photos.iterdir()),
        names=TINY_NAMES,
        labels=None,
    )
    stream = Stream(data, PREPROCESS, 4, order="sequential", workers=2)
    with pytest.raises(WorkerError, match=r"was killed.*--workers"):
        list(stream)


PREDICT = """
import sys
from pathlib import Path
from cliquetta.data import loader
from cliquetta.inference import parts
import cliquetta

loader.PROCESSES_FROM = 1
parts.PART_ROWS = 64
done = lambda images, total, skipped: print(images, flush=True)
cliquetta.predict(sys.argv[1], ["cat", "dog"], model="micro", method="zero_shot", workers=2,
                  batch_size=32, out=sys.argv[2], on_progress=done)
print("finished", flush=True)
"""


@pytest.fixture
def running(photos: Path, tmp_path: Path) -> Iterator[Any]:
    """Start a script without a main guard that predicts 1,800 files; gives it once it is going."""
    script = tmp_path / "script.py"
    script.write_text(PREDICT)
    many = tmp_path / "many"
    many.mkdir()
    for number in range(1800):
        os.link(photos / "000.jpg", many / f"{number:04d}.jpg")
    begun: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(many), str(tmp_path / "out.csv")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        begun.append(process)
        assert process.stdout is not None
        list(islice(process.stdout, 6))  # batches that are done
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait(60)


def children(root: int) -> set[int]:
    """All descendants of a process."""
    result: set[int] = set()
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for number in task.read_text().split():
                child = int(number)
                result |= {child} | children(child)
    return result


def exists(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def gone(processes: set[int], within: float = 60.0) -> bool:
    """Whether processes end."""
    end = time.monotonic() + within
    while any(map(exists, processes)):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def shared_inodes(process: int) -> set[int]:
    """Files in shared memory that a process has mapped, semaphores among them."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/dev/shm/" in line}


def left_in_memory(inodes: set[int]) -> set[int]:
    """Select files in shared memory that have a name, and so outlive their processes."""
    return inodes & {entry.inode() for entry in os.scandir("/dev/shm")}


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_process_and_no_memory(
    running: Any, tmp_path: Path, how: signal.Signals
) -> None:
    process = running()
    family = children(process.pid)
    shared = shared_inodes(process.pid)
    assert left_in_memory(shared)  # semaphores
    assert len(family) >= 3  # two workers and the server that they were forked from

    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert gone(family)
    assert not left_in_memory(shared)
    finished = parts_folder(tmp_path / "out.csv").glob("*.jsonl")
    assert list(finished)


@linux
@pytest.mark.slow
def test_a_run_continues_after_a_worker_was_killed(
    running: Any, tmp_path: Path
) -> None:
    process = running()
    (server,) = [
        pid
        for pid in children(process.pid)
        if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() and children(pid)
    ]
    os.kill(min(children(server)), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "was killed" in errors
    assert list(parts_folder(tmp_path / "out.csv").glob("*.jsonl"))

    again = running()
    output, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert output.rstrip().endswith("finished")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1801


def count_images(data: Dataset) -> int:
    """Images that processes read, or threads in their place."""
    return sum(len(batch) for batch, _ in Stream(data, PREPROCESS, 20, workers=2))


def in_daemon(photos: Path, replies: Any) -> None:
    loader.PROCESSES_FROM = 1
    replies.put(count_images(folder_dataset(photos, TINY_NAMES)))


def test_a_daemonic_process_reads_by_threads(photos: Path) -> None:
    context = multiprocessing.get_context("spawn")
    replies = context.Queue()
    process = context.Process(target=in_daemon, args=(photos, replies), daemon=True)
    process.start()
    assert replies.get(timeout=120) == 87
    process.join(60)


def test_what_cannot_be_sent_is_read_by_threads(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data: Any = folder_dataset(photos, TINY_NAMES)
    data.lock = threading.Lock()  # which no other process can have
    assert count_images(data) == 87
    assert "threads read images" in caplog.text


def test_threads_read_where_the_system_grants_no_process(
    photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise PermissionError("no semaphores here")

    monkeypatch.setattr(ProcessPoolExecutor, "submit", refuse)
    assert count_images(folder_dataset(photos, TINY_NAMES)) == 87
    assert "no semaphores here" in caplog.text


def test_a_caller_that_stops_early_leaves_no_worker(photos: Path) -> None:
    batches = Stream(
        folder_dataset(photos, TINY_NAMES), PREPROCESS, 4, workers=2
    ).batches()
    next(batches)
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    own = children(server)
    assert own
    batches.close()  # type: ignore[attr-defined]
    assert gone(own)


def modules_after(code: str) -> set[str]:
    """Modules that a new interpreter has imported after some code."""
    code += "\nimport sys; print(*sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    return set(output.split())


def test_a_forked_worker_has_nothing_to_import(tiny_clip: CLIP, tmp_path: Path) -> None:
    reader = Reader(tiny_clip.preprocess, (None,), PredictOptions(workers=0))
    sent = tmp_path / "sent.pickle"
    sent.write_bytes(pickle.dumps(reader._loader(local=False).read))

    # the server imports modules; a worker unpickles what it is sent
    server = "import pickle\n"
    for name in (workers.__name__, *workers._PRELOAD):
        server += f"import {name}\n"
    worker = server + f"pickle.load(open({str(sent)!r}, 'rb'))"
    assert modules_after(worker) == modules_after(server)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.max": "nonsense"}, 8),
    ],
    ids=[
        "no container",
        "no limit",
        "two and a half cores",
        "no limit, version 1",
        "half a core, version 1",
        "nonsense",
    ],
)
def test_cores_are_those_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert usable_cores(tmp_path) == cores


def test_a_gpu_gets_all_cores_and_a_cpu_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "usable_cores", lambda: 12)
    assert loader.default_workers(torch.device("cuda")) == 12
    assert loader.default_workers(torch.device("cpu")) == 2
    assert loader.default_workers(None) == 2
