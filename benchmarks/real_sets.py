"""Real pictures and text embeddings for the real ViT-B/16 image tower, read for the benchmarks.

Nothing of this comes with the repository. ``shared`` is a folder that holds, at any depth, the
tower's weights (``clip-vit-b16-visual*.safetensors``, OpenAI's key names), the bank of text
embeddings (``clip-vit-b16-text-bank.npz``) and ``dev.npz`` with ``dev.json`` (edges, cue-conflict).
``real`` is a folder of packs: ``index.json`` gives names, keys and labels of each, ``<set>.npz``
its pictures. There is no text tower: text stays fixed, and methods that learn it cannot run.

A set is written ``NAME[/80][@SHIFT:SEVERITY]``: ``/80`` asks among the 80 things of COCO instead of
the set's own names (PACS, of which five names are in the bank, is always asked so).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.dataset import ArrayDataset, Dataset, UInt8Array
from cliquetta.data.images import open_image
from cliquetta.data.shifts import ShiftedDataset, parse_dataset_id
from cliquetta.errors import UnknownNameError
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts

WEIGHTS = "clip-vit-b16-visual*.safetensors"
BANK = "clip-vit-b16-text-bank.npz"
BANK_SOURCE = "coco-stuff171"
THINGS = 80
"""The first names of the bank are COCO's things."""
FROM_DEV = ("edges", "cue-conflict")
DEVELOPMENT = FROM_DEV
"""Sets on which settings may be chosen; figures are reported on the others."""
CLEAN = ("pacs-photo", "cifar10-8")
"""Sets without a shift."""
DEFAULT_SETS = (
    "edges",
    "cue-conflict",
    "silhouettes",
    "pacs-art_painting",
    "pacs-cartoon",
    "pacs-sketch",
    "pacs-photo",
    "cifar10-8@gaussian_noise:3",
    "cifar10-8@pixelate:3",
    "cifar10-8@contrast:5",
    "cifar10-8",
)


class PackedDataset(Dataset):
    """Encoded pictures that lie one behind the other: ``data`` bytes, ``offsets`` (N + 1,)."""

    def __init__(
        self,
        id: str,
        data: UInt8Array,
        offsets: np.ndarray[Any, np.dtype[np.int64]],
        rows: Sequence[int],
        *,
        names: Sequence[str],
        keys: Sequence[str],
        labels: Sequence[int],
    ) -> None:
        super().__init__(id, names=names, keys=keys, labels=labels)
        self.data, self.offsets, self.rows = data, offsets, tuple(rows)

    def load(self, index: int) -> Image.Image:
        """Picture ``index`` in RGB."""
        row = self.rows[index]
        return open_image(self.data[self.offsets[row] : self.offsets[row + 1]].tobytes())


class RealSets:
    """The real sets of two folders and the text of their classes."""

    def __init__(self, shared: Path, real: Path | None) -> None:
        self.shared, self.real = shared, real
        bank = np.load(_find(shared, BANK))
        usable = (bank["template"] == "ensemble") & np.char.startswith(bank["source"], BANK_SOURCE)
        rows = np.flatnonzero(usable)
        self.bank_names = [str(bank["names"][row]) for row in rows]
        self.embeddings = torch.tensor(bank["emb"][rows]).float()
        self.things = tuple(self.bank_names[:THINGS])
        self.index: dict[str, Any] = {}
        if real is not None:
            self.index = json.loads(_find(real, "index.json").read_text())

    def tower(self, *, device: str, dtype: str) -> CLIP:
        """The image tower."""
        found = {path.name: path for path in sorted(self.shared.rglob(WEIGHTS))}
        if not found:
            raise FileNotFoundError(f"no {WEIGHTS} under {self.shared}")
        return create_model(list(found.values()), device=device, dtype=dtype)

    def prompts(self, names: Sequence[str]) -> ClassPrompts:
        """Class names with their embeddings out of the bank."""
        return ClassPrompts(tuple(names), features=self.text(names))

    def text(self, names: Sequence[str]) -> Tensor:
        """Ensemble embeddings (N, 512) of class names."""
        missing = [name for name in names if name not in self.bank_names]
        if missing:
            raise UnknownNameError("class of the text bank", missing[0], self.bank_names)
        return self.embeddings[[self.bank_names.index(name) for name in names]]

    def get(self, id: str, *, seed: int = 0) -> Dataset:
        """The set of an id; ``seed`` draws the noise of its shift."""
        base, shift = parse_dataset_id(id)
        name, _, classes = base.partition("/")
        if classes not in ("", str(THINGS)):
            raise UnknownNameError("class list", classes, [str(THINGS)])
        wide = classes != "" or name.startswith("pacs-")
        dataset = self._read(base, name, wide)
        return dataset if shift is None else ShiftedDataset(dataset, shift, seed=seed)

    def _read(self, id: str, name: str, wide: bool) -> Dataset:
        if name in FROM_DEV:
            return self._read_dev(id, name, wide)
        if name not in self.index or self.real is None:
            raise UnknownNameError("real set", name, [*FROM_DEV, *self.index])
        entry = self.index[name]
        pack = np.load(_find(self.real, f"{name}.npz"))
        names = self.things if wide else tuple(entry["names"])
        labels = [names.index(entry["names"][label]) for label in entry["labels"]]
        if entry["format"] == "array":
            return ArrayDataset(id, pack["images"], names=names, keys=entry["keys"], labels=labels)
        rows = range(len(labels))
        return PackedDataset(
            id, pack["data"], pack["off"], rows, names=names, keys=entry["keys"], labels=labels
        )

    def _read_dev(self, id: str, name: str, wide: bool) -> Dataset:
        index = json.loads(_find(self.shared, "dev.json").read_text())
        pack = np.load(_find(self.shared, "dev.npz"))
        rows = [row for row, (owner, _) in enumerate(index) if owner == name]
        own = sorted({index[row][1] for row in rows})
        names = self.things if wide else tuple(own)
        return PackedDataset(
            id,
            pack["data"],
            pack["off"],
            rows,
            names=names,
            keys=[f"{name}/{row}" for row in rows],
            labels=[names.index(index[row][1]) for row in rows],
        )


def _find(folder: Path, name: str) -> Path:
    """The file ``name`` somewhere under ``folder``."""
    found = sorted(folder.rglob(name))
    if not found:
        raise FileNotFoundError(f"no {name} under {folder}")
    return found[0]
