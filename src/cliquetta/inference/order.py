"""The order in which images are predicted: as listed, or shuffled where it names the classes."""

import warnings
from collections.abc import Iterable, Sequence

from cliquetta.data.labels import LabelReader, comes_class_by_class
from cliquetta.data.listing import ImageList
from cliquetta.inference.predictor import Predictor
from cliquetta.methods.building.base import Adapter, BatchDependence

SHUFFLED = (
    "sub-folders are named after classes and list their images class by class, which would tell "
    "an adapting method the classes: images are predicted in a shuffled order, rows keep the "
    "order of the list (--order listed predicts in that order)"
)


def arrange(
    listing: ImageList, predictor: Predictor, sections: Sequence[tuple[int, int]]
) -> None:
    """Shuffle a list inside of its sections if its order is not to be kept.

    Args:
        listing: The images.
        predictor: The methods, and the options that say which order is wanted.
        sections: Ranges of the list that stay apart: groups, or a shard.

    """
    if is_shuffled(listing, predictor):
        listing.shuffle(sections, predictor.options.seed)


def is_shuffled(listing: ImageList, predictor: Predictor) -> bool:
    """Whether the images of a list are to be predicted in a random order."""
    order = predictor.options.order
    if order != "auto":
        return order == "shuffled"
    names = predictor.row_format.classes
    return depends_on_order(predictor.adapters.values()) and names_classes(
        listing, names
    )


def depends_on_order(adapters: Iterable[Adapter]) -> bool:
    """Whether the order of the images may change a prediction."""
    kinds = {adapter.batch_dependence for adapter in adapters}
    return kinds != {BatchDependence.INDEPENDENT}


def names_classes(listing: ImageList, names: Sequence[str]) -> bool:
    """Whether folders are called as classes and their images come class by class."""
    reader = LabelReader(names, stated=())
    class_of: dict[str, str] = {}
    for folder in listing.folders():
        if folder not in class_of:
            class_of[folder] = reader.read_folder(folder)
    named = set(class_of.values()) - {""}
    if len(named) < 2:
        return False
    return comes_class_by_class(class_of[folder] for folder in listing.folders())


def say_shuffled(*, asked: bool) -> None:
    """Say once that images are predicted in a random order that nobody asked for."""
    if not asked:
        warnings.warn(SHUFFLED, stacklevel=2)
