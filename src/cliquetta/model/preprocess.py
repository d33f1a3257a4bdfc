"""From a picture to the pixels a CLIP was trained on, as a value that a run record can hold."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from cliquetta.errors import UnknownNameError, UserError

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)

_FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}
# Beyond this ratio of sides the picture is resized around its crop only: a 1 x 20,000
# image would otherwise need gigabytes on the way to 224 x 224.
LONGEST = 32
# Sides of twice as many times the size of a squashed picture are averaged first:
# Pillow's filters need memory in proportion to the longer side, and fail beyond some
# ten millions.
_REDUCED = 512


def resize_part(
    image: Image.Image,
    size: int,
    resample: Image.Resampling,
    box: tuple[float, float, float, float],
) -> Image.Image:
    """Resize a small part (``box``) of a very large picture, as ``image.resize`` would.

    Pillow's boxes are float32, too coarse beyond 16 million pixels: the part is cut out
    first, with the margin of the filter.
    """
    x0, y0, x1, y1 = box

    # The margins of the filter.
    across = math.ceil(3 * max(1, (x1 - x0) / size))
    down = math.ceil(3 * max(1, (y1 - y0) / size))

    # The box with its margins, in whole pixels.
    left = max(0, int(x0) - across)
    top = max(0, int(y0) - down)
    right = min(image.width, math.ceil(x1) + across)
    bottom = min(image.height, math.ceil(y1) + down)
    part = image.crop((left, top, right, bottom))

    # The box seen from the part.
    inside = (
        x0 - left,
        y0 - top,
        min(x1, image.width) - left,
        min(y1, image.height) - top,
    )
    return part.resize((size, size), resample, box=inside)


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop, scale to [0, 1], normalise; equal values, equal pixels.

    Pictures are converted to RGB first, as the image-folder loaders of the benchmarks
    do.
    """

    # Side of the square that the model takes.
    size: int
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    # Pillow's filter, antialiased.
    interpolation: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    # ``shorter``: the shorter side to ``size``, then crop; ``squash``: both
    # sides, no crop.
    resize: Literal["shorter", "squash"] = "shorter"
    # Half a pixel of crop offset: rounded to even (torchvision), or down
    # (transformers).
    crop_rounding: Literal["round", "floor"] = "round"

    def __post_init__(self) -> None:
        """Validate the fields."""
        if not isinstance(self.size, int) or self.size < 1:
            raise UserError(f"image size is at least 1, got {self.size}")

        valid = _are_channels(self.mean) and _are_channels(self.std)
        if not valid or min(self.std) <= 0:
            raise UserError("mean and std hold three numbers, those of std above 0")

        # Choices, which may come from a file.
        for name, value, choices in (
            ("interpolation", self.interpolation, list(_FILTERS)),
            ("resize", self.resize, ["shorter", "squash"]),
            ("crop_rounding", self.crop_rounding, ["round", "floor"]),
        ):
            if value not in choices:
                raise UnknownNameError(name, value, choices)

    @classmethod
    def openai(cls, size: int = 224) -> "Preprocess":
        """Return OpenAI's and open_clip's rule, bit-equal to torchvision on PIL images."""
        return cls(size)

    def __call__(self, image: Image.Image) -> Tensor:
        """Make pixels (3, size, size), float32."""
        return self.batch([image])[0]

    def batch(self, images: Sequence[Image.Image]) -> Tensor:
        """Make pixels (N, 3, size, size) of several pictures."""
        if not images:
            return torch.empty(0, 3, self.size, self.size)
        pictures = [np.asarray(self.picture(image)) for image in images]
        return self.pixels(np.stack(pictures))

    def picture(self, image: Image.Image) -> Image.Image:
        """Resize and crop to the RGB picture (size x size) that the model sees."""
        if image.mode != "RGB":  # convert() copies
            image = image.convert("RGB")
        if self.resize == "squash":
            return self._squash(image)

        width, height = image.size
        size = self.size

        # The shorter side becomes `size`, the longer one keeps the ratio.
        longer = int(size * max(width, height) / min(width, height))
        if longer > LONGEST * size:
            return self._resize_middle(image, longer)

        target = (size, longer) if width <= height else (longer, size)
        if image.size != target:
            image = image.resize(target, _FILTERS[self.interpolation])

        # The crop is at the centre.
        left = self.offset(image.width - size)
        top = self.offset(image.height - size)
        return image.crop((left, top, left + size, top + size))

    def _squash(self, image: Image.Image) -> Image.Image:
        """Resize both sides; average very long ones first."""
        most = _REDUCED * self.size

        # Whole pixels that are averaged to one.
        across = max(1, image.width // most)
        down = max(1, image.height // most)

        if across * down > 1:
            image = image.reduce((across, down))
        return image.resize((self.size, self.size), _FILTERS[self.interpolation])

    def _resize_middle(self, image: Image.Image, longer: int) -> Image.Image:
        """Resize only what the crop of a very long picture needs: the same up to rounding."""
        width, height = image.size

        # Where the crop begins in the resized picture.
        offset = self.offset(longer - self.size)
        scale = longer / max(width, height)

        # The crop in pixels of the picture as it is.
        first = offset / scale
        last = (offset + self.size) / scale
        box = (first, 0, last, height) if width > height else (0, first, width, last)
        return resize_part(image, self.size, _FILTERS[self.interpolation], box)

    def pixels(self, images: NDArray[np.uint8] | Tensor) -> Tensor:
        """Normalise uint8 pictures (..., size, size, 3): the same bits on every device."""
        data = torch.tensor(images) if isinstance(images, np.ndarray) else images
        if data.dtype != torch.uint8 or data.ndim < 4 or data.shape[-1] != 3:
            raise UserError(
                f"pixels takes uint8 (N, {self.size}, {self.size}, 3), "
                f"got {data.dtype} {tuple(data.shape)}"
            )

        if data.shape[-3:-1] != (self.size, self.size):
            raise UserError(
                f"pictures are {data.shape[-3]} x {data.shape[-2]}, the model takes {self.size} x "
                f"{self.size}; open them as PIL images to have them resized"
            )
        mean, std, levels = _constants(self.mean, self.std, data.device)
        # A division by a Python number would become a product with its reciprocal on
        # CUDA.
        scaled = data.movedim(-1, -3).contiguous().to(torch.float32).div_(levels)
        return scaled.sub_(mean).div_(std)

    def unnormalise(self, pixels: Tensor) -> Tensor:
        """Restore uint8 pictures (..., H, W, 3) of normalised pixels (..., 3, H, W)."""
        mean, std, _ = _constants(self.mean, self.std, pixels.device)
        scaled = pixels.detach().to(torch.float32) * std + mean
        levels = scaled.mul(255).round().clamp(0, 255)
        return levels.to(torch.uint8).movedim(-3, -1)

    def to_dict(self) -> dict[str, Any]:
        """Return the values as plain JSON types."""
        return {
            **dataclasses.asdict(self),
            "mean": list(self.mean),
            "std": list(self.std),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocess":
        """Read the value that :meth:`to_dict` wrote."""
        names = [field.name for field in dataclasses.fields(cls)]
        fields: dict[str, Any] = {}
        for name, value in dict(values).items():
            if name not in names:
                raise UnknownNameError("value of a preprocessing", name, names)

            # JSON has lists, where equal values need tuples.
            fields[name] = tuple(value) if name in ("mean", "std") else value
        return cls(**fields)

    @property
    def fingerprint(self) -> str:
        """Hash of the values: equal preprocessing, equal fingerprint."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def offset(self, spare: int) -> int:
        """Return the first pixel of the centre crop."""
        return round(spare / 2.0) if self.crop_rounding == "round" else spare // 2


def _are_channels(values: Sequence[Any]) -> bool:
    """Whether these are three numbers of a usual size."""
    numbers = [isinstance(v, float | int) and abs(v) < 1e6 for v in values]
    return len(numbers) == 3 and all(numbers)


@lru_cache(maxsize=16)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Put mean and standard deviation (3, 1, 1), and the highest level, on a device."""
    with torch.inference_mode(False):
        # Not as inference tensors, which autograd could not use later.
        return (
            torch.tensor(mean, dtype=torch.float32, device=device).view(3, 1, 1),
            torch.tensor(std, dtype=torch.float32, device=device).view(3, 1, 1),
            torch.tensor([255.0], device=device),
        )
