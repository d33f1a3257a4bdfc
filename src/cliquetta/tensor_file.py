"""Named tensors and a header in one safetensors file: states, fitted methods, checkpoints.

Bytes of any origin may be read: they are parsed as safetensors and JSON, nothing is
    executed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from cliquetta.errors import UserError

_UNREADABLE = (OSError, SafetensorError, json.JSONDecodeError, RecursionError)
"""Errors of reading a damaged or hostile file."""


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """The file's bytes; values of the header are JSON types."""
    return pack_raw(tensors, {key: json.dumps(value) for key, value in header.items()})


def pack_raw(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Pack tensors with a header of strings, or none; equal content gives equal bytes."""
    flat = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    if metadata is None:
        return save(flat)
    data = save(flat, metadata=dict(metadata))
    end = 8 + int.from_bytes(data[:8], "little")
    # safetensors writes the metadata in the order of a hash table, another one every
    # time
    head = json.dumps(
        json.loads(data[8:end]), sort_keys=True, separators=(",", ":")
    ).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((len(head).to_bytes(8, "little"), head, memoryview(data)[end:]))


def unpack(
    data: bytes, *, source: str, kind: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of :func:`pack`; errors call the bytes ``source``, a ``kind`` of file."""
    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
        return tensors, {key: json.loads(value) for key, value in metadata.items()}
    except _UNREADABLE as error:
        raise UserError(f"{source} is not a readable {kind} ({error})") from error


def read_header(path: Path | str, *, kind: str) -> dict[str, Any]:
    """The header of a file of :func:`pack`, without its tensors."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        return {key: json.loads(value) for key, value in metadata.items()}
    except _UNREADABLE as error:
        raise UserError(f"{path} is not a readable {kind} ({error})") from error
