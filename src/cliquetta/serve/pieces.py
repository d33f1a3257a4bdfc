"""The memory of a session in pieces, so that a batch writes what it changed and no more.

A tensor is cut into pieces of whole rows, or into blocks where a row is longer than a piece may
be. Pieces of zeros, which is most of a new memory, are not stored until something is learned there.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from cliquetta.errors import UserError

LONGEST_PIECE = 2**16
"""Bytes of a piece at most."""
SHORTEST_ROWS = 2**10
"""Rows of fewer bytes share a piece, up to this size: else their keys would outweigh them."""
_ABSENT = bytes(32)
"""Stands for the checksum of a piece that is not stored, because it is zero."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}


class Tensors(Protocol):
    """Tensors by name: a dictionary, or the memory of a method."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str, /) -> Tensor: ...


class DamagedError(UserError):
    """Something in the database is not what the server wrote."""


@dataclass(frozen=True)
class Piece:
    """Some bytes of a tensor, and the checksum of them and their place."""

    tensor: str
    number: int
    data: bytes
    checksum: bytes

    @classmethod
    def of(cls, session: str, tensor: str, number: int, data: bytes) -> "Piece":
        """A piece of a session's tensor with its checksum."""
        return cls(tensor, number, data, _checksum(session, tensor, number, data))

    def check(self, session: str) -> None:
        """Raise :class:`DamagedError` if these are not the bytes that were written."""
        if _checksum(session, self.tensor, self.number, self.data) != self.checksum:
            raise DamagedError("a piece of the session is damaged: its checksum differs")


@dataclass(frozen=True)
class TensorLayout:
    """Type and shape of a tensor, and the bytes of its pieces but the last."""

    dtype: str
    shape: tuple[int, ...]
    piece_bytes: int

    @classmethod
    def of(cls, value: Tensor) -> "TensorLayout":
        """Choose the pieces of a tensor."""
        dtype = str(value.dtype).removeprefix("torch.")
        row = value.nbytes if value.ndim < 2 else value.shape[-1] * value.element_size()
        if row == 0 or row > LONGEST_PIECE:
            return cls(dtype, tuple(value.shape), LONGEST_PIECE)
        rows = max(1, SHORTEST_ROWS // row)
        return cls(dtype, tuple(value.shape), row * rows)

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        """Number of its pieces."""
        return -(-self.nbytes // self.piece_bytes)

    def build(self, data: bytearray) -> Tensor:
        """The tensor with these bytes."""
        if not data:
            return torch.zeros(self.shape, dtype=_DTYPES[self.dtype])
        return torch.frombuffer(data, dtype=_DTYPES[self.dtype]).reshape(self.shape)


@dataclass
class SavedMemory:
    """The memory of a session as the database has it.

    Tensors are held, not copied: methods replace the tensors of their memory and never write into
    them, so the old ones show what a batch has changed.
    """

    session: str
    layout: dict[str, TensorLayout] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    checksums: dict[str, list[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, session: str, memory: Tensors) -> tuple["SavedMemory", list[Piece]]:
        """A memory that is written completely, and its pieces: those that are not zero."""
        layout = {name: TensorLayout.of(memory[name]) for name in memory}
        saved = cls(
            session=session,
            layout=layout,
            tensors={name: _zeros_like(memory[name]) for name in memory},
            checksums={name: [_ABSENT] * one.count for name, one in layout.items()},
        )
        return saved, saved.update(memory)

    @classmethod
    def read(cls, session: str, layout_text: str, pieces: Iterable[Piece]) -> "SavedMemory":
        """Put stored pieces together, or raise :class:`DamagedError`."""
        layout = _parse_layout(layout_text)
        checksums = {name: [_ABSENT] * one.count for name, one in layout.items()}
        buffers = {name: bytearray(one.nbytes) for name, one in layout.items()}
        for piece in pieces:
            piece.check(session)
            checksums[piece.tensor][piece.number] = piece.checksum
            first = piece.number * layout[piece.tensor].piece_bytes
            buffers[piece.tensor][first : first + len(piece.data)] = piece.data
        tensors = {name: one.build(buffers[name]) for name, one in layout.items()}
        return cls(session, layout, tensors, checksums)

    def update(self, memory: Tensors) -> list[Piece]:
        """Take over a memory; returns the pieces that are others than before."""
        changed = []
        for name, layout in self.layout.items():
            before, now = self.tensors[name], memory[name]
            if now is before:
                continue
            for piece in _changed_pieces(self.session, name, layout, before, now):
                self.checksums[name][piece.number] = piece.checksum
                changed.append(piece)
            self.tensors[name] = now
        return changed

    def hold(self, memory: Tensors) -> None:
        """Hold the tensors of a memory that was loaded from this one, instead of copies."""
        self.tensors = {name: memory[name] for name in self.layout}

    @property
    def layout_text(self) -> str:
        """The layout as JSON."""
        rows = {
            name: [one.dtype, list(one.shape), one.piece_bytes] for name, one in self.layout.items()
        }
        return json.dumps(rows)

    @property
    def root(self) -> bytes:
        """Hash of all checksums: a piece that is missing, or of another moment, changes it."""
        digest = hashlib.sha256()
        for name, checksums in self.checksums.items():
            digest.update(f"{name} {len(checksums)} ".encode())
            digest.update(b"".join(checksums))
        return digest.digest()

    @property
    def stored_bytes(self) -> int:
        """Size of the pieces that are stored."""
        total = 0
        for name, checksums in self.checksums.items():
            layout = self.layout[name]
            stored = sum(checksum != _ABSENT for checksum in checksums)
            total += min(stored * layout.piece_bytes, layout.nbytes)
        return total


def _changed_pieces(
    session: str, name: str, layout: TensorLayout, before: Tensor, now: Tensor
) -> list[Piece]:
    """The pieces of a tensor whose bits differ."""
    bits = _as_bits(now)
    differs = bits != _as_bits(before).to(bits.device)
    # whole pieces as rows, and a shorter one at the end
    width = layout.piece_bytes // now.element_size()
    whole = len(bits) // width
    rows = bits[: whole * width].reshape(whole, width)
    changed = differs[: whole * width].reshape(whole, width).any(dim=1).nonzero()[:, 0]
    # one transfer from a GPU, of what changed
    contents = [row.tobytes() for row in rows[changed].cpu().numpy()]
    numbers = changed.tolist()
    if bool(differs[whole * width :].any()):
        numbers.append(whole)
        contents.append(bits[whole * width :].cpu().numpy().tobytes())
    return [
        Piece.of(session, name, number, content)
        for number, content in zip(numbers, contents, strict=True)
    ]


def _as_bits(value: Tensor) -> Tensor:
    """The tensor's numbers in one row, as integers of their size."""
    return value.detach().contiguous().reshape(-1).view(_BITS[value.element_size()])


def _zeros_like(value: Tensor) -> Tensor:
    """A tensor of zeros that takes the memory of one number."""
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


def _parse_layout(text: str) -> dict[str, TensorLayout]:
    """The layout that was stored as JSON."""
    return {
        name: TensorLayout(dtype, tuple(shape), piece_bytes)
        for name, (dtype, shape, piece_bytes) in json.loads(text).items()
    }


def _checksum(session: str, tensor: str, number: int, data: bytes) -> bytes:
    """Hash of a piece and of its place, so that one cannot stand for another."""
    digest = hashlib.sha256(f"{session} {tensor} {number} ".encode())
    digest.update(data)
    return digest.digest()
