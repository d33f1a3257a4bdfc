"""A few labelled images, and random crops of them: what few-shot methods learn from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cliquetta.data.crops import Boxes, crop_tensors, resized_crop_boxes
from cliquetta.data.dataset import Dataset
from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess

Rows = npt.NDArray[np.int64]
VIEWS_AT_ONCE = 512  # Images that are encoded together: bounds memory.


@dataclass(frozen=True, eq=False)
class FewShot:
    """Labelled images of the model's input size.

    ``images`` (n, 3, S, S) are pictures (uint8) or preprocessed pixels (float);
    ``labels`` (n,) index the class names; ``validation`` is a split for methods that
    choose numbers by accuracy.
    """

    images: Tensor
    labels: Tensor
    validation: FewShot | None = None

    def __post_init__(self) -> None:
        # Images: square, with three channels, as pictures or as pixels.
        shape = tuple(self.images.shape)
        if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
            raise UserError(f"few-shot images are (n, 3, S, S), got {shape}")
        if not (self.images.dtype == torch.uint8 or self.images.is_floating_point()):
            raise UserError(
                f"few-shot images are uint8 or float, got {self.images.dtype}"
            )

        # One label for each, and none missing.
        if self.labels.shape != shape[:1] or self.labels.dtype != torch.int64:
            raise UserError(
                f"{shape[0]} few-shot images need {shape[0]} labels (int64), got "
                f"{tuple(self.labels.shape)} {self.labels.dtype}"
            )
        if shape[0] == 0:
            raise UserError("no few-shot images: give at least one")
        if int(self.labels.min()) < 0:
            raise UserError(
                "few-shot images must all have a label, some have none (-1)"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shots(self) -> int:
        """Number of images of the class that has most."""
        return int(self.labels.bincount().max())

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset,
        shots: int,
        preprocess: Preprocess,
        seed: int = 0,
        *,
        validation: Dataset | None = None,
    ) -> FewShot:
        """Draw ``shots`` images of every class, as the model sees them, in 8 bits.

        Args:
            dataset: Labelled images.
            shots: Images per class.
            preprocess: That of the model.
            seed: Decides which images.
            validation: A split with the same classes, taken whole.

        Returns:
            The examples.

        Raises:
            UserError: A class has fewer images, or the two have other classes.

        """
        rows = choose_shots(dataset, shots, seed)
        images, labels = _read(dataset, rows, preprocess)
        few_shot = cls(images, labels)
        if validation is None:
            return few_shot
        if validation.names != dataset.names:
            raise UserError(
                f"{validation.id} and {dataset.id} do not share one class list"
            )
        images, labels = _read(validation, _labelled(validation), preprocess)
        return replace(few_shot, validation=cls(images, labels))

    def pixels(self, rows: Rows, model: CLIP) -> Tensor:
        """Preprocess the images ``rows``, on the model's device."""
        images = self.images[torch.from_numpy(rows)]
        images = images.to(model.device)
        if images.dtype == torch.uint8:
            return model.preprocess.pixels(images.permute(0, 2, 3, 1))
        return images

    def crops(
        self,
        rows: Rows,
        model: CLIP,
        generator: np.random.Generator,
        *,
        scale: tuple[float, float],
        count: int = 1,
    ) -> Tensor:
        """Draw random crops, half of them mirrored: (n, count, 3, S, S)."""
        images = self.images[torch.from_numpy(rows)]
        images = images.to(model.device)
        n, _, S, _ = images.shape

        # One draw for all, then the boxes of each image.
        drawn = resized_crop_boxes(S, S, n * count, generator, scale=scale)
        boxes = []
        for first in range(0, n * count, count):
            of_image = slice(first, first + count)
            own_boxes = Boxes(
                drawn.height,
                drawn.width,
                top=drawn.top[of_image],
                left=drawn.left[of_image],
                rows=drawn.rows[of_image],
                columns=drawn.columns[of_image],
                mirrored=drawn.mirrored[of_image],
            )
            boxes.append(own_boxes)

        if images.dtype != torch.uint8:
            return crop_tensors(images, boxes, S)

        # Pictures are rounded to 8 bits, as their files are, before they are normalised.
        crops = crop_tensors(images, boxes, S, eight_bit=True).to(torch.uint8)
        pictures = crops.flatten(0, 1).permute(0, 2, 3, 1)
        pixels = model.preprocess.pixels(pictures)
        return pixels.view(n, count, 3, S, S)


@torch.no_grad()
def crop_features(
    model: CLIP,
    few_shot: FewShot,
    generator: np.random.Generator,
    *,
    scale: tuple[float, float],
    count: int,
) -> Tensor:
    """Encode ``count`` random crops of each image: raw features (n, count, E)."""
    images = len(few_shot)
    at_once = max(1, VIEWS_AT_ONCE // count)
    groups = np.array_split(np.arange(images), math.ceil(images / at_once))

    parts = []
    for rows in groups:
        crops = few_shot.crops(rows, model, generator, scale=scale, count=count)
        # The tower takes all crops of a group as one batch.
        flat = crops.flatten(0, 1)
        features = model.encode_image(flat)
        parts.append(features.view(len(rows), count, -1))
    return torch.cat(parts)


def choose_shots(dataset: Dataset, shots: int, seed: int) -> Rows:
    """Draw ``shots`` images of every class: indices in the dataset's order."""
    if shots < 1:
        raise UserError(f"shots is at least 1, got {shots}")
    rows = _labelled(dataset)
    order = np.random.default_rng([seed, 0x5407]).permutation(rows)
    labels = _labels(dataset)[order]
    chosen = []
    for label, name in enumerate(dataset.names):
        of_class = order[labels == label]
        if len(of_class) < shots:
            raise UserError(
                f"{dataset.id} has {len(of_class)} images of {name!r}, {shots} were "
                "asked for: lower the number of shots"
            )
        chosen.append(of_class[:shots])
    return np.sort(np.concatenate(chosen))


def _labels(dataset: Dataset) -> Rows:
    """Return all labels; a dataset without any is refused."""
    if dataset.labels is None:
        raise UserError(
            f"{dataset.id} has no labels, which few-shot methods learn from"
        )
    labels: Rows = dataset.labels.numpy()
    return labels


def _labelled(dataset: Dataset) -> Rows:
    """Find the images that have a label."""
    return np.flatnonzero(_labels(dataset) >= 0).astype(np.int64)


def _read(
    dataset: Dataset, rows: Rows, preprocess: Preprocess
) -> tuple[Tensor, Tensor]:
    """Read pictures (n, 3, S, S) uint8 and their labels."""
    size = (preprocess.size, preprocess.size)

    # Datasets that hold arrays of the right size need no decoding.
    pictures = dataset.arrays(rows.tolist())
    if pictures is None or pictures.shape[1:3] != size:
        resized = [
            np.asarray(preprocess.picture(dataset.load(row))) for row in rows.tolist()
        ]
        pictures = np.stack(resized)

    # (n, S, S, 3) to (n, 3, S, S).
    images = torch.from_numpy(np.array(pictures))
    images = images.permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(_labels(dataset)[rows])
    return images, labels
