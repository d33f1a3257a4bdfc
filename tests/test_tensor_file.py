"""Tensors and a header in one file, and files that are not."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from cliquetta.errors import UserError
from cliquetta.tensor_file import pack, read_header, unpack


def test_a_file_comes_back_and_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).view(2, 3).T, "a": torch.tensor([True])}
    header = {"method": "tent", "steps": [1, None], "text": "é"}
    data = pack(tensors, header)
    assert data == pack(dict(reversed(tensors.items())), dict(reversed(header.items())))
    again, facts = unpack(data, source="x", kind="state")
    assert facts == header and again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert load(data)["b"].tolist() == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]  # any safetensors reader can
    (tmp_path / "x").write_bytes(data)
    assert read_header(tmp_path / "x", kind="state") == header


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 64, pickle.dumps({"a": 1}), pack({"a": torch.ones(3)}, {})[:-1]],
)
def test_other_bytes_are_refused_by_name(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="readable"):
        unpack(data, source="x", kind="state")
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UserError, match="readable"):
        read_header(tmp_path / "x", kind="state")
