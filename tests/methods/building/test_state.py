"""State files: complete or not there, and refused by an adapter of another kind."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cliquetta.atomic import write_atomically
from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.state import (
    StateMismatchError,
    load_method,
    load_state,
    pack_state,
    read_header,
    unpack_state,
)
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.tensor_file import pack, pack_raw, unpack
from cliquetta.types import Batch, Prediction
from tests._helpers.building import assert_same_state
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


@dataclass(frozen=True)
class CountingConfig:
    """Config of :class:`Counting`."""

    step: float = 1.0  # Added per batch.
    names: tuple[str, ...] = ("a", "b")  # A tuple, which JSON knows as a list.


class Counting(Adapter):
    """Remembers how many batches it has seen, in a tensor that is not contiguous."""

    batch_dependence = BatchDependence.JOINT

    def _setup(self) -> None:
        self.memory.declare("count", torch.zeros(2, 3).T)
        self.memory.declare(
            "draws", torch.Generator().manual_seed(self.seed).get_state()
        )

    def _predict(self, batch: Batch) -> Prediction:
        self.memory["count"] = self.memory["count"] + self.config.step
        return Prediction(torch.zeros(len(batch), len(self.prompts)))


class Otherwise(Counting):
    """A method of another name."""


@pytest.fixture
def counting() -> Counting:
    return Counting(TINY, TINY_PROMPTS, CountingConfig())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state.safetensors"


def test_memory_extras_and_notes_come_back(counting: Counting, path: Path) -> None:
    counting.predict(TINY_IMAGES)
    extra = {"metric": torch.arange(4), "empty": torch.zeros(0)}
    notes = {"batches": 1, "skipped": ["ä"]}
    counting.save(path, extra=extra, notes=notes)

    other = Counting(TINY, TINY_PROMPTS, CountingConfig(), seed=5)
    saved = load_state(other, path)

    assert_same_state(other, counting.state_dict())
    assert torch.equal(other.memory["count"], torch.ones(3, 2))
    assert saved.notes == notes
    torch.testing.assert_close(dict(saved.extra), extra)

    header = read_header(path)
    assert header["method"] == "Counting"
    assert header["torch"] == torch.__version__
    assert header["classes"] == counting.prompts.fingerprint


def test_bytes_serve_as_well_and_are_equal_for_equal_content(
    counting: Counting,
) -> None:
    """The order of a safetensors header would be another one in every file."""
    counting.predict(TINY_IMAGES)
    (data,) = {pack_state(counting, notes={"images": 3}) for _ in range(8)}
    counting.reset()
    unpack_state(counting, data)

    assert torch.equal(counting.memory["count"], torch.ones(3, 2))


def test_adapters_of_another_kind_refuse_and_say_why(
    counting: Counting, path: Path
) -> None:
    counting.save(path)
    config = CountingConfig()
    more = ClassPrompts((*TINY_NAMES, "dog"), TINY_PROMPTS.templates)
    retrained = build_tiny_clip(seed=1)
    renamed = build_tiny_clip()
    renamed.id = "renamed"
    cases = {
        "method": Otherwise(TINY, TINY_PROMPTS, config),
        "step": Counting(TINY, TINY_PROMPTS, CountingConfig(step=2.0)),
        "class list": Counting(TINY, more, config),
        "templates": Counting(TINY, ClassPrompts(TINY_NAMES), config),
        "weights": Counting(retrained, TINY_PROMPTS, config),
        "model": Counting(renamed, TINY_PROMPTS, config),
    }

    for message, adapter in cases.items():
        before = adapter.state_dict()
        with pytest.raises(StateMismatchError, match=message):
            load_state(adapter, path)
        assert_same_state(adapter, before)


def test_a_few_shot_fit_belongs_to_the_state(counting: Counting, path: Path) -> None:
    counting.fitted = {"context": torch.ones(2)}
    counting.save(path)
    load_state(counting, path)
    counting.fitted = {"context": torch.zeros(2)}

    with pytest.raises(StateMismatchError, match="fit"):
        load_state(counting, path)


def test_files_that_are_no_states_are_refused(
    counting: Counting, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    counting.save(path)
    full = path.read_bytes()
    damaged = (b"", b"text", full[:40], full[:-3])

    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(UserError, match="state"):
            load_state(counting, path)

    # a tensor file of something else
    save_file({"a": torch.zeros(1)}, str(path))

    with pytest.raises(UserError, match="state"):
        load_state(counting, path)


@pytest.fixture
def saved_header(path: Path) -> dict[str, str]:
    """What a saved state of Tent says of itself; the file is at ``path``."""
    create_method("tent", TINY, TINY_NAMES).save(path)
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_notes_nested_too_deeply_are_refused_by_every_reader(
    path: Path, saved_header: dict[str, str]
) -> None:
    header = {**saved_header, "notes": "[" * 100_000 + "]" * 100_000}
    tensors = load_file(path)
    path.write_bytes(pack_raw(tensors, header))
    assert_refused(path, "readable")


def test_a_file_of_gigabytes_is_refused_before_it_is_read(
    path: Path, saved_header: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 GB, of which a hole is most."""
    size = 6 * 10**9
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = {"__metadata__": saved_header, "memory.norms.values": entry}
    text = json.dumps(header).encode()

    with path.open("wb") as hollow:
        hollow.write(len(text).to_bytes(8, "little"))
        hollow.write(text)
        hollow.truncate(8 + len(text) + size)

    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    assert_refused(path, "6,000,")


def test_a_crash_while_writing_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(handle: int) -> None:
        raise OSError("disk full")

    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(OSError, match="full"):
            write_atomically(path, b"new")

    assert path.read_bytes() == b"old"
    assert [*path.parent.iterdir()] == [path]

    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def assert_refused(path: Path, message: str) -> None:
    """Neither reader takes the file for a state of Tent."""
    with pytest.raises(UserError, match=message):
        load_state(create_method("tent", TINY, TINY_NAMES), path)
    with pytest.raises(UserError, match=message):
        load_method(path, TINY)


@pytest.mark.parametrize("read", ["load_method", "load_state"])
def test_a_state_with_settings_that_the_method_no_longer_has_is_of_another_version(
    path: Path, read: str
) -> None:
    adapter = create_method("domain_norm", TINY, TINY_PROMPTS)
    adapter.save(path)
    tensors, header = unpack(path.read_bytes(), source=str(path), kind="state file")
    header["config"] |= {"vote_share": 0.4, "abstain_below": 0.1}  # as of 2026-11-18
    path.write_bytes(pack(tensors, header))

    says = "domain_norm no longer has the settings abstain_below, vote_share; start"
    with pytest.raises(StateMismatchError, match=says):
        if read == "load_method":
            load_method(path, TINY)
        else:
            load_state(adapter, path)


def test_a_loaded_method_draws_as_before_or_as_asked(path: Path) -> None:
    classes = ClassPrompts(("cat", "dog"))
    create_method("tent", TINY, classes, seed=3).save(path)
    assert load_method(path, TINY).seed == 3
    assert load_method(path, TINY, seed=5).seed == 5
    assert load_method(path, TINY, seed=0).seed == 0
