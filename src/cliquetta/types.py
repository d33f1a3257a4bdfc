"""Types that all packages share: batches, predictions and views."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cliquetta.errors import UserError


@dataclass(frozen=True)
class Batch:
    """Preprocessed images and their names; ``views`` only when the method asked for them.

    ``images`` is (B, 3, H, W). ``views`` is (B, V, 3, H, W) with view 0 equal to
    ``images``; it is made per image from ``(seed, key)``, so that all methods of a
    comparison see the same.
    """

    images: Tensor
    keys: tuple[str, ...] = ()
    views: Tensor | None = None

    def __len__(self) -> int:
        """Number of images."""
        return self.images.shape[0]

    def __repr__(self) -> str:
        views = "" if self.views is None else f", views={self.views.shape[1]}"
        keys = f", keys=({self.keys[0]!r}, ...)" if self.keys else ""
        return f"Batch(images={tuple(self.images.shape)}{views}{keys})"

    def to(self, device: torch.device | str) -> "Batch":
        """Move the batch to a device."""
        views = None if self.views is None else self.views.to(device, non_blocking=True)
        return Batch(self.images.to(device, non_blocking=True), self.keys, views)

    def __getitem__(self, rows: slice) -> "Batch":
        """A part of the batch, in order."""
        views = None if self.views is None else self.views[rows]
        return Batch(self.images[rows], self.keys[rows], views)


class Rejection(NamedTuple):
    """The images of a batch that are of none of the classes."""

    score: Tensor
    """(B,), how unsure: 0 to 1."""
    rejected: Tensor
    """(B,) bool."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of a method: ``logits`` (B, N), float32, finite, always those scored.

    ``softmax(logits)`` are the class probabilities of the method. Methods that compare
    features return cosines times CLIP's scale; those that average or mix probabilities
    return their logarithms. ``evidence`` explains a prediction to a report (cliques,
    prompts used, losses); nothing that is scored may be computed from it. ``rejection``
    says which images are of none of the classes, where a method was asked to
    (:meth:`Adapter.enable_rejection`). ``names`` is the class list. ``errors`` says why
    images could not be read, by their place in the batch, where a method was asked for
    rows of these (``errors="row"`` of :meth:`Adapter.predict`): their logits are NaN,
    and evidence is about the other images.

    >>> prediction = Prediction(torch.tensor([[0.0, 2.0, 1.0]]), names=("cat", "dog", "ship"))
    >>> prediction.labels
    ['dog']
    """

    logits: Tensor
    evidence: Mapping[str, Any] = field(default_factory=dict)
    rejection: Rejection | None = None
    names: tuple[str, ...] = ()
    errors: Mapping[int, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        evidence = f", evidence={sorted(self.evidence)}" if self.evidence else ""
        return f"Prediction(logits={tuple(self.logits.shape)}{evidence})"

    @property
    def probabilities(self) -> Tensor:
        """Softmax of the logits, (B, N)."""
        return self.logits.softmax(dim=-1)

    @property
    def labels(self) -> list[str | None]:
        """The best class of every image by name; ``None`` where it could not be read."""
        names = self._known_names()
        best = self.logits.argmax(dim=-1).tolist()
        return [
            None if row in self.errors else names[index]
            for row, index in enumerate(best)
        ]

    def top(
        self, k: int = 1, *, independent: bool = False
    ) -> list[list[tuple[str, float]]]:
        """Name the best classes of every image, with their probabilities.

        >>> prediction = Prediction(torch.tensor([[0.0, 2.0, 1.0]]), names=("cat", "dog", "ship"))
        >>> [name for name, probability in prediction.top(2)[0]]
        ['dog', 'ship']

        Args:
            k: Classes per image; all where there are fewer.
            independent: See :meth:`topk`.

        Returns:
            ``(name, probability)`` pairs of every image, the best first; none of an
            image that could not be read.

        Raises:
            UserError: The prediction does not know the class names.

        """
        names = self._known_names()
        probabilities, classes = self.topk(k, independent=independent)
        ranked: list[list[tuple[str, float]]] = []
        for row, indices in enumerate(classes.tolist()):
            values = probabilities[row].tolist()
            pairs = [
                (names[index], p) for index, p in zip(indices, values, strict=True)
            ]
            ranked.append([] if row in self.errors else pairs)
        return ranked

    def topk(self, k: int = 1, *, independent: bool = False) -> tuple[Tensor, Tensor]:
        """Rank the classes of every image, as tensors.

        >>> probabilities, classes = Prediction(torch.tensor([[0.0, 2.0, 1.0]])).topk(2)
        >>> classes
        tensor([[1, 2]])

        Args:
            k: Classes per image; all where there are fewer.
            independent: Whether a class has the sigmoid of its logit as its
                probability, as models such as SigLIP mean it, and not its share of the
                softmax.

        Returns:
            Probabilities and indices of the best classes, (B, k) each, the best first.

        """
        probabilities = self.logits.sigmoid() if independent else self.probabilities
        best = probabilities.topk(min(k, self.logits.shape[-1]), dim=-1)
        return best.values, best.indices

    def _known_names(self) -> tuple[str, ...]:
        if len(self.names) != self.logits.shape[-1]:
            raise UserError(
                "this prediction does not know its classes: those of method.predict(...) do; "
                "otherwise give Prediction(..., names=...)"
            )
        return self.names


@dataclass(frozen=True)
class ViewSpec:
    """The augmented views that a method wants: ``count`` of ``kind``, the first plain.

    ``kind`` is a key of :data:`cliquetta.data.views.VIEW_KINDS` (``resized-crop``,
    ``zoom-crop``, ``augmix``); ``zoom`` is the shorter side, as a multiple of the
    model's input size, to which ``zoom-crop`` enlarges before it crops; ``min_area`` is
    the smallest crop of the other kinds, as a fraction of the image's area.
    """

    kind: str
    count: int = 64
    zoom: float = 1.15
    min_area: float = 0.08
