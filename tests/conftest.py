"""One small random CLIP and its classes, shared by all tests; names of their parameters."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip, make_tiny_images

torch.set_num_threads(1)

LONGEST_ID = 60
THREADS = 16
Together = Callable[[Callable[[int], Any]], list[Any]]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a parameter by what it holds where pytest would number it, such as ``options5``."""
    if isinstance(val, Mapping):
        words = [f"{key}={plain(value)}" for key, value in val.items()] or ["empty"]
    elif isinstance(val, tuple | list):
        words = [plain(value) for value in val] or ["empty"]
    elif isinstance(val, FunctionType) and "<locals>" in val.__qualname__:
        words = [val.__qualname__.partition(".")[0]]  # of the function that made it
    else:
        words = changed_fields(val)
    return ",".join(words)[:LONGEST_ID].encode("unicode_escape").decode("ascii") or None


def changed_fields(value: Any) -> list[str]:
    """List the fields of a config that are not at their defaults; none of anything else."""
    if not is_dataclass(value) or isinstance(value, type):
        return []
    of_config = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: field.default for field in fields(value)}
    changed = [
        name for name in of_config if plain(of_config[name]) != plain(defaults[name])
    ]
    return [f"{name}={plain(of_config[name])}" for name in changed] or ["defaults"]


def plain(value: object) -> str:
    """Write a value in a few words that are the same in every process."""
    if isinstance(value, tuple | list):
        return "(" + ",".join(plain(part) for part in value) + ")"
    if isinstance(value, str | int | float | Path | None):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


@pytest.fixture
def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Flushes of files and folders to disk, by name, and renames, by the new name, in order."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("open files have names in /proc only")
    events: list[tuple[str, str]] = []
    flush = os.fsync
    rename = Path.replace

    def note_flush(handle: int) -> None:
        flush(handle)
        events.append(("flush", Path(f"/proc/self/fd/{handle}").readlink().name))

    def note_rename(path: Path, target: str | Path) -> Path:
        renamed = rename(path, target)
        events.append(("rename", Path(target).name))
        return renamed

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(Path, "replace", note_rename)
    return events


class SlowInt(int):
    """A number; while it is added to another, or taken from it, other threads run.

    CPython switches threads at calls and loops only: sums of plain numbers are never
    interrupted there, but nothing promises that.
    """

    def __radd__(self, other: int) -> int:
        time.sleep(0)
        return other + int(self)

    def __rsub__(self, other: int) -> int:
        time.sleep(0)
        return other - int(self)


class SlowName(str):
    """A key of dictionaries and sets; while it is looked up or set, other threads run."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


@pytest.fixture
def together() -> Iterator[Together]:
    """Call a function with 0 to 15 in a thread each, all at once; returns their results.

    Python looks for another thread to run every microsecond instead of every five
    milliseconds, so that what is not under a lock is soon interrupted halfway.
    """
    before = sys.getswitchinterval()

    def run(work: Callable[[int], Any]) -> list[Any]:
        start = threading.Barrier(THREADS)

        def begin(number: int) -> Any:
            start.wait(timeout=30)
            return work(number)

        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(begin, range(THREADS)))

    sys.setswitchinterval(1e-6)
    yield run
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def tiny_clip() -> CLIP:
    """The shared model; tests may not change its weights."""
    return build_tiny_clip()


@pytest.fixture(scope="session")
def tiny_file(tiny_clip: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared model as a file for ``--model``."""
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    save_model(tiny_clip, path)
    return path


@pytest.fixture(scope="session")
def tiny_prompts() -> ClassPrompts:
    """Five classes in two templates."""
    return ClassPrompts(TINY_NAMES, ("a photo of a {}.", "a sketch of a {}."))


@pytest.fixture(scope="session")
def tiny_images() -> Tensor:
    """The ten images of :func:`make_tiny_images`."""
    return make_tiny_images()
