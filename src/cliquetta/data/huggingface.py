"""Datasets of the Hugging Face hub, or saved to disk by its library (extra ``hf-datasets``)."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from PIL import Image

from cliquetta.data.dataset import Dataset
from cliquetta.data.files import number_labels
from cliquetta.data.images import ImageError, open_image
from cliquetta.errors import UserError, look_up

_OPTIONS = dict.fromkeys(("split", "config", "image", "label"))


# A `datasets.Dataset`: rows by number, columns by name, `features` with their types.
Table = Any


class HuggingFaceDataset(Dataset):
    """Table whose column ``image`` holds encoded pictures, ``{"bytes": ..., "path": ...}``."""

    def __init__(self, id: str, table: Table, image: str, label: str | None) -> None:
        self.table = table
        self.image = image
        if label is None:
            raise UserError(f"{id} has no column of classes: name it with label=COLUMN")

        feature = look_up(f"column of {id}", label, table.features)
        classes = getattr(feature, "names", None)
        stated = [None if cell in (None, -1) else str(cell) for cell in table[label]]
        names, labels = number_labels(stated, classes, id)

        # Keys sort like the rows.
        rows = len(table)
        digits = len(str(rows))
        keys = [f"{row:0{digits}d}" for row in range(rows)]
        super().__init__(id, names=names, keys=keys, labels=labels)

    def load(self, index: int) -> Image.Image:
        """Load image ``index`` in RGB; raises :class:`ImageError` if it cannot be read."""
        cell = self.table[index][self.image]
        data = cell.get("bytes")
        path = Path(cell.get("path") or "")

        try:
            return open_image(path if data is None else data)
        except ImageError as error:
            raise ImageError(f"{self.id}, row {index}", error.reason) from error

    def contents(self) -> str:
        """Return the fingerprint that the library keeps of the table, and our list's."""
        return f"{getattr(self.table, '_fingerprint', '')} {super().contents()}"


def hugging_face_dataset(name: str) -> HuggingFaceDataset:
    """Read ``NAME?split=test&config=...&image=...&label=...``; NAME may be a folder on disk.

    The columns of images and classes are found by their types if they are not named.
    """
    try:
        import datasets
    except ImportError:
        remedy = "pip install 'cliquetta[hf-datasets]'"
        raise UserError(f"datasets of Hugging Face need an extra: {remedy}") from None
    base, options = parse_name(name)
    split = options.get("split", "test")

    # Saved to disk, or on the hub.
    folder = Path(base)
    files = (folder / "dataset_info.json", folder / "dataset_dict.json")
    if any(file.is_file() for file in files):
        table = datasets.load_from_disk(base)
        if isinstance(table, datasets.DatasetDict):
            table = look_up(f"split of {base}", split, table)
    else:
        table = datasets.load_dataset(base, options.get("config"), split=split)

    image = options.get("image") or _column(table, datasets.Image, "image", base)
    if image is None:
        raise UserError(f"{base} has no column of images: name it with ?image=COLUMN")
    label = options.get("label") or _column(table, datasets.ClassLabel, "label", base)
    # Bytes are decoded by us, so that a bad picture is skipped like any other.
    table = table.cast_column(image, datasets.Image(decode=False))
    return HuggingFaceDataset(f"hf:{name}", table, image, label)


def parse_name(name: str) -> tuple[str, dict[str, str]]:
    """Read the name of a dataset and its options.

    >>> parse_name("zh-plus/tiny-imagenet?split=valid")
    ('zh-plus/tiny-imagenet', {'split': 'valid'})
    """
    base, _, query = name.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for option in options:
        look_up("option of a Hugging Face dataset", option, _OPTIONS)
    if not base:
        raise UserError(
            "hf: needs the name of a dataset, such as hf:uoft-cs/cifar10?split=test"
        )
    return base, options


def _column(table: Table, kind: type, option: str, base: str) -> str | None:
    """Find the column of a type, if there is one; refuse to choose among several."""
    names = [
        name for name, feature in table.features.items() if isinstance(feature, kind)
    ]
    if len(names) > 1:
        remedy = f"choose with ?{option}= one of {', '.join(names)}"
        raise UserError(
            f"{base} has several columns that could be the {option}: {remedy}"
        )
    return names[0] if names else None
