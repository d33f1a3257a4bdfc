"""Streams: seeded, resumable at any batch, patient with bad files."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cliquetta.data.corruptions import Shift, ShiftedDataset
from cliquetta.data.dataset import OUTSIDE, Dataset, FileDataset
from cliquetta.data.files import RelabelledDataset, folder_dataset
from cliquetta.data.stream import Stream
from cliquetta.data.views import image_views, to_pixels
from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import ViewSpec
from tests._helpers.streaming import made_up_dataset
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.trees import noise, pictures, write

PREPROCESS = Preprocess.openai(32)


def keys_of(stream: Stream, start: int = 0) -> list[str]:
    return [key for batch, _ in stream.batches(start) for key in batch.keys]


DATASETS: dict[str, Callable[[list[Path]], Dataset]] = {
    "arrays": lambda _: made_up_dataset(50),
    "larger arrays": lambda _: made_up_dataset(50, side=48),
    "shifted": lambda _: ShiftedDataset(made_up_dataset(50), Shift("contrast", 5)),
    "files": lambda paths: FileDataset(
        "files",
        paths[50:100],
        names=("a",),
        keys=[str(i) for i in range(50)],
        labels=[0] * 50,
    ),
}


@pytest.mark.parametrize("order", ["shuffled", "sequential", "correlated"])
@pytest.mark.parametrize("kind", DATASETS)
def test_every_image_comes_once_with_its_label_and_views(
    order: str, kind: str, paths: list[Path]
) -> None:
    dataset, spec = DATASETS[kind](paths), ViewSpec("resized-crop", 3)
    stream = Stream(
        dataset, PREPROCESS, 8, order=order, seed=4, views=spec, view_seed=2
    )
    batches = list(stream)
    assert [len(batch) for batch, _ in batches] == [8] * 6 + [2]
    assert sorted(keys_of(stream)) == sorted(dataset.keys)
    other = keys_of(Stream(dataset, PREPROCESS, 8, order=order, seed=5))
    assert (other == keys_of(stream)) == (order == "sequential")
    for batch, labels in batches:
        for row, key in enumerate(batch.keys):
            image = dataset.load(int(key))
            assert labels[row] == dataset.labels[int(key)]
            assert torch.equal(batch.images[row], PREPROCESS(image))
            views = to_pixels(image_views(image, key, spec, 2, PREPROCESS), PREPROCESS)
            assert torch.equal(batch.views[row], views)


def test_datasets_follow_one_another_or_are_mixed() -> None:
    a, b = made_up_dataset(20, id="a"), made_up_dataset(12, seed=1, id="b")
    assert Stream([a, b], PREPROCESS, limit=5).images == 10
    assert Stream(a, PREPROCESS, limit=500).images == 20
    sequence = Stream([a, b, a], PREPROCESS, batch_size=8)
    domains = [key.partition("/")[0] for key in keys_of(sequence)]
    assert (sequence.id, sequence.images, len(sequence)) == ("a>b>a", 52, 7)
    assert domains == ["a"] * 20 + ["b"] * 12 + ["a"] * 20
    mixed = Stream([a, b], PREPROCESS, order="mixed", batch_size=8)
    domains = [key.partition("/")[0] for key in keys_of(mixed)]
    assert mixed.id == "a+b" and domains.count("a") == 20
    assert "b" in domains[:16] and "b" in domains[16:]
    for batch, labels in mixed:
        for row, key in enumerate(batch.keys):
            name, _, index = key.partition("/")
            dataset = {"a": a, "b": b}[name]
            assert torch.equal(batch.images[row], PREPROCESS(dataset.load(int(index))))
            assert labels[row] == dataset.labels[int(index)]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_reported_once_and_leave_their_positions_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    pictures(tmp_path, [f"cat/{i}.png" for i in range(6)])
    write(tmp_path / "cat/2.png", "")
    write(tmp_path / "cat/4.png", "not an image")
    (tmp_path / "cat/5.png").write_bytes((tmp_path / "cat/0.png").read_bytes()[:45])
    settings: Any = {"order": "sequential", "views": ViewSpec("resized-crop", 5)}
    stream = Stream(
        folder_dataset(tmp_path), PREPROCESS, 2, workers=workers, **settings
    )
    with caplog.at_level(logging.WARNING):
        batches = list(stream) + list(stream)
    assert [len(batch) for batch, _ in batches] == [2, 1, 0, 2, 1, 0]
    batch, labels = batches[2]
    assert batch.images.shape == (0, 3, 32, 32) and labels.shape == (0,)
    assert batch.views.shape == (0, 5, 3, 32, 32)
    assert [s.key for s in stream.skipped] == ["cat/2.png", "cat/4.png", "cat/5.png"]
    assert "empty" in stream.skipped[0].reason
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "shufled"}, "'shuffled'"),
        ({"order": "mixed"}, "several"),
        ({"batch_size": 0}, "batch_size"),
        ({"limit": 0}, "limit"),
        ({"gamma": 0.0}, "gamma"),
        ({"present": (4, 3)}, "range"),
        ({"order": "uneven", "present": (1, 99)}, "99"),
        ({"length": 0}, "length"),
        ({"seed": -1}, "seeds"),
        ({"views": ViewSpec("augmixx")}, "'augmix'"),
        ({"workers": -1}, "workers"),
    ],
)
def test_impossible_streams_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(iter(Stream(made_up_dataset(), PREPROCESS, **changes)))


def test_a_stream_has_one_class_list_and_labels_if_they_are_needed() -> None:
    other = made_up_dataset(id="b")
    other.names = ("x", "y")
    with pytest.raises(ValueError, match="share"):
        Stream([made_up_dataset(), other], PREPROCESS)
    with pytest.raises(ValueError, match="labels"):
        Stream(made_up_dataset(labelled=False), PREPROCESS, order="correlated")
    with pytest.raises(ValueError, match="batches"):
        keys_of(Stream(made_up_dataset(50), PREPROCESS, batch_size=8), 9)


def test_a_long_stream_draws_its_noise_anew() -> None:
    clean = made_up_dataset(10)
    noisy = ShiftedDataset(clean, Shift("gaussian_noise", 3))
    stream = Stream(noisy, PREPROCESS, 5, order="long", length=25)
    batches = list(stream)
    keys = [key for batch, _ in batches for key in batch.keys]
    assert [len(batch) for batch, _ in batches] == [5] * 5
    assert sorted(key.partition("#")[0] for key in keys[:10]) == sorted(clean.keys)
    assert [key.partition("#")[2] for key in keys] == [""] * 10 + ["1"] * 10 + ["2"] * 5
    pixels = {
        key: image
        for b, _ in batches
        for key, image in zip(b.keys, b.images, strict=True)
    }
    again = ShiftedDataset(clean, Shift("gaussian_noise", 3), seed=1)
    assert torch.equal(pixels["0004#1"], PREPROCESS(again.load(4)))
    assert not torch.equal(pixels["0004#1"], pixels["0004"])
    own = [int(clean.labels[int(key[:4])]) for key in keys]
    assert torch.cat([labels for _, labels in batches]).tolist() == own
    assert stream.settings()["length"] == 25


def test_unknown_images_carry_a_label_of_their_own() -> None:
    dataset = made_up_dataset(40)
    inside = RelabelledDataset(dataset, dataset.names[:2], "inside")
    outside = RelabelledDataset(dataset, dataset.names[:2], "outside")
    stream = Stream(inside, PREPROCESS, 8, unknown=outside)
    seen: dict[str, int] = {}
    for batch, labels in stream:
        keys = (key.rpartition("/")[2] for key in batch.keys)
        seen |= dict(zip(keys, labels.tolist(), strict=True))
    own = dict(zip(dataset.keys, dataset.labels.tolist(), strict=True))
    assert {key for key, label in seen.items() if label >= 0} == set(inside.keys)
    assert all(
        label == (own[key] if own[key] < 2 else OUTSIDE) for key, label in seen.items()
    )
    assert stream.id == f"{dataset.id} with unknown {dataset.id}"
    assert stream.settings()["unknown"] == dataset.id
    assert [d["images"] for d in stream.settings()["datasets"]] == [
        len(inside),
        len(outside),
    ]
    with pytest.raises(UserError, match="keff"):
        Stream(inside, PREPROCESS, 8, order="keff", present=(1, 2), unknown=outside)
    with pytest.raises(UserError, match="outside"):
        RelabelledDataset(dataset, dataset.names, "outside")


class Watched(FileDataset):
    """Counts the files that were opened."""

    def __init__(self, paths: list[Path]) -> None:
        keys = [path.name for path in paths]
        super().__init__(
            "watched", paths, names=TINY_NAMES, keys=keys, labels=[0] * len(paths)
        )
        self.opened: list[int] = []

    def load(self, index: int) -> Image.Image:
        self.opened.append(index)
        return super().load(index)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """200 files; numbers 40 and 41 are no pictures."""
    folder = tmp_path_factory.mktemp("files")
    return noise(folder, [f"{i:03d}.png" for i in range(200)], [40, 41])


def settle(data: Watched) -> int:
    """Files opened once nobody opens more."""
    counts: list[int] = []
    while len(counts) < 4 or len(set(counts[-4:])) > 1:
        time.sleep(0.05)
        counts.append(len(data.opened))
    return counts[-1]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_next_batches_are_read_while_the_caller_is_busy(
    paths: list[Path], tiny_clip: CLIP, workers: int
) -> None:
    data = Watched(paths)
    batches = Stream(
        data, tiny_clip.preprocess, 16, order="sequential", workers=workers
    ).batches()
    next(batches)
    opened = settle(data)
    # the caller's batch, the one gathered next, and the chunks that wait behind it
    low, high = (3 * 16, (2 + workers + 4) * 16) if workers else (16, 16)
    assert low <= opened <= high
    next(batches)
    assert settle(data) == opened + 16
    batches.close()  # type: ignore[attr-defined]


def test_bad_files_count_when_their_batch_comes(
    paths: list[Path], tiny_clip: CLIP
) -> None:
    data = Watched(paths)
    stream = Stream(data, tiny_clip.preprocess, 16, order="sequential", workers=2)
    batches = stream.batches()
    for number, skipped in enumerate(([], [], ["040.png", "041.png"])):
        batch, labels = next(batches)
        settle(data)
        assert [entry.key for entry in stream.skipped] == skipped, number
        assert len(batch) == len(labels) == 16 - len(skipped)
    batches.close()  # type: ignore[attr-defined]


def test_any_positions_can_be_read(tiny_clip: CLIP) -> None:
    stream = Stream(made_up_dataset(), tiny_clip.preprocess, 8, seed=2)
    complete = torch.cat([batch.images for batch, _ in stream])
    parts = [range(40, 50), range(3, 4), range(10, 29)]
    for positions, (batch, labels) in zip(parts, stream.read(parts), strict=True):
        assert torch.equal(batch.images, complete[positions.start : positions.stop])
        assert torch.equal(labels, stream.labels(positions))
