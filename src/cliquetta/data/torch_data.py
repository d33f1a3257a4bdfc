"""Images, and labels if there are any, of the user's own torch ``Dataset`` or ``DataLoader``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from cliquetta.data.dataset import UNKNOWN, Dataset
from cliquetta.data.inputs import (
    ChannelOrder,
    ImageLike,
    is_single,
    separate_images,
    to_picture,
)
from cliquetta.data.labels import LabelReader
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess

IMAGE_KEYS = ("image", "images", "pixel_values", "pixels", "img")
LABEL_KEYS = ("label", "labels", "target", "targets", "class")
# Of torchvision's datasets.
_LABEL_ATTRIBUTES = ("targets", "labels")


def is_torch_data(data: Any) -> bool:
    """Whether this is a torch dataset or a loader."""
    return isinstance(data, TorchDataset | DataLoader)


class TorchImages(Sequence[ImageLike]):
    """Images of a torch dataset or loader, in its order.

    An item is an image, ``(image, label)``, or a dict with one of :data:`IMAGE_KEYS`
    and, if known, :data:`LABEL_KEYS`. Images are PIL images, uint8 arrays, or pixels
    that were made by ``model.preprocess``. A map-style dataset is read while it is
    predicted, also that of a loader with torch's own ``collate_fn``, in the order of
    the loader's sampler; everything else is read first and kept in memory.

    Args:
        data: The dataset or loader.
        preprocess: The model's preprocessing.
        channel_order: Of arrays.

    """

    def __init__(
        self,
        data: "TorchDataset[Any] | DataLoader[Any]",
        preprocess: Preprocess,
        *,
        channel_order: ChannelOrder = "rgb",
    ) -> None:
        self.preprocess = preprocess
        self.channel_order = channel_order
        dataset: Any = data.dataset if isinstance(data, DataLoader) else data
        self._data = dataset
        self._items: list[tuple[ImageLike, Any]] | None = None
        self.id = f"torch:{type(dataset).__name__}"

        indices: Sequence[int] | None = None
        if isinstance(data, DataLoader):
            indices = _indices_of_loader(data)
        elif not isinstance(data, IterableDataset):
            indices = range(len(dataset))

        # Neither numbered nor listed by a sampler: read it now.
        if indices is None:
            self._items = list(self._read_all(data))
            indices = range(len(self._items))
        self.indices = indices
        """Number of every image in the dataset."""
        if not len(self.indices):
            raise UserError(f"{self.id} holds no images")

    def __len__(self) -> int:
        """Number of images."""
        return len(self.indices)

    @property
    def names(self) -> list[str]:
        """Numbers of the images in the dataset, as text; positions where one is repeated."""
        numbers = self.indices
        if len(set(numbers)) < len(numbers):
            numbers = range(len(numbers))
        return [str(number) for number in numbers]

    @overload
    def __getitem__(self, at: int) -> ImageLike: ...
    @overload
    def __getitem__(self, at: slice) -> list[ImageLike]: ...
    def __getitem__(self, at: int | slice) -> ImageLike | list[ImageLike]:
        """Read image ``at``, or several, from the dataset."""
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        image, _ = self._item(at)
        return image

    def labels(self) -> list[str | int]:
        """Return the labels of all images, ``""`` where there is none.

        They come from ``targets`` or ``labels`` of the dataset, else from its items,
        which are then read once more.
        """
        stated = self._stated_labels()
        if stated is not None:
            return [_plain_label(stated[index]) for index in self.indices]
        labels = []
        for number in range(len(self)):
            _, label = self._item(number)
            labels.append(_plain_label(label))
        return labels

    def _stated_labels(self) -> Any:
        """Return the labels that a dataset lists, ``None`` if it lists none."""
        if self._items is not None:
            return None
        for name in _LABEL_ATTRIBUTES:
            stated = getattr(self._data, name, None)
            if not isinstance(stated, Sequence | torch.Tensor):
                continue
            if len(stated) == len(self._data):
                return stated
        return None

    def _item(self, number: int) -> tuple[ImageLike, Any]:
        """Read an image and its label."""
        if self._items is not None:
            return self._items[number]
        item = self._data[self.indices[number]]
        image, label = split_item(item)
        return self._read(image), label

    def _read(self, image: Any) -> ImageLike:
        """Read the image of one item."""
        (picture,) = separate_images(
            [image], self.preprocess, channel_order=self.channel_order
        )
        return picture

    def _read_all(self, data: Any) -> Iterator[tuple[ImageLike, Any]]:
        """Read all items, or all that are in batches."""
        for item in data:
            images, labels = split_item(item)
            if is_single(images):
                yield self._read(images), labels
                continue

            # A batch of images.
            if labels is None:
                labels = [None] * len(images)
            for image, label in zip(images, labels, strict=True):
                yield self._read(image), label


def _indices_of_loader(loader: "DataLoader[Any]") -> list[int] | None:
    """Return the order in which a loader reads its dataset; ``None`` if it does more than that."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    if loader.collate_fn is not default_collate:
        return None
    return [int(index) for batch in loader.batch_sampler for index in batch]


def split_item(item: Any) -> tuple[Any, Any]:
    """Return image and label of an item, or images and labels of a batch; ``None``: no label."""
    if isinstance(item, Mapping):
        image_key = next((key for key in IMAGE_KEYS if key in item), None)
        if image_key is None:
            keys = ", ".join(map(str, item))
            raise UserError(
                f"an item with {keys} names no image: call it {' or '.join(IMAGE_KEYS[:3])}"
            )

        label_key = next((key for key in LABEL_KEYS if key in item), None)
        return item[image_key], None if label_key is None else item[label_key]

    if isinstance(item, list | tuple):
        if not item:
            raise UserError(
                "an item of the dataset is empty: give (image, label) pairs"
            )
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _plain_label(label: Any) -> str | int:
    """Return a label as a name or a number, empty where there is none."""
    if isinstance(label, torch.Tensor):
        label = label.item()
    if label is None or label == UNKNOWN:
        return ""
    return label if isinstance(label, str) else int(label)


class LabelledTorchImages(Dataset):
    """Torch dataset or loader as a dataset of this package, for streams and scores.

    Args:
        images: The images.
        names: The class list that labels name, or number from 0.

    Raises:
        UserError: A label is of no class.

    """

    def __init__(self, images: TorchImages, names: Sequence[str]) -> None:
        stated = [str(label) for label in images.labels()]
        reader = LabelReader(names, stated)
        numbers = {name: number for number, name in enumerate(names)}
        labels = []
        for label in stated:
            name = reader.read(label)
            if label and not name:
                raise UserError(
                    f"label {label!r} of {images.id} is of none of the {len(names)} classes: "
                    "labels are names of classes or their numbers from 0"
                )
            labels.append(numbers.get(name, UNKNOWN))
        super().__init__(images.id, names=names, keys=images.names, labels=labels)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Load image ``index`` in RGB."""
        _, picture = to_picture(self.images[index])
        return picture
