"""Tar shards as a dataset, with WebDataset's naming; read where they are, never unpacked."""

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cliquetta.data.dataset import FileDataset
from cliquetta.data.files import (
    CLASS_FILES,
    TEMPLATE_FILES,
    no_images,
    number_labels,
    read_beside,
)
from cliquetta.data.images import EXTENSIONS, natural_key
from cliquetta.data.remote import Member, open_location
from cliquetta.errors import UserError
from cliquetta.prompts.classes import DEFAULT_TEMPLATE

LABEL_KEYS = (
    "label",
    "cls",
    "class",
    "class_name",
)  # keys of the class in a sample's `.json`
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class TarSample(NamedTuple):
    """An image of a shard."""

    key: str
    member: Member
    stated: str | None = None  # class by its `.cls` or `.json` member


def tar_dataset(path: Path, names: Sequence[str] | None = None) -> FileDataset:
    """The samples of one shard, of ``shard-{000..012}.tar``, or of all shards in a folder.

    Classes are in ``.cls`` or ``.json`` members (:data:`LABEL_KEYS`), else they are the
    folders in the archive; class list and templates are in text files beside the
    shards, or one folder up.
    """
    shards = find_shards(path)
    samples = [sample for shard in shards for sample in index_shard(shard)]
    if not samples:
        raise no_images(path)
    home = shards[0].parent
    names = read_beside(CLASS_FILES, home, home.parent) if names is None else names
    stated = [sample.stated for sample in samples]
    if not any(value is not None for value in stated):
        stated = [
            sample.key.rpartition("/")[0].rpartition("/")[2] or None
            for sample in samples
        ]
    names, labels = number_labels(stated, names, str(path))
    templates = read_beside(TEMPLATE_FILES, home, home.parent)
    keys = [sample.key for sample in samples]
    named = [f"{Path(sample.member.archive).name}/{sample.key}" for sample in samples]
    return FileDataset(
        f"tar:{path.as_posix()}",
        named,
        names=names,
        # the shard leads where several shards number their samples alike
        keys=keys if len(set(keys)) == len(keys) else named,
        labels=labels,
        templates=[
            line.replace("{c}", "{}") for line in templates or (DEFAULT_TEMPLATE,)
        ],
        members=[sample.member for sample in samples],
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


def list_members(shard: Path | str) -> Iterator[tuple[str, Member]]:
    """Name and bytes of every image file in a tar file, in the order of the archive."""
    for _, info in _files(shard):
        if Path(info.name).suffix.lower() in EXTENSIONS:
            yield (
                info.name.removeprefix("./"),
                Member(str(shard), info.offset_data, info.size),
            )


def index_shard(shard: Path | str) -> list[TarSample]:
    """The samples of a shard that have an image, in the order of the archive.

    Files up to whose first dot the name is the same are one sample where one of them is
    ``.cls`` or ``.json``, with its first image; elsewhere every image is a sample, by
    its file name if several share what is before the dot.
    """
    images: dict[str, dict[str, Member]] = {}
    stated: dict[str, str | None] = {}
    for archive, info in _files(shard):
        name = info.name.removeprefix("./")
        folder, slash, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        # only the last ending counts: "x.left.jpg" is an image of sample x
        key, kind = f"{folder}{slash}{stem}", ending.lower().rpartition(".")[2]
        if f".{kind}" in EXTENSIONS:
            member = Member(str(shard), info.offset_data, info.size)
            images.setdefault(key, {})[name] = member
        elif kind in {"cls", "json"}:
            file = archive.extractfile(info)
            stated[key] = _class_in(kind, file.read() if file else b"") or stated.get(
                key
            )
    samples = []
    for key, members in images.items():
        if key in stated or len(members) == 1:
            samples.append(
                TarSample(key, next(iter(members.values())), stated.get(key))
            )
        else:
            samples += [TarSample(name, member) for name, member in members.items()]
    return samples


def _files(shard: Path | str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The files in a tar file that are not hidden, with the archive."""
    try:
        with (
            open_location(shard) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            for member in archive:
                if member.isfile() and not Path(member.name).name.startswith("."):
                    yield archive, member
    except tarfile.ReadError as error:
        remedy = "a compressed one has to be read from the start for every image; uncompress it"
        raise UserError(
            f"{shard} is not an uncompressed tar file ({error}): {remedy}"
        ) from None


def _class_in(kind: str, data: bytes) -> str | None:
    try:
        text = data.decode("utf-8").strip()
        if kind == "cls":
            return text or None
        record = json.loads(text)
    except ValueError:
        return None
    values = [
        record[key] for key in LABEL_KEYS if isinstance(record, dict) and key in record
    ]
    return str(values[0]) if values else None
