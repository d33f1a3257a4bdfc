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
_LABEL_ATTRIBUTES = ("targets", "labels")  # of torchvision's datasets


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
        data_behind: Any = data.dataset if isinstance(data, DataLoader) else data
        self._data = data_behind
        self._kept: list[tuple[ImageLike, Any]] | None = None
        self.id = f"torch:{type(self._data).__name__}"
        indices: Sequence[int] | None = None
        if isinstance(data, DataLoader):
            indices = _indices_of_loader(data)
        elif not isinstance(data, IterableDataset):
            indices = range(len(self._data))
        if indices is None:
            self._kept = list(self._read_all(data))
            indices = range(len(self._kept))
        self.indices = indices
        """Number of every image in the dataset."""
        if not len(self.indices):
            raise UserError(f"{self.id} holds no images")

    def __len__(self) -> int:
        """Number of images."""
        return len(self.indices)

    @property
    def names(self) -> list[str]:
        """The number of every image in the dataset, as text; a position where one is repeated."""
        unique = len(set(self.indices)) == len(self.indices)
        return [str(n) for n in (self.indices if unique else range(len(self.indices)))]

    @overload
    def __getitem__(self, at: int) -> ImageLike: ...
    @overload
    def __getitem__(self, at: slice) -> list[ImageLike]: ...
    def __getitem__(self, at: int | slice) -> ImageLike | list[ImageLike]:
        """Image ``at``, or several, read from the dataset."""
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        image, _ = self._item(at)
        return image

    def labels(self) -> list[str | int]:
        """Labels of all images, ``""`` where there is none.

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
        if self._kept is not None:
            return None
        for name in _LABEL_ATTRIBUTES:
            stated = getattr(self._data, name, None)
            if isinstance(stated, Sequence | torch.Tensor) and len(stated) == len(
                self._data
            ):
                return stated
        return None

    def _item(self, number: int) -> tuple[ImageLike, Any]:
        if self._kept is not None:
            return self._kept[number]
        image, label = split_item(self._data[self.indices[number]])
        return self._read(image), label

    def _read(self, image: Any) -> ImageLike:
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
            if labels is None:
                labels = [None] * len(images)
            for image, label in zip(images, labels, strict=True):
                yield self._read(image), label


def _indices_of_loader(loader: "DataLoader[Any]") -> list[int] | None:
    """Return the order in which a loader reads its dataset; ``None`` if it does more than that."""
    if (
        isinstance(loader.dataset, IterableDataset)
        or loader.collate_fn is not default_collate
    ):
        return None
    if loader.batch_sampler is None:
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
    if isinstance(label, torch.Tensor):
        label = label.item()
    if label is None or label == UNKNOWN:
        return ""
    return label if isinstance(label, str) else int(label)


class LabelledTorchImages(Dataset):
    """A torch dataset or loader as a dataset of this package, for streams and scores.

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
        """Image ``index`` in RGB."""
        return to_picture(self.images[index])[1]
