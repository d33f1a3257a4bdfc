"""Scores of predictions where labels are known: accuracy, confusion, and whether adapting helped.

Labels meet predictions here, when rows are counted; no method ever sees one.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cliquetta.significance import PairedTest


@dataclass(frozen=True)
class ClassScore:
    """How the images of one class were predicted."""

    images: int
    right: int

    @property
    def accuracy(self) -> float:
        """Share of right predictions, in percent."""
        return 100 * self.right / self.images


@dataclass
class MethodScores:
    """How the predictions of one method agree with known labels.

    >>> scores = MethodScores()
    >>> scores.add(label="cat", predicted="cat", zero_shot="dog")
    >>> scores.add(label="dog", predicted="dog", zero_shot="dog")
    >>> scores.accuracy, scores.zero_shot_accuracy, scores.versus_zero_shot.repaired
    (100.0, 50.0, 1)
    """

    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of images by label and predicted class."""
    compared: int = 0
    """Images that have a zero-shot prediction to compare with."""
    zero_shot_right: int = 0
    repaired: int = 0
    """Images that zero-shot got wrong and the method right."""
    broken: int = 0
    """Images that zero-shot got right and the method wrong."""

    def add(self, *, label: str, predicted: str, zero_shot: str | None) -> None:
        """Count an image whose label is known."""
        self.confusion[label, predicted] += 1
        if zero_shot is None:
            return
        before = zero_shot == label
        after = predicted == label
        self.compared += 1
        self.zero_shot_right += before
        self.repaired += after and not before
        self.broken += before and not after

    @property
    def images(self) -> int:
        """Number of labelled images."""
        return self.confusion.total()

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions, in percent; ``None`` without a labelled image."""
        right = sum(
            count
            for (label, predicted), count in self.confusion.items()
            if label == predicted
        )
        return 100 * right / self.images if self.images else None

    @property
    def zero_shot_accuracy(self) -> float | None:
        """That of plain CLIP; ``None`` where it is not beside the method."""
        return 100 * self.zero_shot_right / self.compared if self.compared else None

    @property
    def per_class(self) -> dict[str, ClassScore]:
        """Scores by label, in alphabetic order."""
        images: Counter[str] = Counter()
        for (label, _), count in self.confusion.items():
            images[label] += count
        return {
            label: ClassScore(images=images[label], right=self.confusion[label, label])
            for label in sorted(images)
        }

    @property
    def mistakes(self) -> list[tuple[str, str, int]]:
        """Label, predicted class and number of images of what was confused, most frequent first."""
        return [
            (label, predicted, count)
            for (label, predicted), count in self.confusion.most_common()
            if label != predicted
        ]

    @property
    def versus_zero_shot(self) -> PairedTest | None:
        """The exact paired test against plain CLIP; ``None`` where it is not beside the method."""
        if not self.compared:
            return None
        return PairedTest.of_counts(
            images=self.compared, repaired=self.repaired, broken=self.broken
        )

    def to_dict(self) -> dict[str, Any]:
        """All scores as JSON types."""
        test = self.versus_zero_shot
        confusion: dict[str, dict[str, int]] = {}
        for (label, predicted), count in sorted(self.confusion.items()):
            confusion.setdefault(label, {})[predicted] = count
        return {
            "labelled": self.images,
            "accuracy": self.accuracy,
            "zero_shot_accuracy": self.zero_shot_accuracy,
            "repaired": None if test is None else test.repaired,
            "broken": None if test is None else test.broken,
            "p": None if test is None else test.p,
            "per_class": {
                label: {"images": score.images, "accuracy": score.accuracy}
                for label, score in self.per_class.items()
            },
            "confusion": confusion,
        }
