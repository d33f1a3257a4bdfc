"""Run a function in several processes, as ``torchrun`` would, and gather what they return."""

from __future__ import annotations

import faulthandler
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

Work = Callable[..., Any]


def in_processes(size: int, folder: Path, work: Work, *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` returns in each of ``size`` processes, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
