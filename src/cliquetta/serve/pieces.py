"""The memory of a session in pieces, so that a batch writes what it changed and no more.

A tensor is cut into pieces of whole rows, or into blocks where a row is longer than a
piece may be. Pieces of zeros, which is most of a new memory, are not stored until
something is learned there.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from functools import cached_property
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
            raise DamagedError(
                "a piece of the session is damaged: its checksum differs"
            )


@dataclass(frozen=True)
class TensorLayout:
    """Type and shape of a tensor, and the bytes of its pieces but the last."""

    dtype: str
    shape: tuple[int, ...]
    piece_bytes: int

    @classmethod
    def of(cls, value: Tensor) -> "TensorLayout":
        """Choose the pieces of a tensor."""
        row = value.nbytes
        if value.ndim > 1:
            row = value.shape[-1] * value.element_size()
        piece_bytes = LONGEST_PIECE
        if 0 < row <= LONGEST_PIECE:
            rows = max(1, SHORTEST_ROWS // row)
            piece_bytes = row * rows
        dtype = str(value.dtype).removeprefix("torch.")
        return cls(dtype, tuple(value.shape), piece_bytes)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch has it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.torch_dtype.itemsize

    @property
    def count(self) -> int:
        """Number of its pieces."""
        return -(-self.nbytes // self.piece_bytes)

    def build(self, data: bytearray) -> Tensor:
        """The tensor with these bytes."""
        if not data:
            return torch.zeros(self.shape, dtype=self.torch_dtype)
        numbers = torch.frombuffer(data, dtype=self.torch_dtype)
        return numbers.reshape(self.shape)


@dataclass
class SavedMemory:
    """The memory of a session as the database has it.

    Tensors are held, not copied: methods replace the tensors of their memory and never
    write into them, so the old ones show what a batch has changed.
    """

    session: str
    layout: dict[str, TensorLayout] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    checksums: dict[str, list[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, session: str, memory: Tensors) -> tuple["SavedMemory", list[Piece]]:
        """A memory that is written completely, and its pieces: those that are not zero."""
        saved = cls(session)
        for name in memory:
            saved._add(name, TensorLayout.of(memory[name]), _zeros_like(memory[name]))
        return saved, saved.update(memory)

    @classmethod
    def read(
        cls, session: str, layout_text: str, pieces: Iterable[Piece]
    ) -> "SavedMemory":
        """Put stored pieces together, or raise :class:`DamagedError`."""
        saved = cls(session)
        buffers = {}
        for name, (dtype, shape, piece_bytes) in json.loads(layout_text).items():
            layout = TensorLayout(dtype, tuple(shape), piece_bytes)
            buffers[name] = bytearray(layout.nbytes)
            saved._add(name, layout, layout.build(buffers[name]))
        # the tensors are views of the buffers
        for piece in pieces:
            piece.check(session)
            saved.checksums[piece.tensor][piece.number] = piece.checksum
            first = piece.number * saved.layout[piece.tensor].piece_bytes
            last = first + len(piece.data)
            buffers[piece.tensor][first:last] = piece.data
        return saved

    def _add(self, name: str, layout: TensorLayout, value: Tensor) -> None:
        """Add a tensor of which nothing is stored."""
        self.layout[name] = layout
        self.tensors[name] = value
        self.checksums[name] = [_ABSENT] * layout.count

    def update(self, memory: Tensors) -> list[Piece]:
        """Take over a memory; returns the pieces that are others than before."""
        changed = []
        for name, layout in self.layout.items():
            before = self.tensors[name]
            now = memory[name]
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

    @cached_property
    def layout_text(self) -> str:
        """The layout, which does not change, as JSON."""
        rows = {name: astuple(layout) for name, layout in self.layout.items()}
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
        for name, layout in self.layout.items():
            absent = self.checksums[name].count(_ABSENT)
            stored = (layout.count - absent) * layout.piece_bytes
            total += min(stored, layout.nbytes)
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
    end = whole * width
    rows = bits[:end].reshape(whole, width)
    has_changed = differs[:end].reshape(whole, width).any(dim=1)
    # one transfer from a GPU, of what changed
    changed = has_changed.nonzero()[:, 0]
    contents = rows[changed].cpu().numpy()
    pieces = []
    for number, content in zip(changed.tolist(), contents, strict=True):
        pieces.append(Piece.of(session, name, number, content.tobytes()))
    if bool(differs[end:].any()):
        rest = bits[end:].cpu().numpy()
        pieces.append(Piece.of(session, name, whole, rest.tobytes()))
    return pieces


def _as_bits(value: Tensor) -> Tensor:
    """The tensor's numbers in one row, as integers of their size."""
    return value.detach().contiguous().reshape(-1).view(_BITS[value.element_size()])


def _zeros_like(value: Tensor) -> Tensor:
    """A tensor of zeros that takes the memory of one number."""
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


def _checksum(session: str, tensor: str, number: int, data: bytes) -> bytes:
    """Hash of a piece and of its place, so that one cannot stand for another."""
    digest = hashlib.sha256(f"{session} {tensor} {number} ".encode())
    digest.update(data)
    return digest.digest()
