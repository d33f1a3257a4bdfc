"""Contract of a dataset: named images, their labels if any, and the class list."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from cliquetta.data.remote import Member, open_named, read_listed
from cliquetta.errors import UserError
from cliquetta.prompts.classes import DEFAULT_TEMPLATE, ClassPrompts
from cliquetta.prompts.features import FloatArray

if TYPE_CHECKING:  # arguments are checked before torch is imported
    from torch import Tensor

UInt8Array = npt.NDArray[np.uint8]

UNKNOWN = -1
# The label of an image whose class is known not to be in the class list (open set).
OUTSIDE = -2


class Dataset(ABC):
    """Images with labels and keys: views, corruptions and predictions are tied to these.

    Keys differ. ``labels`` (N,) index ``names``, or are :data:`UNKNOWN` or
    :data:`OUTSIDE`.
    """

    def __init__(
        self,
        id: str,
        *,
        names: Sequence[str],
        keys: Sequence[str],
        labels: Sequence[int] | Tensor | None,
        templates: Sequence[str] = (DEFAULT_TEMPLATE,),
    ) -> None:
        import torch

        self.id = id
        self.names = tuple(names)
        self.keys = tuple(keys)
        self.templates = tuple(templates)

        if not self.keys:
            raise UserError(f"dataset {id} holds no images")
        if len(set(self.keys)) != len(self.keys):
            raise UserError(f"keys of dataset {id} must differ from one another")
        self.labels: Tensor | None = None
        if labels is not None:
            self.labels = torch.as_tensor(labels, dtype=torch.int64)
            self._check_labels(self.labels)

    def _check_labels(self, labels: Tensor) -> None:
        """Refuse labels that do not belong to the images or to the class list."""
        if labels.shape != (len(self.keys),):
            raise UserError(
                f"dataset {self.id} has {len(self.keys)} images and labels of shape "
                f"{tuple(labels.shape)}"
            )

        low = int(labels.min())
        high = int(labels.max())
        if low < OUTSIDE or high >= len(self.names):
            raise UserError(
                f"labels of dataset {self.id} run from {low} to {high}, "
                f"its class list holds {len(self.names)} names"
            )

    def __len__(self) -> int:
        """Number of images."""
        return len(self.keys)

    def __repr__(self) -> str:
        labels = "no labels" if self.labels is None else f"{len(self.names)} classes"
        return f"{type(self).__name__}({self.id!r}, {len(self)} images, {labels})"

    @abstractmethod
    def load(self, index: int) -> Image.Image:
        """Load image ``index`` in RGB; raises :class:`ImageError` if it cannot be read."""

    def arrays(self, indices: Sequence[int]) -> UInt8Array | None:
        """Return images (n, H, W, 3) where all are in memory with one size, else ``None``."""
        return None

    def features(self, indices: Sequence[int]) -> FloatArray | None:
        """Return unit features (n, V, E) where the dataset holds these instead of images."""
        return None

    def redrawn(self, round: int) -> Dataset:
        """Return the dataset of a later round: what is random about it is drawn anew."""
        return self

    @property
    def prompts(self) -> ClassPrompts:
        """Class list with this dataset's usual templates."""
        return ClassPrompts(self.names, self.templates, allow_duplicates=True)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of keys, labels and class names: the same list of images, the same fingerprint."""
        labels = None if self.labels is None else self.labels.tolist()
        listing = json.dumps([self.keys, labels, self.names])
        return hashlib.sha256(listing.encode()).hexdigest()[:16]

    def contents(self) -> str:
        """Return a text that changes with the images; :attr:`fingerprint` covers the list only."""
        return f"{self.id} {self.fingerprint}"


class ArrayDataset(Dataset):
    """Images of one size, in memory: ``images`` is (N, H, W, 3) uint8."""

    def __init__(
        self,
        id: str,
        images: UInt8Array,
        *,
        names: Sequence[str],
        keys: Sequence[str],
        labels: Sequence[int] | Tensor | None,
        templates: Sequence[str] = (DEFAULT_TEMPLATE,),
    ) -> None:
        super().__init__(id, names=names, keys=keys, labels=labels, templates=templates)

        # Views and corruptions count on 8 bits and three channels.
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise UserError(
                f"images are (N, H, W, 3) uint8, got {images.shape} {images.dtype}"
            )
        if len(images) != len(self.keys):
            raise UserError(f"{len(images)} images for {len(self.keys)} keys")
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Load image ``index`` in RGB."""
        return Image.fromarray(self.images[index])

    def arrays(self, indices: Sequence[int]) -> UInt8Array:
        """Return images (n, H, W, 3)."""
        return self.images[np.asarray(indices, dtype=np.int64)]

    def contents(self) -> str:
        """Hash the pictures themselves."""
        pixels = np.ascontiguousarray(self.images)
        return hashlib.blake2b(pixels.data, digest_size=8).hexdigest()


class FileDataset(Dataset):
    """Images in files, decoded when they are asked for.

    ``paths`` are local or URLs, or what the ``members`` of tar files are called.
    Benchmarks leave pixels as stored (``exif=False``). ``shorter``: see
    :func:`~cliquetta.data.images.open_image`.
    """

    def __init__(
        self,
        id: str,
        paths: Sequence[Path | str],
        *,
        names: Sequence[str],
        labels: Sequence[int] | Tensor | None,
        keys: Sequence[str] | None = None,
        templates: Sequence[str] = (DEFAULT_TEMPLATE,),
        members: Sequence[Member | None] = (),
        exif: bool = True,
        shorter: int | None = None,
    ) -> None:
        self.paths = tuple(paths)
        self.members = tuple(members) or (None,) * len(self.paths)
        self.exif = exif
        self.shorter = shorter

        if keys is None:
            keys = [
                path if isinstance(path, str) else path.as_posix()
                for path in self.paths
            ]

        super().__init__(id, names=names, keys=keys, labels=labels, templates=templates)
        if len(self.paths) != len(self.keys):
            raise UserError(f"{len(self.paths)} files for {len(self.keys)} keys")

    def load(self, index: int) -> Image.Image:
        """Load image ``index`` in RGB; raises :class:`ImageError` if it cannot be read."""
        return self.decode(index, self.read(index))

    def read(self, index: int) -> bytes:
        """Read the file of image ``index``."""
        return read_listed(self.paths[index], self.members[index])

    def decode(self, index: int, data: bytes) -> Image.Image:
        """Decode image ``index`` from its file."""
        return open_named(data, self.paths[index], shorter=self.shorter, exif=self.exif)

    def contents(self) -> str:
        """Hash sizes and times of change; a missing file has none, and is no error here."""
        files: dict[Path | str, None] = {}  # in order, each once
        for path, member in zip(self.paths, self.members, strict=True):
            files[member.archive if member else path] = None

        # A tar file counts once, however many images it has.
        digest = hashlib.blake2b(digest_size=8)
        for file in files:
            try:
                status = Path(file).stat()
                digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
            except OSError:
                digest.update(b"missing\n")
        return f"{digest.hexdigest()} exif={self.exif}"
