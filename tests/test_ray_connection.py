"""The connection to a Ray cluster."""

import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

from cliquetta.ray_connection import END_HUNG, connected, quiet_stderr
from tests._helpers.running import COMMAND, child_environment
from tests._helpers.trees import noise


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_workers_have_the_priority_and_wait_policy_of_the_command(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **options: given.update(options))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", END_HUNG):
        monkeypatch.delenv(name, raising=False)
    with connected(address):
        niceness = os.environ.pop("RAY_worker_niceness", None)
    if address == "local":  # started from here: the environment is inherited
        assert niceness == "0" and "runtime_env" not in given
    else:
        assert niceness is None
        assert given["runtime_env"] == {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}


def test_what_ray_says_when_all_is_well_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_BACKEND_LOG_LEVEL", raising=False)
    with connected("local"):
        warnings.warn(
            "`x` is deprecated and will be removed in Ray 2.64.", stacklevel=1
        )
        warnings.warn("something else", stacklevel=1)
        assert os.environ["RAY_BACKEND_LOG_LEVEL"] == "fatal"
    assert [str(warning.message) for warning in recwarn] == ["something else"]


def test_native_lines_are_held_back_and_shown_where_connecting_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with quiet_stderr():
        os.write(2, b"all is well\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(ConnectionError), quiet_stderr():
        os.write(2, b"no such host\n")
        raise ConnectionError
    assert capfd.readouterr().err == "no such host\n"


@pytest.mark.slow
def test_a_run_on_ray_writes_nothing_of_its_own_to_stderr(
    tmp_path: Path, tiny_file: Path
) -> None:
    noise(tmp_path, [f"{number}.png" for number in range(9)])
    words = (
        "predict",
        ".",
        "--classes",
        "a,b,c",
        "--model",
        tiny_file,
        "--ray",
        "local",
    )
    run = subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stderr == ""
