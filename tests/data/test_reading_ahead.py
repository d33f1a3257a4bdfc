"""A stream reads ahead of its caller: far enough, not too far, and tells nothing too early."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from cliquetta.data.dataset import FileDataset
from cliquetta.data.stream import Stream
from cliquetta.model.clip import CLIP
from tests._helpers.streaming import made_up_dataset
from tests._helpers.tiny import TINY_NAMES


class Watched(FileDataset):
    """Counts the files that were opened."""

    def __init__(self, paths: list[Path]) -> None:
        keys = [path.name for path in paths]
        super().__init__("watched", paths, names=TINY_NAMES, keys=keys, labels=[0] * len(paths))
        self.opened: list[int] = []

    def load(self, index: int) -> Image.Image:
        self.opened.append(index)
        return super().load(index)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """200 files; numbers 40 and 41 are no pictures."""
    folder = tmp_path_factory.mktemp("files")
    result = [folder / f"{i:03d}.png" for i in range(200)]
    picture = Image.fromarray(made_up_dataset(1).images[0])
    for path in result:
        picture.save(path)
    for number in (40, 41):
        result[number].write_bytes(b"no picture")
    return result


def settle(data: Watched) -> int:
    """Files opened once nobody opens more."""
    counts: list[int] = []
    while len(counts) < 4 or len(set(counts[-4:])) > 1:
        time.sleep(0.05)
        counts.append(len(data.opened))
    return counts[-1]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_next_batches_are_read_while_the_caller_is_busy(
    paths: list[Path], tiny_clip: CLIP, workers: int
) -> None:
    data = Watched(paths)
    batches = Stream(data, tiny_clip.preprocess, 16, order="sequential", workers=workers).batches()
    next(batches)
    opened = settle(data)
    # the caller's batch, the one gathered next, and the chunks that wait behind it
    assert 3 * 16 <= opened <= (2 + workers + 4) * 16
    next(batches)
    assert settle(data) == opened + 16
    batches.close()  # type: ignore[attr-defined]


def test_nothing_is_read_ahead_without_workers(paths: list[Path], tiny_clip: CLIP) -> None:
    data = Watched(paths)
    batches = Stream(data, tiny_clip.preprocess, 16, order="sequential").batches()
    next(batches)
    assert len(data.opened) == 16


def test_bad_files_count_when_their_batch_is_handed_over(
    paths: list[Path], tiny_clip: CLIP, caplog: pytest.LogCaptureFixture
) -> None:
    data = Watched(paths)
    stream = Stream(data, tiny_clip.preprocess, 16, order="sequential", workers=2)
    batches = stream.batches()
    for number, skipped in enumerate(([], [], ["040.png", "041.png"])):
        batch, labels = next(batches)
        settle(data)
        assert [entry.key for entry in stream.skipped] == skipped, number
        assert len(batch) == len(labels) == 16 - len(skipped)
    assert sum(map(len, (batch for batch, _ in batches))) == 200 - 48
    assert len(stream.skipped) == 2
    list(stream.batches())  # the same two again, but only counted
    assert len(stream.skipped) == 2
    assert caplog.text.count("040.png") == 1


def test_any_places_can_be_read(tiny_clip: CLIP) -> None:
    stream = Stream(made_up_dataset(), tiny_clip.preprocess, 8, seed=2)
    complete = torch.cat([batch.images for batch, _ in stream])
    parts = [range(40, 50), range(3, 4), range(10, 29)]
    for positions, (batch, labels) in zip(parts, stream.read(parts), strict=True):
        assert torch.equal(batch.images, complete[positions.start : positions.stop])
        assert torch.equal(labels, stream.labels(positions))
