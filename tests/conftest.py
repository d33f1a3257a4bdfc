"""One small random CLIP and its classes, shared by all tests."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip, make_tiny_images

torch.set_num_threads(1)


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
