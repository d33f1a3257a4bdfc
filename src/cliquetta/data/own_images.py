"""Check a folder, table or tar file of one's own images before anything is predicted."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cliquetta.data.catalogue import FOLDER, get_dataset
from cliquetta.data.dataset import Dataset, FileDataset
from cliquetta.data.doctor import equal_pairs
from cliquetta.data.files import NoClassNamesError, same_name, walk_images
from cliquetta.data.images import ImageError, open_image
from cliquetta.data.remote import read_listed

# Side of the images that most CLIPs take.
USUAL_SIDE = 224
_AHEAD = 64
# The class list of images whose classes nobody named.
_PLACEHOLDER = ("image",)

# How many images are opened, of how many.
OnImage = Callable[[int, int], None]


@dataclass(frozen=True)
class OwnImages:
    """Findings on images of one's own."""

    id: str
    images: int
    # Images per class, of labelled images; empty without labels.
    classes: Mapping[str, int]
    # Other files in the folder, by kind.
    unused: Mapping[str, int] = field(default_factory=dict)
    # Name and reason.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    # Pairs of files with the same content.
    duplicates: tuple[tuple[str, str], ...] = ()
    # Those of them in different classes.
    contradictions: tuple[tuple[str, str], ...] = ()
    # The model's, which sizes are compared with.
    side: int = USUAL_SIDE
    # Pixels of the shorter side: the smallest image.
    shortest: int = 0
    median: int = 0
    # Images whose shorter side is below the model's.
    smaller: tuple[str, ...] = ()
    # Classes of the images that the class list lacks.
    unlisted: tuple[str, ...] = ()
    # Names of the class list without an image.
    empty: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, one sentence each, with the remedy."""
        return tuple(_problems(self))


@dataclass(frozen=True)
class _Opened:
    """Findings from reading one image."""

    digest: str = ""
    side: int = 0
    # Why it cannot be read.
    reason: str = ""


def examine_own(
    id: str,
    *,
    classes: Sequence[str] | None = None,
    side: int = USUAL_SIDE,
    workers: int = 4,
    on_image: OnImage | None = None,
) -> OwnImages:
    """Open every image of a folder, table or tar file, and compare its classes with a list.

    Args:
        id: ``folder:PATH``, ``csv:PATH`` or ``tar:PATH``.
        classes: The class list that is to be predicted with, if there is one.
        side: Side of the images that the model takes.
        workers: Threads that open images.
        on_image: Called after every image.

    Returns:
        The findings.

    Raises:
        UserError: There is no such data, or its layout cannot be read at all.

    """
    from cliquetta.data.workers import map_ahead

    dataset = _open_dataset(id, classes)
    results = map_ahead(
        _Reader(dataset), range(len(dataset)), workers=workers, ahead=_AHEAD
    )
    opened = []
    for result in results:
        opened.append(result)
        if on_image is not None:
            on_image(len(opened), len(dataset))

    keys = dataset.keys
    unreadable: dict[str, str] = {}
    sides = []
    smaller = []
    for key, one in zip(keys, opened, strict=True):
        if one.reason:
            unreadable[key] = one.reason
            continue
        sides.append(one.side)
        if one.side < side:
            smaller.append(key)

    # Equal files should not be of two classes.
    stated = _stated_classes(dataset)
    duplicates: list[tuple[str, str]] = []
    contradictions: list[tuple[str, str]] = []
    for first, second in equal_pairs([one.digest for one in opened]):
        pair = (keys[first], keys[second])
        duplicates.append(pair)
        if stated[first] != stated[second]:
            contradictions.append(pair)

    counts = Counter(name for name in stated if name is not None)
    return OwnImages(
        id=id,
        images=len(dataset),
        classes=dict(counts),
        unused=_unused_files(id),
        unreadable=unreadable,
        duplicates=tuple(duplicates),
        contradictions=tuple(contradictions),
        side=side,
        shortest=min(sides, default=0),
        median=int(statistics.median(sides)) if sides else 0,
        smaller=tuple(smaller),
        unlisted=_names_outside(counts, classes) if classes else (),
        empty=_names_outside(classes, counts) if classes and counts else (),
    )


def _names_outside(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are not among others, as names of classes are compared."""
    listed = {same_name(name) for name in others}
    return tuple(name for name in names if same_name(name) not in listed)


def _open_dataset(id: str, classes: Sequence[str] | None) -> Dataset:
    """Open the images with the classes that they state; without these with the list's."""
    try:
        return get_dataset(id)
    except NoClassNamesError:
        return get_dataset(id, classes=tuple(classes or _PLACEHOLDER))


def _stated_classes(dataset: Dataset) -> list[str | None]:
    """Return the class of every image; ``None`` where nothing is stated."""
    if dataset.labels is None or dataset.names == _PLACEHOLDER:
        return [None] * len(dataset)
    return [
        dataset.names[label] if label >= 0 else None
        for label in dataset.labels.tolist()
    ]


def _unused_files(id: str) -> dict[str, int]:
    """Count the files of a folder that are no images, by kind."""
    unused: Counter[str] = Counter()
    if id.startswith(FOLDER):
        folder = Path(id.removeprefix(FOLDER)).expanduser()
        for _ in walk_images(folder, unused):
            pass
    return dict(unused)


@dataclass(frozen=True)
class _Reader:
    """Reads image after image of a dataset, as threads ask for them."""

    dataset: Dataset

    def __call__(self, row: int) -> _Opened:
        """Read one image."""
        try:
            # The file itself where there is one: equal files are equal bytes.
            if isinstance(self.dataset, FileDataset):
                data = read_listed(self.dataset.paths[row], self.dataset.members[row])
                image = open_image(data)
            else:
                image = self.dataset.load(row)
                data = image.tobytes()
        except ImageError as error:
            return _Opened(reason=error.reason)
        return _Opened(hashlib.sha256(data).hexdigest(), min(image.size))


def _problems(found: OwnImages) -> Iterator[str]:
    """Describe what should be mended before anything is measured on these images."""
    if found.unreadable:
        name, reason = next(iter(found.unreadable.items()))
        count = len(found.unreadable)
        yield f"{count:,} of {found.images:,} cannot be read, such as {name}: {reason}"
    if found.contradictions:
        first, second = found.contradictions[0]
        yield (
            f"{len(found.contradictions):,} images are in two classes, such as {first} and "
            f"{second}: keep one of each"
        )
    repeated = len(found.duplicates) - len(found.contradictions)
    if repeated:
        same = set(found.duplicates) - set(found.contradictions)
        first, second = min(same)
        yield f"{repeated:,} files repeat another one, such as {first} and {second}: delete these"
    if found.smaller:
        yield (
            f"{len(found.smaller):,} of {found.images:,} have a shorter side below the model's "
            f"{found.side} pixels, such as {found.smaller[0]}: they are enlarged, and predicted "
            "less well"
        )
    if found.unlisted:
        names = ", ".join(repr(name) for name in found.unlisted[:5])
        yield (
            f"classes that the list lacks: {names}; rename the folders or give these names with "
            "--classes"
        )
    if found.empty:
        names = ", ".join(repr(name) for name in found.empty[:5])
        yield f"names of the list without an image: {names}; say whether they may occur"
    if found.classes:
        rarest = min(found.classes, key=lambda name: found.classes[name])
        commonest = max(found.classes, key=lambda name: found.classes[name])
        if found.classes[commonest] >= 10 * found.classes[rarest]:
            yield (
                f"{commonest!r} has {found.classes[commonest]:,} images and {rarest!r} "
                f"{found.classes[rarest]:,}: read the accuracy per class, not only the mean"
            )
