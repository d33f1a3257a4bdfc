"""Replicas on a real Ray Serve that are killed, stopped and restarted under load."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from benchmarks.serve_load import replica_pids
from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve.client import Client
from cliquetta.serve.replicas import ReplicaPlan
from cliquetta.serve.settings import Limits, Settings
from tests._helpers.running import COMMAND, Run, child_environment
from tests._helpers.serve_setup import CLASSES, Alone, Load, free_port, is_up, wait_until


def test_a_plan_in_the_words_of_serve() -> None:
    settings = Settings(limits=Limits(queued=10, wait_seconds=7, batch_seconds=5))
    fixed = ReplicaPlan(3, 3, cpus=2, gpus=0.5).options(settings, present=2)
    for present in (0.0, 4.0):  # a GPU each, if there are any
        given = ReplicaPlan().options(settings, present)["ray_actor_options"]["num_gpus"]
        assert given == min(present, 1.0)
    with pytest.raises(UserError, match="has 0"):
        ReplicaPlan(gpus=1).options(settings)
    assert fixed["num_replicas"] == 3 and "autoscaling_config" not in fixed
    assert fixed["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0.5}
    assert fixed["graceful_shutdown_timeout_s"] == 12  # what was begun is finished
    assert fixed["max_ongoing_requests"] > 10  # else requests would wait where nobody is fair
    scaled = ReplicaPlan(1, 4, queue=6).options(settings)
    assert "num_replicas" not in scaled
    assert scaled["autoscaling_config"]["target_ongoing_requests"] == 6


class LoneLoad(Load):
    """One that has a connection of its own and repeats no request."""

    def __init__(self, address: str, number: int, method: str) -> None:
        self.client = Client(address, retry_seconds=0, timeout=300)
        super().__init__(number, self.client.create_session(CLASSES, method=method))

    def finish(self, model: CLIP, method: str) -> None:
        """Stop, and compare all responses and the state with a run that nobody disturbed."""
        self.stop(300)
        self.check(self.session.export_state(), Alone(model, method))
        self.client.close()


@contextmanager
def cluster(folder: Path, model: Path, *options: str) -> Iterator[tuple[int, str]]:
    """``cliquetta serve --ray local`` as a process; yields its id and its address."""
    port = free_port()
    where = ["--port", str(port), "--state-dir", str(folder / "sessions"), "--device", "cpu"]
    offer = ["--model", f"tiny={model}", "--ray", "local", *options]
    rate = ["--limit", "rate=100000", "--limit", "burst=100000"]
    command = [*COMMAND, "serve", *where, *offer, *rate]
    server = subprocess.Popen(command, env=child_environment())
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_up(address) or server.poll() is not None, 300)
        yield server.pid, address
    finally:
        server.terminate()
        server.wait(180)


@pytest.mark.slow
def test_replicas_come_and_go_and_lose_nothing(
    tmp_path: Path, tiny_clip: CLIP, tiny_file: Path, run: Run
) -> None:
    """One cluster for all that may happen, since its processes are most of the cost."""
    with cluster(tmp_path, tiny_file, "--replicas", "1:2") as (server, address):
        assert len(replica_pids(server)) == 1
        # a small state, written in full, and a large one, written as changes
        methods = ["tent", "domain_norm"] * 3
        loads = [LoneLoad(address, number, method) for number, method in enumerate(methods)]
        wait_until(lambda: len(replica_pids(server)) == 2, 240)  # one is added while requests wait
        for one in loads:
            one.pause = 1.0

        def moved_on() -> None:
            before = [len(one.responses) for one in loads]
            counts = list(zip(loads, before, strict=True))
            wait_until(lambda: all(len(o.responses) > n + 2 or o.error for o, n in counts), 240)

        slow, hung = sorted(replica_pids(server))
        os.kill(slow, signal.SIGSTOP)  # one is slow, then comes back
        time.sleep(3)
        os.kill(slow, signal.SIGCONT)
        moved_on()
        os.kill(slow, signal.SIGKILL)  # it dies
        wait_until(lambda: len(set(replica_pids(server)) - {slow}) == 2, 240)

        def at_work() -> set[int]:
            return set(replica_pids(server)) - {hung}  # Ray may not be able to end it

        os.kill(hung, signal.SIGSTOP)  # the other hangs for good, and is replaced
        moved_on()
        wait_until(lambda: len(at_work()) == 2, 240)
        old = at_work()
        os.kill(server, signal.SIGHUP)  # all replicas are replaced, one after the other
        wait_until(lambda: len(at_work()) == 2 and not old & at_work(), 240)
        moved_on()
        for one, method in zip(loads, methods, strict=True):
            one.finish(tiny_clip, method)
        with suppress(ProcessLookupError):
            os.kill(hung, signal.SIGKILL)
        text = httpx.get(f"{address}/metrics").text
        assert 'cliquetta_images_total{replica="' in text
    words = ("sessions", "list", "--state-dir", tmp_path / "sessions")
    assert "6 sessions" in run(*words).stdout
    listed = json.loads(run(*words, "--json").stdout)
    assert all(isinstance(one[name], int) for one in listed for name in ("images", "KiB"))
