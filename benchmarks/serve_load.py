"""Many clients at once: how fast and how fair the service is, and whether any sees an error.

    python -m benchmarks.serve_load
    python -m benchmarks.serve_load --sessions 50 --batches 6 --batch-size 8 --check

One session runs inside this process, without any service: decoding and predicting the same bytes,
on one thread and on one per core; the faster counts (threads that wait for one another are slow on
a busy machine). Then a server is started as a process of its own, and as many clients as there are
sessions send their batches to it, each waiting for its answer. Both take the same cores, and the
clients run on them too. ``--check`` fails where an aim is missed.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from PIL import Image

from cliquetta.data.bundled import load_bundled
from cliquetta.methods.registry import create_method
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.batches import decode
from cliquetta.serve.client import Client
from cliquetta.serve.schema import Upload

FAIREST, FASTEST = 2.0, 0.7
"""The aims: slowest by fastest session, and throughput by that of one session in process."""


@dataclass
class RunResult:
    """What one client saw."""

    seconds: float = 0.0
    latencies: tuple[float, ...] = ()
    error: str = ""


def pictures(count: int) -> tuple[list[bytes], tuple[str, ...]]:
    """PNG files of the bundled pictures, and their class names."""
    bundled = load_bundled()
    files = []
    for array in bundled.images[:count]:
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, format="PNG")
        files.append(buffer.getvalue())
    return files, bundled.names


def in_process(files: list[bytes], names: tuple[str, ...], options: argparse.Namespace) -> float:
    """Images per second of one session without a service, with the better number of threads."""
    model = create_model("micro")
    adapter = create_method(options.method, model, ClassPrompts(names))
    size = options.batch_size
    batches = [files[i : i + size] for i in range(0, len(files) - size + 1, size)]

    def predict(batch: list[bytes]) -> None:
        uploads = [Upload(data=data) for data in batch]
        decoded = decode(uploads, model.preprocess, views=adapter.views, seed=0, max_pixels=10**6)
        adapter.predict(decoded.batch)

    rates = []
    for threads in {1, options.cores}:
        torch.set_num_threads(threads)
        predict(batches[0])
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < options.seconds:
            predict(batches[done % len(batches)])
            done += 1
        rates.append(done * size / (time.perf_counter() - start))
    return max(rates)


def start_server(folder: Path, workers: int) -> tuple[subprocess.Popen[bytes], str]:
    """A server of its own process, ready to answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "from cliquetta.cli.main import main; main()"
    options = ["--port", str(port), "--state-dir", str(folder), "--workers", str(workers)]
    limits = ["--limit", "rate=100000", "--limit", "burst=100000"]
    command = [sys.executable, "-c", code, "serve", "--device", "cpu", *options, *limits]
    server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        try:
            httpx.get(f"{address}/healthz")
            return server, address
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def drive(
    address: str, files: list[bytes], names: tuple[str, ...], options: argparse.Namespace
) -> tuple[list[RunResult], float]:
    """All clients at once; their results and the seconds from first to last."""
    results = [RunResult() for _ in range(options.sessions)]
    barrier = threading.Barrier(options.sessions + 1)
    size = options.batch_size

    def run(number: int, result: RunResult) -> None:
        latencies = []
        try:
            with Client(address, retries=0) as client:
                session = client.create_session(names, method=options.method)
                barrier.wait(300)
                begin = time.perf_counter()
                for place in range(options.batches):
                    first = (number * options.batches + place) * size % (len(files) - size)
                    sent = time.perf_counter()
                    answer = session.predict(files[first : first + size])
                    latencies.append(time.perf_counter() - sent)
                    assert len(answer.predictions) == size
                result.seconds = time.perf_counter() - begin
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"
            barrier.abort()
        result.latencies = tuple(latencies)

    threads = [threading.Thread(target=run, args=(i, result)) for i, result in enumerate(results)]
    for thread in threads:
        thread.start()
    barrier.wait(300)
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return results, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--batches", type=int, default=6, help="of each session")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--method", default="zero_shot")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run in process")
    parser.add_argument("--check", action="store_true", help="fail where an aim is missed")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    files, names = pictures(512)

    before = in_process(files, names, options)
    with tempfile.TemporaryDirectory() as folder:
        server, address = start_server(Path(folder), options.cores)
        try:
            results, wall = drive(address, files, names, options)
        finally:
            server.terminate()
            server.wait(60)
    after = in_process(files, names, options)
    raise SystemExit(report(options, results, wall, (before, after)))


def report(
    options: argparse.Namespace, results: list[RunResult], wall: float, alone: tuple[float, float]
) -> int:
    """Print the table; 1 if ``--check`` finds an aim missed."""
    errors = [result.error for result in results if result.error]
    seconds = [result.seconds for result in results]
    latencies = np.array([one for result in results for one in result.latencies])
    rate = options.sessions * options.batches * options.batch_size / wall
    single = sum(alone) / 2  # before and after, as other programs come and go
    share = 100 * rate / single
    fairness = max(seconds) / max(min(seconds), 1e-9)
    spread = (*np.percentile(latencies, (50, 99)), latencies.max())
    rows = [
        (
            "sessions x batches x images",
            f"{options.sessions} x {options.batches} x "
            f"{options.batch_size}, {options.method} on micro, {options.cores} cores",
            "",
        ),
        ("errors", str(len(errors)), "0"),
        ("one session in process", f"{single:.0f} images/s ({alone[0]:.0f}, {alone[1]:.0f})", ""),
        (
            "service",
            f"{rate:.0f} images/s, {share:.0f} %",
            f">= {100 * FASTEST:.0f} %",
        ),
        ("slowest / fastest session", f"{fairness:.2f}", f"<= {FAIREST:g}"),
        ("latency, p50, p99 and worst", ", ".join(f"{one:.3f} s" for one in spread), ""),
    ]
    for name, value, aim in rows:
        print(f"{name:30} {value:48} {aim}")
    for error in errors[:5]:
        print("error:", error)
    missed = bool(errors) or fairness > FAIREST or rate < FASTEST * single
    return int(options.check and missed)


if __name__ == "__main__":
    main()
