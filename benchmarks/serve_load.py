"""Many clients at once: how fast and how fair the service is, and whether any sees an error.

    python -m benchmarks.serve_load
    python -m benchmarks.serve_load --sessions 50 --batches 6 --batch-size 8 --check
    python -m benchmarks.serve_load --sessions 1 --batches 200 --batch-size 1 --method domain_norm
    python -m benchmarks.serve_load --replicas 4 --sessions 200 --kills 5    # on Ray Serve

One session runs inside this process, without any service: decoding and predicting the
same bytes, on one thread and on one per core; the faster counts (threads that wait for
one another are slow on a busy machine). Then a server is started as a process of its
own, and as many clients as there are sessions send their batches to it, each waiting
for its answer. Both take the same cores, and the clients run on them too. ``--check``
fails where an aim is missed.

With ``--replicas`` the service runs on Ray Serve on this machine, and ``--kills`` of
its replicas are killed (SIGKILL) at even times while the clients send. Where nothing is
killed clients do not repeat a request: an error is one that they would see.

Bytes per batch are those of the batches without the first of each session: what the
service handed to its database (its metric), and what reached the disk of this process
by the kernel's count.

Predictions are compared with those of the same streams in this process, which nobody
disturbed: on a CPU all of them are equal, bit by bit. On a GPU a method that learns
need not be equal to itself, as kernels may add in any order; so the streams run here
twice, and the second run says how many predictions differ, and by how much, without any
service.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch
from PIL import Image

from benchmarks.scap_speed import vit_b16
from cliquetta.data.bundled import load_bundled
from cliquetta.methods.building.registry import create_method
from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.client import Client

FAIREST = 2.0
FASTEST = 0.7
"""The aims: slowest by fastest session, and throughput by that of one session in process."""


Predictions = list[tuple[str, float]]
"""The first class of every image of a batch, and its probability."""


@dataclass
class RunResult:
    """Measurements of one client."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    predictions: list[Predictions] = field(default_factory=list)
    """First classes of every batch."""
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


def model_path(options: argparse.Namespace, folder: str) -> str:
    """The model as a name or a file: a ViT-B/16 has random weights."""
    if options.model != "ViT-B/16":
        return str(options.model)
    path = Path(folder) / "vit-b16.safetensors"
    save_model(vit_b16(), path)
    return str(path)


def in_process(
    source: str, files: list[bytes], names: tuple[str, ...], options: argparse.Namespace
) -> float:
    """Images per second of one session without a service, with the better number of threads."""
    model = create_model(source, device=options.device, dtype=options.dtype)
    adapter = create_method(options.method, model, ClassPrompts(names))
    size = options.batch_size
    batches = [files[i : i + size] for i in range(0, len(files) - size + 1, size)]

    rates = []
    for threads in {1, options.cores}:
        torch.set_num_threads(threads)
        adapter.predict(batches[0])
        start = time.perf_counter()
        done = 0
        while time.perf_counter() - start < options.seconds:
            adapter.predict(batches[done % len(batches)])
            done += 1
        rates.append(done * size / (time.perf_counter() - start))
    return max(rates)


def start_server(
    source: str, folder: Path, options: argparse.Namespace
) -> tuple[subprocess.Popen[bytes], str]:
    """A server of its own process, ready to answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "from cliquetta.cli.main import main; main()"
    where = ["--port", str(port), "--model", f"m={source}"]
    where += ["--sessions", options.database or str(folder)]
    how = ["--device", options.device, "--dtype", options.dtype]
    if options.replicas:
        how += ["--ray", "local", "--replicas", str(options.replicas)]
    else:
        how += ["--workers", str(options.cores)]
    # clients are patient here: a slow machine is not an error of the service
    patient = {"rate": 100000, "burst": 100000, "wait_seconds": 900, "queued": 1000}
    limits = [
        word for name in patient for word in ("--limit", f"{name}={patient[name]}")
    ]
    command = [sys.executable, "-c", code, "serve", *where, *how, *limits]
    server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 600
    while time.monotonic() < end and server.poll() is None:
        try:
            httpx.get(f"{address}/healthz", timeout=60)
            return server, address
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


@dataclass(frozen=True)
class Spent:
    """What a server has written and computed since it started."""

    stored: float
    """Bytes to its database."""
    on_disk: float
    """Bytes by its process, with logs and pages; of PostgreSQL nothing."""
    cpu_seconds: float
    """Time of its process on all cores, which other programs disturb less than a clock."""

    @classmethod
    def of(cls, server: int, address: str) -> Spent:
        """What a server has spent so far."""
        lines = Path(f"/proc/{server}/io").read_text().splitlines()
        fields = dict(line.split(": ", 1) for line in lines)
        times = (
            Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:13]
        )
        return cls(
            stored=read_metric(address, "cliquetta_written_bytes_total "),
            on_disk=float(fields["write_bytes"]),
            cpu_seconds=sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
        )

    def __sub__(self, before: Spent) -> Spent:
        return Spent(
            stored=self.stored - before.stored,
            on_disk=self.on_disk - before.on_disk,
            cpu_seconds=self.cpu_seconds - before.cpu_seconds,
        )


def read_metric(address: str, name: str) -> float:
    """A number of the server's metrics."""
    text = httpx.get(f"{address}/metrics", timeout=60).text
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)
    )


def replica_pids(server: int) -> list[int]:
    """Processes of the replicas below a server."""
    parents = {}
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            fields = dict(
                line.split(":\t", 1) for line in status.read_text().splitlines()[:7]
            )
            pid = int(status.parent.name)
            parents[pid] = int(fields["PPid"])
            title = (status.parent / "cmdline").read_bytes()
            if title.startswith(b"ray::ServeReplica:cliquetta"):
                found.append(pid)

    def below(pid: int) -> bool:
        return pid == server or (pid in parents and below(parents[pid]))

    return [pid for pid in found if below(pid)]


def kill_replicas(
    server: int, count: int, done: Callable[[], float], clients: list[threading.Thread]
) -> int:
    """Kill ``count`` replicas, evenly over the work; ``done`` is the share that is done."""
    killed = 0
    draw = random.Random(0)
    while killed < count and any(client.is_alive() for client in clients):
        alive = sorted(replica_pids(server))
        if done() * (count + 1) > killed + 1 and alive:
            os.kill(draw.choice(alive), signal.SIGKILL)
            killed += 1
        time.sleep(0.2)
    return killed


def drive(
    server: int,
    address: str,
    files: list[bytes],
    names: tuple[str, ...],
    options: argparse.Namespace,
) -> tuple[list[RunResult], float, int, Spent]:
    """All clients at once; their results, the seconds from first to last, kills, bytes written."""
    results = [RunResult() for _ in range(options.sessions)]
    barrier = threading.Barrier(options.sessions + 1)
    size = options.batch_size

    def run(number: int, result: RunResult) -> None:
        latencies = result.latencies
        try:
            retry_seconds = 120 if options.kills else 0
            with Client(address, retry_seconds=retry_seconds, timeout=1800) as client:
                session = client.create_session(names, method=options.method)
                session.predict(files[:size])  # the first fills an empty memory
                barrier.wait(900)
                begin = time.perf_counter()
                for place in range(options.batches):
                    first = (
                        (number * options.batches + place) * size % (len(files) - size)
                    )
                    sent = time.perf_counter()
                    answer = session.predict(files[first : first + size])
                    latencies.append(time.perf_counter() - sent)
                    assert len(answer.predictions) == size
                    found = [(one.label, one.probability) for one in answer.predictions]
                    result.predictions.append(found)
                result.seconds = time.perf_counter() - begin
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"
            barrier.abort()

    threads = [
        threading.Thread(target=run, args=(i, result))
        for i, result in enumerate(results)
    ]
    for thread in threads:
        thread.start()
    barrier.wait(900)
    spent = Spent.of(server, address)
    start = time.perf_counter()
    total = options.sessions * options.batches

    def share_done() -> float:
        return sum(len(result.latencies) for result in results) / total

    killed = kill_replicas(server, options.kills, share_done, threads)
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    return results, wall, killed, Spent.of(server, address) - spent


@dataclass(frozen=True)
class Difference:
    """How far two runs of the same batches are apart."""

    batches: int
    unequal: int
    """Batches with a prediction that is not equal to the last bit."""
    labels: int
    """Images with another class."""
    largest: float
    """Largest difference between probabilities of the same class."""

    @classmethod
    def between(cls, ones: list[Predictions], others: list[Predictions]) -> Difference:
        """Compare what both have, as an error ends a stream early."""
        both = list(zip(ones, others, strict=False))
        images = [
            (x, y) for one, other in both for x, y in zip(one, other, strict=True)
        ]
        return cls(
            len(both),
            sum(one != other for one, other in both),
            sum(x[0] != y[0] for x, y in images),
            max((abs(x[1] - y[1]) for x, y in images if x[0] == y[0]), default=0.0),
        )

    def __str__(self) -> str:
        text = f"{self.unequal} of {self.batches}"
        return (
            f"{text}, {self.labels} labels, by {self.largest:.2g}"
            if self.unequal
            else text
        )


def undisturbed(
    source: str,
    files: list[bytes],
    names: tuple[str, ...],
    options: argparse.Namespace,
    results: list[RunResult],
) -> tuple[Difference, Difference]:
    """Some sessions beside the same streams in this process, and these beside themselves."""
    torch.set_num_threads(1)
    model = create_model(source, device=options.device, dtype=options.dtype)
    size = options.batch_size

    def stream(number: int) -> list[Predictions]:
        adapter = create_method(options.method, model, ClassPrompts(names))
        adapter.predict(files[:size])
        found = []
        for place in range(len(results[number].predictions)):
            batch = number * options.batches + place
            first = batch * size % (len(files) - size)
            best, ranked = adapter.predict(files[first : first + size]).topk()
            predictions = []
            for label, value in zip(
                ranked[:, 0].tolist(), best[:, 0].cpu().numpy(), strict=True
            ):
                # Rounded as JSON writes it.
                predictions.append((names[label], float(str(value))))
            found.append(predictions)
        return found

    apart = max(1, options.sessions // options.compared)
    chosen = range(0, options.sessions, apart)
    given = [answer for number in chosen for answer in results[number].predictions]
    once = [answer for number in chosen for answer in stream(number)]
    again = once
    if options.device == "cuda":
        again = [answer for number in chosen for answer in stream(number)]
    return Difference.between(given, once), Difference.between(once, again)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--batches", type=int, default=6, help="of each session")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--method", default="zero_shot")
    parser.add_argument(
        "--model", default="micro", help="or ViT-B/16, with random weights"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument(
        "--database", help="URL of PostgreSQL instead of SQLite in a new folder"
    )
    parser.add_argument(
        "--replicas", type=int, default=0, help="on Ray Serve; 0: one process"
    )
    parser.add_argument(
        "--kills", type=int, default=0, help="of replicas, while clients send"
    )
    parser.add_argument(
        "--compared", type=int, default=8, help="sessions that are computed again"
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of each run in process"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail where an aim is missed"
    )
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    files, names = pictures(512)

    with tempfile.TemporaryDirectory() as folder:
        source = model_path(options, folder)
        before = in_process(source, files, names, options)
        server, address = start_server(source, Path(folder) / "sessions", options)
        try:
            results, wall, killed, spent = drive(
                server.pid, address, files, names, options
            )
            size = read_metric(address, "cliquetta_database_bytes ")
        finally:
            server.terminate()
            server.wait(120)
        after = in_process(source, files, names, options)
        apart = undisturbed(source, files, names, options, results)
    raise SystemExit(
        report(options, results, wall, (before, after), killed, apart, spent, size)
    )


def report(
    options: argparse.Namespace,
    results: list[RunResult],
    wall: float,
    alone: tuple[float, float],
    killed: int,
    apart: tuple[Difference, Difference],
    spent: Spent,
    size: float,
) -> int:
    """Print the table; 1 if ``--check`` finds an aim missed."""
    errors = [result.error for result in results if result.error]
    seconds = [result.seconds for result in results if not result.error] or [0.0]
    latencies = np.array([one for result in results for one in result.latencies])
    rate = len(latencies) * options.batch_size / wall
    single = sum(alone) / 2  # before and after, as other programs come and go
    share = 100 * rate / single
    fairness = max(seconds) / max(min(seconds), 1e-9)
    cuda, (differ, itself) = options.device == "cuda", apart
    where = torch.cuda.get_device_name() if cuda else f"{options.cores} cores"
    where = f"{where}, {options.dtype}"
    spread = (*np.percentile(latencies, (50, 95)), latencies.max())
    batches = max(1, len(latencies))
    rows = [
        (
            "sessions x batches x images",
            f"{options.sessions} x {options.batches} x "
            f"{options.batch_size}, {options.method} on {options.model}, {where}",
            "",
        ),
        (
            "replicas, killed meanwhile",
            f"{options.replicas or 'one process'}, {killed}",
            "",
        ),
        ("errors", str(len(errors)), "0"),
        (
            "predictions unlike undisturbed ones",
            str(differ),
            "" if itself.unequal else "0",
        ),
        *([("the same stream here, twice", str(itself), "")] if cuda else []),
        (
            "one session in process",
            f"{single:.0f} images/s ({alone[0]:.0f}, {alone[1]:.0f})",
            "",
        ),
        (
            "service",
            f"{rate:.0f} images/s, {share:.0f} %",
            f">= {100 * FASTEST:.0f} %",
        ),
        ("slowest / fastest session", f"{fairness:.2f}", f"<= {FAIREST:g}"),
        (
            "latency, p50, p95 and worst",
            ", ".join(f"{1e3 * s:.1f} ms" for s in spread),
            "",
        ),
        ("processor time per batch", f"{1e3 * spent.cpu_seconds / batches:.1f} ms", ""),
        ("bytes per batch to the database", f"{spent.stored / batches:,.0f}", ""),
        ("bytes per batch to the disk", f"{spent.on_disk / batches:,.0f}", ""),
        ("database at the end", f"{size:,.0f} bytes", ""),
    ]
    for name, value, aim in rows:
        print(f"{name:32} {value:48} {aim}")
    for error in errors[:5]:
        print("error:", error)
    unlike = differ.unequal > 0 and not itself.unequal
    missed = bool(errors) or unlike or fairness > FAIREST or rate < FASTEST * single
    return int(options.check and missed)


if __name__ == "__main__":
    main()
