"""The connection to a Ray cluster."""

import os
import warnings
from typing import Any

import pytest

from cliquetta.ray_connection import END_HUNG, connected


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
        warnings.warn("`x` is deprecated and will be removed in Ray 2.64.", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        assert os.environ["RAY_BACKEND_LOG_LEVEL"] == "fatal"
    assert [str(warning.message) for warning in recwarn] == ["something else"]
