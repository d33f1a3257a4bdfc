"""Labels as users state them: sub-folders named as classes, names, or numbers."""

import posixpath
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from cliquetta.data.files import same_name
from cliquetta.errors import UserError

FOLDER = "folder"
"""Value of the option ``labels`` by which sub-folders name the classes of their images."""


class LabelReader:
    """Reads stated labels as names of a class list.

    >>> reader = LabelReader(["polar bear", "cat"], stated=["Polar_Bear", "dog"])
    >>> reader.read("Polar_Bear"), reader.read("dog")
    ('polar bear', '')

    Args:
        names: The class list.
        stated: All labels that occur. If all of them are whole numbers and no class
            is called so, they count classes from 0.

    """

    def __init__(self, names: Sequence[str], stated: Iterable[str]) -> None:
        # Labels that are empty state nothing.
        stripped = [text.strip() for text in stated]
        labels = [text for text in stripped if text]
        by_name = {same_name(name): name for name in names}

        # Numbers count classes, unless one is a class by its name.
        are_numbers = all(label.isdecimal() for label in labels)
        name_class = any(label in by_name for label in labels)
        if are_numbers and not name_class and labels:
            by_name = {str(number): name for number, name in enumerate(names)}
        self._by_name = by_name

    def read(self, stated: str) -> str:
        """Return the class that a label names, or an empty text if it names none."""
        return self._by_name.get(same_name(stated), "")

    def read_folder(self, folder: str) -> str:
        """Return the class that the deepest folder of a path names, or an empty text."""
        for part in reversed(folder.split("/")):
            if name := self.read(part):
                return name
        return ""


def last_folder(path: str) -> str:
    """Return the name of the folder that holds a file, by its path or URL."""
    return posixpath.basename(posixpath.dirname(path.replace("\\", "/")))


def check_labels(
    stated: Counter[str], readable: Counter[str], names: Sequence[str]
) -> None:
    """Refuse labels of which none names a class.

    Args:
        stated: How often every label occurs.
        readable: How often every class occurs that a label names.
        names: The class list.

    Raises:
        UserError: No image has a label that names a class.

    """
    if readable:
        return
    frequent = ", ".join(repr(label) for label, _ in stated.most_common(3) if label)
    what = f"the labels are {frequent}" if frequent else "there are none"
    listed = ", ".join(names[:3])
    raise UserError(
        f"no label names a class: {what}, the classes are {listed}, ...: name the classes "
        "as the labels do, or leave out --labels"
    )


def comes_class_by_class(labels: Iterable[str | int]) -> bool:
    """Whether neighbours in a list share their class far more often than by chance.

    >>> comes_class_by_class(["cat", "cat", "dog", "dog"])
    True
    >>> comes_class_by_class(["cat", "dog", "dog", "cat", "dog", "cat"])
    False

    The limit is half-way between chance and a list that is sorted by class; a list in
    which every class stands in one piece is sorted, however short it is.
    """
    listed = list(labels)
    total = len(listed)
    counts = Counter(listed)
    if len(counts) < 2:
        return False

    equal_neighbours = sum(one == other for one, other in pairwise(listed))
    pieces = total - equal_neighbours
    if equal_neighbours and pieces == len(counts):
        return True

    # Two images drawn at random are of one class this often.
    by_chance = sum((count / total) ** 2 for count in counts.values())
    limit = by_chance + (1 - by_chance) / 2
    return equal_neighbours / (total - 1) > limit
