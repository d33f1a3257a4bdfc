"""Pickled files that would run code, lie about their size or are damaged: refused at once."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.model.checkpoints.pickled import read_pt
from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.factory import create_model
from tests._helpers.openai_module import bare_state


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_is_refused(
    module: Any, tmp_path: Path, legacy: bool
) -> None:
    trap = tmp_path / "ran"
    state = dict(bare_state(module)) | {"extra": Payload(trap)}
    torch.save(state, tmp_path / "evil.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="code"):
        create_model(tmp_path / "evil.pt")
    assert not trap.exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert trap.exists()  # the trap works: it is our reader that did not spring it


def test_a_poisoned_torchscript_archive_is_refused(
    archive: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    evil = tmp_path / "evil.pt"
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(evil, "w") as target:
        for name in source.namelist():
            data = (
                pickle.dumps(Payload(trap), protocol=2)
                if name.endswith("/data.pkl")
                else None
            )
            target.writestr(name, source.read(name) if data is None else data)
    with pytest.raises(CheckpointError, match="system"):
        create_model(evil)
    assert not trap.exists()


def zipped(
    pickled: bytes, *, script: bool = False, packing: int = zipfile.ZIP_STORED
) -> bytes:
    """A ``.pt`` file whose content is ``pickled``, with a storage of four numbers."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/data/0", bytes(16))
        if script:
            archive.writestr("a/constants.pkl", b"\x80\x02).")
    return buffer.getvalue()


def shared_records(levels: int) -> bytes:
    """A module that holds the same module twice, and so on down: 2 ** levels in all."""
    record = b"c__torch__\nX\n)\x81}"
    pickled = b"\x80\x02" + record + b"bq\x00"
    for level in range(levels):
        child = b"h" + bytes([level])
        both = b"X\x01\x00\x00\x00a" + child + b"X\x01\x00\x00\x00b" + child
        pickled += b"0" + record + b"(" + both + b"ubq" + bytes([level + 1])
    return pickled + b"."


def nested_key(levels: int) -> bytes:
    """A dict whose key is a tuple of the same tuple twice, and so on: its hash never ends."""
    pickled = b"\x80\x02}K\x01"
    for _ in range(levels):
        pickled += b"q\x00h\x00\x86"
    return pickled + b"K\x01s."


def stretched() -> bytes:
    """A state dict with one tensor of 4 TB over one number."""
    buffer = io.BytesIO()
    torch.save({"visual.proj": torch.zeros(1).expand(10**6, 10**6)}, buffer)
    return buffer.getvalue()


VIEW = (
    b"\x80\x02c__torch__\nM\n)\x81}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n"
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    b"K\x04tQK\x00(M\xe8\x03t(K\x01t\x89}tRsb."
)
BOMBS = {
    "modules in modules": zipped(shared_records(60), script=True),
    "module in itself": zipped(
        b"\x80\x02c__torch__\nX\n)\x81q\0}(X\1\0\0\0ah\0ub.", script=True
    ),
    "dict in itself": zipped(b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s."),
    "key in a script": zipped(nested_key(60), script=True),
    "key in a state dict": zipped(nested_key(60)),
    "key in a bare pickle": pickle.dumps(0x1950A86A20F9469CFC6C, 2) + nested_key(60),
    "memo of two billion": zipped(b"\x80\x02]r\xff\xff\xff\x7f.", script=True),
    "zeros, compressed": zipped(b"\0" * 10**7, packing=zipfile.ZIP_DEFLATED),
    "tensor over one number": stretched(),
    "view outside its storage": zipped(VIEW, script=True),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_small_files_that_ask_for_much_are_refused_at_once(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.pt"
    path.write_bytes(BOMBS[kind])
    assert len(BOMBS[kind]) < 12_000
    with pytest.raises(CheckpointError):
        create_model(path)


@pytest.mark.parametrize(
    "content", [b"", b"not a checkpoint", b"PK\x03\x04 broken zip"]
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_damaged_files(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        create_model(path)


def test_weights_of_a_torchscript_archive_are_those_of_the_module(
    module: Any, archive: Path
) -> None:
    state, _ = read_pt(archive)
    expected = bare_state(module)
    for name in ("visual.conv1.weight", "text_projection", "ln_final.bias"):
        assert torch.equal(state[name].float(), expected[name].float())
