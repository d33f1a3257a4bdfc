"""Memories in pieces: what comes back is what was written, and no more is written than changed."""

import random

import pytest
import torch
from torch import Tensor

from cliquetta.data.bundled import load_bundled
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.serve.pieces import (
    LONGEST_PIECE,
    DamagedError,
    Piece,
    SavedMemory,
    TensorLayout,
)

SESSION = "a" * 32


def memory_of_many_kinds() -> dict[str, Tensor]:
    """Tensors of every shape that has borders: empty, one number, ragged ends, long rows."""
    generator = torch.Generator().manual_seed(0)
    return {
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(-2.5),
        "count": torch.tensor([7, 8, 9]),
        "mask": torch.tensor([True, False]),
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "rows": torch.randn(10, 512, generator=generator),
        "short rows": torch.randn(1001, 3, generator=generator),
        "long": torch.randn(50_001, generator=generator),
        "long rows": torch.randn(3, 20_000, generator=generator).double(),
        "nan": torch.tensor([float("nan"), -0.0, 0.0]),
        "zeros": torch.zeros(100_000),
        "view": torch.randn(8, 6, generator=generator).T,
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    bytes_of = [
        bytes(v.contiguous().reshape(-1).view(torch.uint8).numpy())
        for v in (one, other)
    ]
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and bytes_of[0] == bytes_of[1]
    )


def test_a_memory_comes_back_bit_by_bit() -> None:
    memory = memory_of_many_kinds()
    saved, pieces = SavedMemory.of(SESSION, memory)
    read = SavedMemory.read(SESSION, saved.layout_text, pieces)
    assert read.root == saved.root
    assert read.tensors.keys() == memory.keys()
    for name, value in memory.items():
        assert same_bits(read.tensors[name], value), name


def test_zeros_are_not_written_and_minus_zero_is() -> None:
    memory = {"zeros": torch.zeros(100_000), "minus": torch.full((100_000,), -0.0)}
    saved, pieces = SavedMemory.of(SESSION, memory)
    assert {piece.tensor for piece in pieces} == {"minus"}
    assert saved.stored_bytes == 400_000


def test_changes_are_found_whatever_changes() -> None:
    """Random changes, many times: the pieces written so far always give the present memory."""
    draw = random.Random(0)
    memory = memory_of_many_kinds()
    saved, pieces = SavedMemory.of(SESSION, memory)
    stored = {(piece.tensor, piece.number): piece for piece in pieces}
    for _ in range(40):
        for name in draw.sample(sorted(memory), 3):
            value = memory[name].clone().contiguous()
            if value.numel():
                flat = value.reshape(-1)
                flat[draw.randrange(len(flat))] = draw.choice([0, 1, 3])
            memory[name] = value.reshape(memory[name].shape)
        for piece in saved.update(memory):
            stored[piece.tensor, piece.number] = piece
        read = SavedMemory.read(SESSION, saved.layout_text, stored.values())
        assert read.root == saved.root
        assert all(same_bits(read.tensors[name], memory[name]) for name in memory)


def test_pieces_are_whole_rows_of_at_most_64_kib() -> None:
    cut = {
        name: TensorLayout.of(value) for name, value in memory_of_many_kinds().items()
    }
    assert LONGEST_PIECE == 65536
    assert cut["rows"].piece_bytes == 512 * 4  # one row
    assert cut["short rows"].piece_bytes == 1020  # 85 rows of 12 bytes
    assert cut["long"].count == 4 and cut["long"].piece_bytes == LONGEST_PIECE
    assert cut["long rows"].piece_bytes == LONGEST_PIECE
    assert cut["number"].count == 1 and cut["empty"].count == 0


@pytest.fixture(scope="module")
def micro() -> CLIP:
    return create_model("micro")


@pytest.mark.parametrize(
    "method",
    ["tent", "tda", "domain_norm", pytest.param("scap", marks=pytest.mark.slow)],
)
def test_a_batch_writes_little_more_than_it_changed(method: str, micro: CLIP) -> None:
    """At most 1.2 times the bytes of the numbers that differ."""
    images = load_bundled().images
    names = load_bundled().names
    adapter = create_method(method, micro, names)
    saved, _ = SavedMemory.of(SESSION, adapter.memory)
    written = changed = 0
    for first in range(0, 48, 8):
        before = {name: adapter.memory[name] for name in adapter.memory}
        adapter.predict(list(images[first : first + 8]))
        for name, old in before.items():
            new = adapter.memory[name]
            changed += int((new != old).sum()) * new.element_size()
        pieces = saved.update(adapter.memory)
        written += sum(len(piece.data) for piece in pieces)
    print(f"{method}: {written:,} bytes written, {changed:,} changed")
    assert 0 < written <= 1.2 * changed


def test_damage_is_noticed() -> None:
    memory = memory_of_many_kinds()
    saved, pieces = SavedMemory.of(SESSION, memory)
    draw = random.Random(1)
    for piece in draw.sample(pieces, 8):
        data = bytearray(piece.data)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        damaged = Piece(piece.tensor, piece.number, bytes(data), piece.checksum)
        with pytest.raises(DamagedError, match="checksum"):
            SavedMemory.read(SESSION, saved.layout_text, [damaged])
    # a piece of another session, of another place, or of another moment
    with pytest.raises(DamagedError):
        SavedMemory.read("b" * 32, saved.layout_text, pieces)
    first, second = (
        piece for piece in pieces if piece.tensor == "long rows" and piece.number < 2
    )
    moved = Piece(first.tensor, first.number, second.data, second.checksum)
    with pytest.raises(DamagedError):
        SavedMemory.read(SESSION, saved.layout_text, [moved])
    assert SavedMemory.read(SESSION, saved.layout_text, pieces[1:]).root != saved.root
