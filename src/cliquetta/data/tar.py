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

# Keys of the class in a sample's `.json`.
LABEL_KEYS = ("label", "cls", "class", "class_name")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class TarSample(NamedTuple):
    """Image of a shard."""

    key: str
    member: Member
    # Class by its `.cls` or `.json` member.
    stated: str | None = None


def tar_dataset(path: Path, names: Sequence[str] | None = None) -> FileDataset:
    """Read the samples of one shard, of ``shard-{000..012}.tar``, or of all shards in a folder.

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
    if all(value is None for value in stated):
        stated = [_folder(sample.key) for sample in samples]

    names, labels = number_labels(stated, names, str(path))
    templates = read_beside(TEMPLATE_FILES, home, home.parent) or (DEFAULT_TEMPLATE,)

    # The shard leads where several shards number their samples alike.
    keys = [sample.key for sample in samples]
    paths = [f"{Path(sample.member.archive).name}/{sample.key}" for sample in samples]
    if len(set(keys)) < len(keys):
        keys = paths
    return FileDataset(
        f"tar:{path.as_posix()}",
        paths,
        names=names,
        keys=keys,
        labels=labels,
        templates=[line.replace("{c}", "{}") for line in templates],
        members=[sample.member for sample in samples],
    )


def _folder(key: str) -> str | None:
    """Return the innermost folder of a key, if it has one."""
    folders, _, _ = key.rpartition("/")
    return folders.rpartition("/")[2] or None


def find_shards(path: Path) -> list[Path]:
    """Find the tar files that a path, a folder or ``name-{000..012}.tar`` stands for."""
    if _BRACES.search(path.name) is not None:
        shards = [path.with_name(name) for name in expand_braces(path.name)]
    elif path.is_dir():
        shards = sorted(path.glob("*.tar"), key=lambda shard: natural_key(shard.name))
        if not shards:
            raise UserError(f"no tar files in {path}")
    else:
        shards = [path]

    for shard in shards:
        if not shard.is_file():
            raise UserError(f"no tar file {shard}")
    return shards


def expand_braces(name: str) -> list[str]:
    """List the names that ``name-{000..012}.tar`` stands for; others stand for themselves."""
    braces = _BRACES.search(name)
    if braces is None:
        return [name]
    low, high = braces.groups()

    # Numbers are as long as the first one: 000, 001, ...
    digits = len(low)
    numbers = range(int(low), int(high) + 1)
    return [name.replace(braces[0], f"{number:0{digits}d}") for number in numbers]


def list_members(shard: Path | str) -> Iterator[tuple[str, Member]]:
    """Yield name and place of every image file in a tar file, in the order of the archive."""
    for _, info in _files(shard):
        if Path(info.name).suffix.lower() in EXTENSIONS:
            yield info.name.removeprefix("./"), _member(shard, info)


def _member(shard: Path | str, info: tarfile.TarInfo) -> Member:
    """Return the place of a file in a tar file."""
    return Member(str(shard), info.offset_data, info.size)


def index_shard(shard: Path | str) -> list[TarSample]:
    """List the samples of a shard that have an image, in the order of the archive.

    Files up to whose first dot the name is the same are one sample where one of them is
    ``.cls`` or ``.json``, with its first image; elsewhere every image is a sample, by
    its file name if several share what is before the dot.
    """
    # Images and classes of each sample, by its key.
    images: dict[str, dict[str, Member]] = {}
    stated: dict[str, str | None] = {}
    for archive, info in _files(shard):
        name = info.name.removeprefix("./")
        folder, slash, base = name.rpartition("/")

        stem, _, ending = base.partition(".")
        key = f"{folder}{slash}{stem}"

        # Only the last ending counts: "x.left.jpg" is an image of sample x.
        kind = ending.lower().rpartition(".")[2]
        if f".{kind}" in EXTENSIONS:
            images.setdefault(key, {})[name] = _member(shard, info)
        elif kind in {"cls", "json"}:
            file = archive.extractfile(info)
            label = _read_class(kind, file.read() if file else b"")
            stated[key] = label or stated.get(key)

    # Without a class, images that share a key are samples of their own.
    samples = []
    for key, members in images.items():
        if key in stated or len(members) == 1:
            first = next(iter(members.values()))
            samples.append(TarSample(key, first, stated.get(key)))
            continue
        for name, member in members.items():
            samples.append(TarSample(name, member))
    return samples


def _files(shard: Path | str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the files in a tar file that are not hidden, with the archive."""
    try:
        with (
            open_location(shard) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            for member in archive:
                if member.isfile() and not Path(member.name).name.startswith("."):
                    yield archive, member
    except tarfile.ReadError as error:
        raise UserError(
            f"{shard} is not an uncompressed tar file ({error}): a compressed one has to "
            "be read from the start for every image; uncompress it"
        ) from None


def _read_class(kind: str, data: bytes) -> str | None:
    """Read the class in a ``cls`` or ``json`` file, if it states one."""
    try:
        text = data.decode("utf-8").strip()
        if kind == "cls":
            return text or None
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    for key in LABEL_KEYS:
        if key in record:
            return str(record[key])
    return None
