"""Tar shards as a dataset, with WebDataset's naming; read where they are, never unpacked."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from cliquetta.data.dataset import Dataset, file_stamps
from cliquetta.data.files import (
    CLASS_FILES,
    EXTENSIONS,
    TEMPLATE_FILES,
    natural_key,
    number_labels,
    read_beside,
)
from cliquetta.data.remote import open_listed, open_location
from cliquetta.errors import UserError
from cliquetta.prompts.classes import DEFAULT_TEMPLATE

LABEL_KEYS = ("label", "cls", "class", "class_name")
"""Keys of the class in a sample's ``.json``."""
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass
class TarSample:
    """The members of one sample: bytes of a shard."""

    key: str
    shard: Path | str
    image: tuple[int, int]
    """Offset and size."""
    stated: str | None = None
    """Class by its ``.cls`` or ``.json`` member."""


class TarDataset(Dataset):
    """Images in uncompressed tar files, each read where it lies."""

    def __init__(
        self,
        id: str,
        samples: Sequence[tuple[Path, int, int]],
        *,
        names: Sequence[str],
        keys: Sequence[str],
        labels: Sequence[int] | None,
        templates: Sequence[str] = (DEFAULT_TEMPLATE,),
    ) -> None:
        super().__init__(id, names=names, keys=keys, labels=labels, templates=templates)
        self.samples = tuple(samples)
        """Shard, offset and size of every image."""

    def load(self, index: int) -> Image.Image:
        """Image ``index`` in RGB; raises :class:`ImageError` if it cannot be read."""
        shard, offset, size = self.samples[index]
        return open_listed(f"{shard.name}/{self.keys[index]}", (str(shard), offset, size))

    def contents(self) -> str:
        """Hash of the sizes and times of the shards."""
        return file_stamps(dict.fromkeys(shard for shard, _, _ in self.samples))


def tar_dataset(path: Path, names: Sequence[str] | None = None) -> TarDataset:
    """The samples of one shard, of ``shard-{000..012}.tar``, or of all shards in a folder.

    The class of a sample (:func:`index_shard`) is in its ``.cls`` (a number or a name) or ``.json``
    (one of :data:`LABEL_KEYS`). Where no sample has either, it is the folder in the archive.
    Class list and templates are read from ``classnames.txt`` and ``templates.txt`` beside the
    shards, or one folder up.
    """
    shards = find_shards(path)
    samples = [sample for shard in shards for sample in index_shard(shard)]
    if not samples:
        raise UserError(f"no images in {path} (looked for {', '.join(sorted(EXTENSIONS))})")
    home = shards[0].parent
    beside = read_beside(home, CLASS_FILES) or read_beside(home.parent, CLASS_FILES)
    names, labels = number_labels(_stated(samples), names or beside, str(path))
    asked = read_beside(home, TEMPLATE_FILES) or read_beside(home.parent, TEMPLATE_FILES)
    return TarDataset(
        f"tar:{path.as_posix()}",
        [(Path(s.shard), *s.image) for s in samples],
        names=names,
        keys=_unique_keys(samples, many=len(shards) > 1),
        labels=labels,
        templates=[line.replace("{c}", "{}") for line in asked or (DEFAULT_TEMPLATE,)],
    )


def find_shards(path: Path) -> list[Path]:
    """The tar files that a path, a folder or ``name-{000..012}.tar`` stands for."""
    if _BRACES.search(path.name) is not None:
        shards = [path.with_name(name) for name in expand_braces(path.name)]
    elif path.is_dir():
        shards = sorted(path.glob("*.tar"), key=lambda shard: natural_key(shard.name))
        if not shards:
            raise UserError(f"no tar files in {path}")
    else:
        shards = [path]
    absent = [shard for shard in shards if not shard.is_file()]
    if absent:
        raise UserError(f"no tar file {absent[0]}")
    return shards


def expand_braces(name: str) -> list[str]:
    """Names that ``name-{000..012}.tar`` stands for; one without braces stands for itself."""
    braces = _BRACES.search(name)
    if braces is None:
        return [name]
    low, high = braces.groups()
    numbers = range(int(low), int(high) + 1)
    return [name.replace(braces[0], f"{number:0{len(low)}d}") for number in numbers]


def list_members(shard: Path | str) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of every image file in a tar file, in the order of the archive."""
    for archive, member in _files(shard):
        del archive
        if Path(member.name).suffix.lower() in EXTENSIONS:
            yield member.name.removeprefix("./"), member.offset_data, member.size


def index_shard(shard: Path | str) -> list[TarSample]:
    """The samples of a shard that have an image, in the order of the archive.

    Files up to whose first dot the name is the same are one sample where one of them is ``.cls`` or
    ``.json``, with its first image; elsewhere every image is a sample, by its file name if several
    share what is before the dot.
    """
    images: dict[str, dict[str, tuple[int, int]]] = {}
    stated: dict[str, str | None] = {}
    for archive, member in _files(shard):
        name = member.name.removeprefix("./")
        folder, slash, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        # only the last ending counts: "x.left.jpg" is an image of sample x
        key, kind = f"{folder}{slash}{stem}", ending.lower().rpartition(".")[2]
        if f".{kind}" in EXTENSIONS:
            images.setdefault(key, {})[name] = (member.offset_data, member.size)
        elif kind in {"cls", "json"}:
            found = archive.extractfile(member)
            stated[key] = _class_in(kind, found.read() if found else b"") or stated.get(key)
    samples = []
    for key, spans in images.items():
        if key in stated or len(spans) == 1:
            samples.append(TarSample(key, shard, next(iter(spans.values())), stated.get(key)))
        else:
            samples += [TarSample(name, shard, span) for name, span in spans.items()]
    return samples


def _files(shard: Path | str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The files in a tar file that are not hidden, with the archive."""
    try:
        with open_location(shard) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isfile() and not Path(member.name).name.startswith("."):
                    yield archive, member
    except tarfile.ReadError as error:
        raise UserError(
            f"{shard} cannot be read as an uncompressed tar file ({error}): a compressed one has "
            "to be read from the start for every image; uncompress it"
        ) from None


def _class_in(kind: str, data: bytes) -> str | None:
    try:
        text = data.decode("utf-8").strip()
        if kind == "cls":
            return text or None
        record = json.loads(text)
    except ValueError:
        return None
    found = [record[key] for key in LABEL_KEYS if isinstance(record, dict) and key in record]
    return None if not found else str(found[0])


def _stated(samples: Sequence[TarSample]) -> list[str | None]:
    """Class of each sample as stated; its folder where no sample states any."""
    if any(sample.stated is not None for sample in samples):
        return [sample.stated for sample in samples]
    return [sample.key.rpartition("/")[0].rpartition("/")[2] or None for sample in samples]


def _unique_keys(samples: Sequence[TarSample], *, many: bool) -> list[str]:
    """Keys; the shard leads them where several shards number their samples alike."""
    keys = [sample.key for sample in samples]
    if many and len(set(keys)) < len(keys):
        return [f"{Path(sample.shard).name}/{sample.key}" for sample in samples]
    return keys
