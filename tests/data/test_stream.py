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
    dataset = DATASETS[kind](paths)
    spec = ViewSpec("resized-crop", 3)
    stream = Stream(
        dataset,
        PREPROCESS,
        8,
        order=order,
        seed=4,
        views=spec,
        view_seed=2,
    )
    batches = list(stream)
    assert [len(batch) for batch, _ in batches] == [8] * 6 + [2]
    assert sorted(keys_of(stream)) == sorted(dataset.keys)

    for batch, labels in batches:
        for row, key in enumerate(batch.keys):
            number = int(key)
            image = dataset.load(number)
            assert labels[row] == dataset.labels[number]
            assert torch.equal(batch.images[row], PREPROCESS(image))
            views = image_views(image, key, spec, 2, PREPROCESS)
            assert torch.equal(batch.views[row], to_pixels(views, PREPROCESS))


@pytest.mark.parametrize("order", ["shuffled", "sequential", "correlated"])
@pytest.mark.parametrize("kind", DATASETS)
def test_the_seed_decides_the_order_unless_it_is_sequential(
    order: str, kind: str, paths: list[Path]
) -> None:
    dataset = DATASETS[kind](paths)
    four = keys_of(Stream(dataset, PREPROCESS, 8, order=order, seed=4))
    five = keys_of(Stream(dataset, PREPROCESS, 8, order=order, seed=5))
    assert (four == five) == (order == "sequential")


def domains_of(stream: Stream) -> list[str]:
    """The dataset of every image, by its id."""
    return [key.partition("/")[0] for key in keys_of(stream)]


def test_datasets_follow_one_another() -> None:
    a = made_up_dataset(20, id="a")
    b = made_up_dataset(12, seed=1, id="b")
    stream = Stream([a, b, a], PREPROCESS, batch_size=8)
    assert stream.id == "a>b>a"
    assert stream.images == 52
    assert len(stream) == 7
    assert domains_of(stream) == ["a"] * 20 + ["b"] * 12 + ["a"] * 20


def test_a_limit_is_one_of_every_dataset() -> None:
    a = made_up_dataset(20, id="a")
    b = made_up_dataset(12, seed=1, id="b")
    assert Stream([a, b], PREPROCESS, limit=5).images == 10
    assert Stream(a, PREPROCESS, limit=500).images == 20


def test_mixed_datasets_keep_their_images_and_labels() -> None:
    a = made_up_dataset(20, id="a")
    b = made_up_dataset(12, seed=1, id="b")
    stream = Stream([a, b], PREPROCESS, order="mixed", batch_size=8)
    domains = domains_of(stream)
    assert stream.id == "a+b"
    assert domains.count("a") == 20
    assert "b" in domains[:16]
    assert "b" in domains[16:]

    for batch, labels in stream:
        for row, key in enumerate(batch.keys):
            name, _, index = key.partition("/")
            dataset = {"a": a, "b": b}[name]
            image = dataset.load(int(index))
            assert torch.equal(batch.images[row], PREPROCESS(image))
            assert labels[row] == dataset.labels[int(index)]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_reported_once_and_leave_their_positions_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    # six files: an empty one, one that is no picture, and one that is cut off
    pictures(tmp_path, [f"cat/{i}.png" for i in range(6)])
    write(tmp_path / "cat/2.png", "")
    write(tmp_path / "cat/4.png", "not an image")
    whole = (tmp_path / "cat/0.png").read_bytes()
    (tmp_path / "cat/5.png").write_bytes(whole[:45])
    stream = Stream(
        folder_dataset(tmp_path),
        PREPROCESS,
        2,
        order="sequential",
        workers=workers,
        views=ViewSpec("resized-crop", 5),
    )
    with caplog.at_level(logging.WARNING):
        batches = list(stream) + list(stream)
    assert [len(batch) for batch, _ in batches] == [2, 1, 0, 2, 1, 0]

    batch, labels = batches[2]
    assert batch.images.shape == (0, 3, 32, 32)
    assert batch.views.shape == (0, 5, 3, 32, 32)
    assert labels.shape == (0,)
    skipped = [entry.key for entry in stream.skipped]
    assert skipped == ["cat/2.png", "cat/4.png", "cat/5.png"]
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
    pixels: dict[str, torch.Tensor] = {}
    for batch, _ in stream:
        pixels |= dict(zip(batch.keys, batch.images, strict=True))
    # "0004#1" is image 4 when it comes for the second time
    again = ShiftedDataset(clean, Shift("gaussian_noise", 3), seed=1)
    assert torch.equal(pixels["0004#1"], PREPROCESS(again.load(4)))
    assert not torch.equal(pixels["0004#1"], pixels["0004"])


def test_a_long_stream_numbers_its_rounds_and_keeps_labels() -> None:
    data = made_up_dataset(10)
    stream = Stream(data, PREPROCESS, 5, order="long", length=25)
    assert stream.settings()["length"] == 25
    batches = list(stream)
    assert [len(batch) for batch, _ in batches] == [5] * 5

    # "0004#1" is image 4 in the second round
    keys = [key for batch, _ in batches for key in batch.keys]
    images = [key.partition("#")[0] for key in keys]
    rounds = [key.partition("#")[2] for key in keys]
    assert sorted(images[:10]) == sorted(data.keys)
    assert rounds == [""] * 10 + ["1"] * 10 + ["2"] * 5

    # labels are those of the images
    labels = torch.cat([labels for _, labels in batches])
    assert labels.tolist() == [data.labels[int(image)] for image in images]


@pytest.fixture
def inside_and_outside() -> tuple[RelabelledDataset, RelabelledDataset]:
    """Images of the first two classes of a dataset, and all the others."""
    dataset = made_up_dataset(40)
    two = dataset.names[:2]
    inside = RelabelledDataset(dataset, two, "inside")
    return inside, RelabelledDataset(dataset, two, "outside")


def test_unknown_images_carry_a_label_of_their_own(inside_and_outside: Any) -> None:
    inside, outside = inside_and_outside
    seen: dict[str, int] = {}
    for batch, labels in Stream(inside, PREPROCESS, 8, unknown=outside):
        keys = [key.rpartition("/")[2] for key in batch.keys]
        seen |= dict(zip(keys, labels.tolist(), strict=True))
    assert {key for key, label in seen.items() if label >= 0} == set(inside.keys)

    dataset = made_up_dataset(40)
    own = dict(zip(dataset.keys, dataset.labels.tolist(), strict=True))
    for key, label in seen.items():
        assert label == (own[key] if own[key] < 2 else OUTSIDE)


def test_a_stream_with_unknown_images_says_so(inside_and_outside: Any) -> None:
    inside, outside = inside_and_outside
    stream = Stream(inside, PREPROCESS, 8, unknown=outside)
    name = made_up_dataset(40).id
    assert stream.id == f"{name} with unknown {name}"
    settings = stream.settings()
    assert settings["unknown"] == name
    images = [entry["images"] for entry in settings["datasets"]]
    assert images == [len(inside), len(outside)]


def test_unknown_images_where_there_can_be_none_are_refused(
    inside_and_outside: Any,
) -> None:
    inside, outside = inside_and_outside
    with pytest.raises(UserError, match="keff"):
        Stream(inside, PREPROCESS, 8, order="keff", present=(1, 2), unknown=outside)
    dataset = made_up_dataset(40)
    with pytest.raises(UserError, match="outside"):
        RelabelledDataset(dataset, dataset.names, "outside")


class Watched(FileDataset):
    """Counts the files that were opened."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(
            "watched",
            paths,
            names=TINY_NAMES,
            keys=[path.name for path in paths],
            labels=[0] * len(paths),
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
    unchanged = 0
    opened = -1
    while unchanged < 3:
        time.sleep(0.05)
        now = len(data.opened)
        unchanged = unchanged + 1 if now == opened else 0
        opened = now
    return opened


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_next_batches_are_read_while_the_caller_is_busy(
    paths: list[Path], tiny_clip: CLIP, workers: int
) -> None:
    size = 16
    data = Watched(paths)
    stream = Stream(
        data,
        tiny_clip.preprocess,
        size,
        order="sequential",
        workers=workers,
    )
    batches = stream.batches()
    next(batches)
    opened = settle(data)
    if workers:
        # the caller's batch, the one gathered next, and the chunks that wait behind it
        assert 3 * size <= opened <= (2 + workers + 4) * size
    else:
        assert opened == size

    next(batches)
    assert settle(data) == opened + size
    batches.close()  # type: ignore[attr-defined]


def test_bad_files_count_when_their_batch_comes(
    paths: list[Path], tiny_clip: CLIP
) -> None:
    data = Watched(paths)
    stream = Stream(
        data,
        tiny_clip.preprocess,
        16,
        order="sequential",
        workers=2,
    )
    batches = stream.batches()
    # files 40 and 41 are in the third batch, which is read ahead
    for number, bad in enumerate(([], [], ["040.png", "041.png"])):
        batch, labels = next(batches)
        settle(data)
        assert [entry.key for entry in stream.skipped] == bad, number
        assert len(batch) == 16 - len(bad)
        assert len(labels) == len(batch)
    batches.close()  # type: ignore[attr-defined]


def test_any_positions_can_be_read(tiny_clip: CLIP) -> None:
    stream = Stream(made_up_dataset(), tiny_clip.preprocess, 8, seed=2)
    complete = torch.cat([batch.images for batch, _ in stream])
    parts = [range(40, 50), range(3, 4), range(10, 29)]
    read = stream.read(parts)
    for positions, (batch, labels) in zip(parts, read, strict=True):
        expected = complete[list(positions)]
        assert torch.equal(batch.images, expected)
        assert torch.equal(labels, stream.labels(positions))
