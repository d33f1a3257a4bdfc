"""The user's own torch datasets and loaders: predicted, scored, or refused in one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import cliquetta
from cliquetta.data.torch_data import TorchImages, split_item
from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from tests._helpers.streaming import made_up_dataset
from tests._helpers.tiny_world import TINY
from tests._helpers.trees import random_pixels

NAMES = ("airplane", "cat", "frog")
PIXELS = random_pixels(10, 40, 48, 3)
LABELS = [number % 3 for number in range(10)]
PICTURES = [Image.fromarray(pixels) for pixels in PIXELS]


class Photos(TorchDataset[Any]):
    """As users write them: ``(image, label)``, transformed if there is a transform."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(PICTURES)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.read.append(index)
        image: Any = PICTURES[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, LABELS[index]


class Streamed(IterableDataset[Any]):
    """One that can only be iterated, of dicts as Hugging Face has them."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for picture, label in zip(PICTURES, LABELS, strict=True):
            yield {"image": picture, "label": NAMES[label]}


def pictures_and_labels(items: list[tuple[Any, int]]) -> tuple[list[Any], list[int]]:
    """A collate function that keeps PIL images."""
    return [image for image, _ in items], [label for _, label in items]


WAYS: dict[str, Any] = {
    "dataset of pictures": lambda: Photos(),
    "dataset of arrays": lambda: Photos(np.asarray),
    "dataset of pixels": lambda: Photos(TINY.preprocess),
    "tensors": lambda: TensorDataset(
        torch.stack([TINY.preprocess(picture) for picture in PICTURES]),
        torch.tensor(LABELS),
    ),
    "loader": lambda: DataLoader(Photos(TINY.preprocess), batch_size=3),
    "loader without batches": lambda: DataLoader(
        Photos(TINY.preprocess), batch_size=None
    ),
    "loader with its own collate": lambda: DataLoader(
        Photos(), batch_size=3, collate_fn=pictures_and_labels
    ),
    "stream": lambda: Streamed(),
    "loader of a stream": lambda: DataLoader(Streamed(), batch_size=None),
}


@pytest.mark.parametrize("way", WAYS)
def test_predictions_are_those_of_the_images(way: str) -> None:
    of_pictures = cliquetta.predict(
        PICTURES,
        NAMES,
        model=TINY,
        method="tda",
        batch_size=4,
    )
    run = cliquetta.predict(
        WAYS[way](),
        NAMES,
        model=TINY,
        method="tda",
        batch_size=4,
        labels="label",
    )
    assert [row["path"] for row in run.rows] == [str(number) for number in range(10)]
    assert [row["label"] for row in run.rows] == [NAMES[label] for label in LABELS]
    for row, expected in zip(run.rows, of_pictures.rows, strict=True):
        assert row["prediction"] == expected["prediction"]
        assert row["probability"] == pytest.approx(expected["probability"], abs=1e-6)

    right = sum(row["prediction"] == row["label"] for row in run.rows)
    accuracy = 100 * right / 10
    assert run.scores["tda"].accuracy == pytest.approx(accuracy)


def test_a_loader_is_read_in_its_own_order() -> None:
    # a random sampler, whose order is known by its seed
    torch.manual_seed(3)
    order = list(torch.utils.data.RandomSampler(range(10)))
    torch.manual_seed(3)
    loader = DataLoader(Photos(), sampler=order)

    images = TorchImages(loader, TINY.preprocess)
    assert images.indices == order
    assert images.names == [str(index) for index in order]
    assert images.labels() == [LABELS[index] for index in order]


def test_images_are_read_when_they_are_predicted() -> None:
    photos = Photos()
    images = TorchImages(photos, TINY.preprocess)
    assert len(images) == 10
    assert photos.read == []

    _, last = images[2:4]
    assert np.array_equal(np.asarray(last), PIXELS[3])
    assert photos.read == [2, 3]


def test_targets_are_the_labels_without_a_read() -> None:
    photos = Photos()
    photos.targets = LABELS  # type: ignore[attr-defined]
    assert TorchImages(photos, TINY.preprocess).labels() == LABELS
    assert photos.read == []


@pytest.mark.parametrize("way", ["dataset of pictures", "dataset of pixels", "loader"])
def test_a_method_is_evaluated_on_it(way: str, tmp_path: Path) -> None:
    method = create_method("zero_shot", TINY, NAMES)
    best = method.predict(PICTURES).logits.argmax(dim=1).tolist()
    right = sum(a == b for a, b in zip(best, LABELS, strict=True))
    accuracy = 100 * right / 10

    record = cliquetta.evaluate(method, WAYS[way](), out=tmp_path)
    assert record.metrics["top1"] == pytest.approx(accuracy)
    # a loader has a size of batches of its own
    batch_size = 3 if way == "loader" else 64
    assert record.settings["stream"]["batch_size"] == batch_size

    again = cliquetta.evaluate(method, WAYS[way](), out=tmp_path)
    assert again.finished == record.finished  # the same run


def test_a_dataset_of_ours_is_evaluated_too() -> None:
    dataset = made_up_dataset(12)
    method = create_method("zero_shot", TINY, dataset.names)
    record = cliquetta.evaluate(method, dataset)
    assert record.metrics["labelled"] == 12


def to_tensor(picture: Image.Image) -> torch.Tensor:
    """As torchvision's ToTensor after a resize to the model's size."""
    array = np.array(picture.resize((32, 32)))
    return torch.from_numpy(array).permute(2, 0, 1) / 255


class Broken(Photos):
    """Labels that are of no class."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__(index)[0], 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: cliquetta.predict(
                list(zip(PICTURES, LABELS, strict=True)), method=m
            ),
            "pairs",
        ),
        (lambda m: cliquetta.predict([torch.zeros(3, 9, 9)], method=m), r"\(3, 9, 9\)"),
        (
            lambda m: cliquetta.predict([[torch.zeros(8, 3, 9, 9), 1]], method=m),
            "a list of 2",
        ),
        (lambda m: cliquetta.predict(Photos(to_tensor), method=m), "ToTensor"),
        (lambda m: cliquetta.evaluate(m, DataLoader(Photos(to_tensor))), "ToTensor"),
        (
            lambda m: m.predict(torch.stack([to_tensor(p) for p in PICTURES])),
            "ToTensor",
        ),
        (
            lambda m: cliquetta.predict(Photos(), method=m, labels="kind"),
            "labels='label'",
        ),
        (
            lambda m: cliquetta.predict(Photos(), method=m, order="shuffled"),
            "as they come",
        ),
        (lambda m: cliquetta.evaluate(m, cast(Any, PICTURES)), "got list"),
        (lambda m: cliquetta.evaluate(cast(Any, "tda"), Photos()), "create_method"),
        (lambda m: cliquetta.evaluate(m, Broken()), "'9' of torch:Broken"),
    ],
    ids=[
        "pairs",
        "pixels of another size",
        "pairs in lists",
        "pixels from 0 to 1",
        "pixels from 0 to 1 of a loader",
        "pixels from 0 to 1 as a tensor",
        "labels of no name",
        "another order",
        "a list to evaluate on",
        "a method by its name",
        "labels of no class",
    ],
)
def test_anything_else_is_refused_in_one_line(call: Any, message: str) -> None:
    method = create_method("tda", TINY, NAMES)
    with pytest.raises(UserError, match=message) as error:
        call(method)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 300


def test_items_without_an_image_are_named() -> None:
    assert split_item({"pixel_values": 1, "labels": 2}) == (1, 2)
    assert split_item([1]) == (1, None)
    with pytest.raises(UserError, match="an item with text, label names no image"):
        split_item({"text": 1, "label": 2})
