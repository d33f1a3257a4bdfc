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
        shape = tuple(self.images.shape)
        if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
            raise UserError(f"few-shot images are (n, 3, S, S), got {shape}")
        if not (self.images.dtype == torch.uint8 or self.images.is_floating_point()):
            raise UserError(
                f"few-shot images are uint8 or float, got {self.images.dtype}"
            )
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
        """Images of the class that has most."""
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
        """``shots`` images of every class, drawn by ``seed``, as the model sees them, in 8 bits."""
        few_shot = cls(*_read(dataset, choose_shots(dataset, shots, seed), preprocess))
        if validation is None:
            return few_shot
        if validation.names != dataset.names:
            raise UserError(
                f"{validation.id} and {dataset.id} do not share one class list"
            )
        split = cls(*_read(validation, _labelled(validation), preprocess))
        return replace(few_shot, validation=split)

    def pixels(self, rows: Rows, model: CLIP) -> Tensor:
        """Preprocessed images ``rows``, on the model's device."""
        images = self.images[torch.from_numpy(rows)].to(model.device)
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
        """``count`` random resized crops, mirrored half the time: (n, count, 3, S, S)."""
        images = self.images[torch.from_numpy(rows)].to(model.device)
        n, _, S, _ = images.shape
        drawn = resized_crop_boxes(S, S, n * count, generator, scale=scale)
        columns = (drawn.top, drawn.left, drawn.rows, drawn.columns, drawn.mirrored)
        parts = zip(*(column.reshape(n, count) for column in columns), strict=True)
        boxes = [Boxes(drawn.height, drawn.width, *part) for part in parts]
        if images.dtype != torch.uint8:
            return crop_tensors(images, boxes, S)
        crops = crop_tensors(images, boxes, S, eight_bit=True).to(torch.uint8)
        pixels = model.preprocess.pixels(crops.flatten(0, 1).permute(0, 2, 3, 1))
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
    """Raw features (n, count, E) of ``count`` random crops of each image."""
    parts = []
    step = max(1, VIEWS_AT_ONCE // count)
    for rows in np.array_split(
        np.arange(len(few_shot)), math.ceil(len(few_shot) / step)
    ):
        crops = few_shot.crops(rows, model, generator, scale=scale, count=count)
        parts.append(model.encode_image(crops.flatten(0, 1)).view(len(rows), count, -1))
    return torch.cat(parts)


def choose_shots(dataset: Dataset, shots: int, seed: int) -> Rows:
    """Indices of ``shots`` images of every class, drawn at random, in the dataset's order."""
    if shots < 1:
        raise UserError(f"shots is at least 1, got {shots}")
    rows = _labelled(dataset)
    order = np.random.default_rng([seed, 0x5407]).permutation(rows)
    labels = _labels(dataset)[order]
    chosen = []
    for label, name in enumerate(dataset.names):
        own = order[labels == label]
        if len(own) < shots:
            raise UserError(
                f"{dataset.id} has {len(own)} images of {name!r}, {shots} were asked for: lower "
                "the number of shots"
            )
        chosen.append(own[:shots])
    return np.sort(np.concatenate(chosen))


def _labels(dataset: Dataset) -> Rows:
    if dataset.labels is None:
        raise UserError(
            f"{dataset.id} has no labels, which few-shot methods learn from"
        )
    labels: Rows = dataset.labels.numpy()
    return labels


def _labelled(dataset: Dataset) -> Rows:
    return np.flatnonzero(_labels(dataset) >= 0).astype(np.int64)


def _read(
    dataset: Dataset, rows: Rows, preprocess: Preprocess
) -> tuple[Tensor, Tensor]:
    """Pictures (n, 3, S, S) uint8 and their labels."""
    pictures = dataset.arrays(rows.tolist())
    if pictures is None or pictures.shape[1:3] != (preprocess.size, preprocess.size):
        read = (preprocess.picture(dataset.load(row)) for row in rows.tolist())
        pictures = np.stack([np.asarray(picture) for picture in read])
    images = torch.from_numpy(np.array(pictures)).permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(_labels(dataset)[rows])
