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
from cliquetta.serve.ray_deployment import ReplicaPlan
from cliquetta.serve.settings import Limits, Settings
from tests._helpers.postgres import PostgreSQL
from tests._helpers.running import COMMAND, Run, child_environment
from tests._helpers.serve_setup import (
    ALICE,
    CLASSES,
    Alone,
    Load,
    bearer,
    free_port,
    is_up,
    refusal,
    wait_until,
)


def test_a_plan_in_the_words_of_serve() -> None:
    settings = Settings(limits=Limits(queued=10))
    fixed = ReplicaPlan(3, 3, cpus=2, gpus=0.5).options(settings, present=2)
    for present in (0.0, 4.0):  # a GPU each, if there are any
        given = ReplicaPlan().options(settings, present)["ray_actor_options"][
            "num_gpus"
        ]
        assert given == min(present, 1.0)
    with pytest.raises(UserError, match="has 0"):
        ReplicaPlan(gpus=1).options(settings)
    assert fixed["num_replicas"] == 3 and "autoscaling_config" not in fixed
    assert fixed["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0.5}
    assert (
        fixed["max_ongoing_requests"] > 10
    )  # else requests would wait where nobody is fair
    scaled = ReplicaPlan(1, 4, queue=6).options(settings)
    assert "num_replicas" not in scaled
    assert scaled["autoscaling_config"]["target_ongoing_requests"] == 6


class LoneLoad(Load):
    """One that has a connection of its own."""

    def __init__(self, address: str, number: int, method: str) -> None:
        self.client = Client(address, token=ALICE, retry_seconds=120, timeout=120)
        super().__init__(number, self.client.create_session(CLASSES, method=method))

    def finish(self, model: CLIP, method: str) -> None:
        """Stop, and compare all responses and the state with a run that nobody disturbed."""
        self.stop(300)
        self.check(self.session.export_state(), Alone(model, method))
        self.client.close()


@contextmanager
def cluster(
    sessions: str, model: Path, *options: str
) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """``cliquetta serve --ray local`` as a process; yields it and its address."""
    port = free_port()
    where = ["--port", str(port), "--sessions", sessions, "--device", "cpu"]
    offer = ["--model", f"tiny={model}", "--ray", "local", *options]
    rate = ["--limit", "rate=100000", "--limit", "burst=100000"]
    server = subprocess.Popen(
        [*COMMAND, "serve", *where, *offer, *rate],
        env=child_environment(CLIQUETTA_TOKEN=ALICE),
        start_new_session=True,  # signals to its group are not for this process
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_up(address) or server.poll() is not None, 300)
        yield server, address
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(60)


def processes_of(group: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state, _, _, session = (
                (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            )
            if int(session) == group and state != "Z":
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_replicas_come_and_go_and_lose_nothing(
    postgresql: PostgreSQL, tiny_clip: CLIP, tiny_file: Path, run: Run
) -> None:
    """One cluster for all that may happen, since its processes are most of the cost."""
    database = postgresql.create_database()
    with cluster(database, tiny_file, "--replicas", "1:2") as (server, address):
        assert len(replica_pids(server.pid)) == 1
        # limits and tokens hold behind Serve's proxy
        assert refusal(httpx.get(f"{address}/v1/sessions")) == (401, "unauthorized")
        large = httpx.post(
            f"{address}/v1/sessions", content=bytes(33 * 2**20), headers=bearer(ALICE)
        )
        assert refusal(large) == (413, "too_large")

        methods = ["tent", "domain_norm"] * 3
        loads = [
            LoneLoad(address, number, method) for number, method in enumerate(methods)
        ]
        # one is added while requests wait
        wait_until(lambda: len(replica_pids(server.pid)) == 2, 240)
        for one in loads:
            one.pause = 1.0

        def moved_on() -> None:
            before = [len(one.responses) for one in loads]
            counts = list(zip(loads, before, strict=True))
            wait_until(
                lambda: all(len(o.responses) > n + 2 or o.error for o, n in counts), 240
            )

        slow, hung = sorted(replica_pids(server.pid))
        os.kill(slow, signal.SIGSTOP)  # one is slow, then comes back
        time.sleep(3)
        os.kill(slow, signal.SIGCONT)
        moved_on()
        os.kill(slow, signal.SIGKILL)  # it dies
        wait_until(lambda: len(set(replica_pids(server.pid)) - {slow}) == 2, 240)

        def at_work() -> set[int]:
            return set(replica_pids(server.pid)) - {
                hung
            }  # Ray may not be able to end it

        os.kill(hung, signal.SIGSTOP)  # the other hangs for good, and is replaced
        moved_on()
        wait_until(lambda: len(at_work()) == 2, 240)
        old = at_work()
        os.kill(
            server.pid, signal.SIGHUP
        )  # all replicas are replaced, one after the other
        wait_until(lambda: len(at_work()) == 2 and not old & at_work(), 240)
        moved_on()
        for one, method in zip(loads, methods, strict=True):
            one.finish(tiny_clip, method)
        with suppress(ProcessLookupError):
            os.kill(hung, signal.SIGKILL)
    words = ("sessions", "list", "--sessions", database)
    assert "6 sessions" in run(*words).stdout
    listed = json.loads(run(*words, "--json").stdout)
    assert all(
        isinstance(one[name], int) for one in listed for name in ("images", "KiB")
    )


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [True, False])
def test_a_signal_ends_everything_within_ten_seconds(
    tmp_path: Path, tiny_file: Path, whole_group: bool
) -> None:
    """Also one to the process group, as systemd sends it: Ray's processes get it as well."""
    with cluster(str(tmp_path / "sessions"), tiny_file) as (server, address):
        with Client(address, token=ALICE) as client:
            client.create_session(CLASSES)
        assert len(processes_of(server.pid)) > 5
        start = time.monotonic()
        if whole_group:
            os.killpg(server.pid, signal.SIGTERM)
        else:
            server.terminate()
        assert server.wait(30) == 0
        assert time.monotonic() - start < 10
        wait_until(lambda: processes_of(server.pid) == [], 2)
