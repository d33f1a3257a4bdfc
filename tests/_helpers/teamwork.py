"""Run a function in several processes, as ``torchrun`` would, and gather what they return."""

from __future__ import annotations

import faulthandler
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

Work = Callable[..., Any]


def in_processes(size: int, folder: Path, work: Work, *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` returns in each of ``size`` processes, by rank."""
    port = _unused_port()
    context = mp.get_context("fork")  # children need not load torch again
    processes = [
        context.Process(target=_child, args=(rank, size, port, folder, work, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    assert codes == [0] * size, f"exit codes {codes}"
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(size)]


def _unused_port() -> int:
    """A port that stays unused until the processes meet there.

    It is taken from below those that systems give to other sockets of the test run.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("a hundred ports are in use")


def _child(
    rank: int, size: int, port: int, folder: Path, work: Work, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    faulthandler.dump_traceback_later(30, exit=True)  # says where a process hangs
    torch.save(work(*arguments), folder / f"rank{rank}.pt")
