"""ECALP: propagate labels from the texts over a graph of the images seen so far.

Li et al., Efficient and Context-Aware Label Propagation for Zero-/Few-Shot
Training-Free Adaptation of Vision-Language Model, ICLR 2025; the zero-shot variant.
Nodes are the texts and the images. An image is joined to its three nearest texts by
cosine and to its eight nearest images by

    (f ⊙ w)·f' / |f ⊙ w|,   w = variance of each dimension over the texts, f the earlier image,

which looks where the classes differ; weights are similarities to the power γ = 10. With
the symmetric normalisation S = D^-½ (W + Wᵀ) D^-½ three rounds Y ← S Y, the rows of
texts held at their class, give an image its scores. Images seen earlier start from a
fifth of their last best score (the label reset), new ones from nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.base import BatchDependence
from cliquetta.methods.building.config import Count, MethodConfig, Positive
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.memory import NON_NEGATIVE, UNIT, Range
from cliquetta.methods.building.registry import register
from cliquetta.types import Prediction

RESET = 5.0  # Earlier images start from their last best score divided by this.
SMOOTHING = 1e-3  # Share of the zero-shot prediction in the probabilities.


@dataclass(frozen=True)
class ECALPConfig(MethodConfig):
    """Label propagation with the authors' settings, the same for all datasets."""

    text_neighbours: Count = 3  # Nearest texts that an image is joined to.
    image_neighbours: Count = 8
    """Nearest images that an image is joined to, itself among them."""
    gamma: Positive = 10.0  # γ: exponent of similarities.
    steps: Count = 3  # Rounds of propagation per image.
    capacity: Count = 2048  # Images remembered, the newest ones; the authors keep all.


def context_similarity(features: Tensor, text: Tensor) -> Tensor:
    """Compare images (M, M), dimensions weighted on the earlier one of each pair."""
    context = text.var(dim=0)  # w
    weighted = F.normalize(features * context, dim=-1)

    # row: the earlier image, column: the later one; then the same for both orders
    similarity = (weighted @ features.T).triu()
    return similarity + similarity.triu(1).T


def nearest_texts(features: Tensor, text: Tensor, count: int) -> Tensor:
    """Return cosines (M, N) with an image's nearest texts; 0 elsewhere."""
    cosine = features @ text.T
    nearest = cosine.topk(min(count, len(text)), dim=-1)

    # no edge has a negative weight
    values = nearest.values.clamp_min(0)
    return torch.zeros_like(cosine).scatter(1, nearest.indices, values)


def nearest_images(similarity: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the nearest images of each node; the last is a copy of the last image.

    Args:
        similarity: Of the images (M, M).
        count: k, number of neighbours.

    Returns:
        Similarities and nodes (M + 1, k) of the neighbours.

    """
    # the nearest among the images alone
    M = len(similarity)
    nearest = similarity.topk(min(count, M), dim=-1)

    # the copy, node M, is one more candidate, as near as the last image
    values = torch.cat([nearest.values, similarity[:, -1:]], dim=1)
    rows = F.pad(nearest.indices, (0, 1), value=M)

    # the k nearest among all of them
    best = values.sort(dim=-1, descending=True, stable=True)
    values = best.values[:, :count].clamp_min(0)
    rows = rows.gather(1, best.indices[:, :count])

    # the copy has the same neighbours as the last image
    values = torch.cat([values, values[-1:]])
    rows = torch.cat([rows, rows[-1:]])
    return values, rows


def spread(
    to_texts: Tensor, weights: Tensor, rows: Tensor, scores: Tensor, steps: int
) -> Tensor:
    """Propagate the scores (M, N) of images: ``steps`` rounds of Y ← S Y.

    Args:
        to_texts: Weights (M, N) of edges to texts.
        weights: Weights (M, k) of edges to images.
        rows: The images (M, k) where those end.
        scores: Of the images at the start.
        steps: Number of rounds.

    """
    tiny = torch.finfo(weights.dtype).tiny
    ends = rows.flatten()

    # D^-½ of images and texts: an edge counts at both of its ends
    degree = to_texts.sum(dim=1) + weights.sum(dim=1)
    degree = degree.index_add(0, ends, weights.flatten())
    root = degree.clamp_min(tiny).rsqrt()[:, None]
    text_root = to_texts.sum(dim=0).clamp_min(tiny).rsqrt()

    # what the texts give in every round: their rows of Y are the identity
    from_texts = root * to_texts * text_root
    for _ in range(steps):
        normalised = root * scores

        # W Y and Wᵀ Y: along the edges of an image, and back along those to it
        along = torch.einsum("mk,mkn->mn", weights, normalised[rows])
        back = (weights[:, :, None] * normalised[:, None]).flatten(0, 1)
        arrived = along.index_add_(0, ends, back)
        scores = torch.addcmul(from_texts, root, arrived)
    return scores


@register("ecalp", setting="all datasets")
class ECALP(FixedText):
    """Labels spread from the texts over a graph of the images seen; no training."""

    batch_dependence = BatchDependence.SEQUENTIAL
    config: ECALPConfig

    def _setup(self) -> None:
        super()._setup()
        capacity = self.config.capacity
        width = self.classifier.shape[1]
        declare = self.memory.declare

        # the newest images, the last one at the end; empty rows stand before them
        declare("features", self.classifier.new_zeros(capacity, width), UNIT)

        # the best score of each image, and its class
        labels = torch.zeros(capacity, dtype=torch.long, device=self.model.device)
        declare("scores", self.classifier.new_zeros(capacity), NON_NEGATIVE)
        declare("labels", labels, Range(below=len(self.prompts)))

        # the number of images so far
        declare("images", torch.zeros((), dtype=torch.long))

    def _predict_features(self, features: Tensor) -> Prediction:
        features = features[:, 0]
        memory = self.memory
        text = self.classifier
        capacity = self.config.capacity

        # earlier images, without the empty rows
        empty = max(0, capacity - int(memory["images"]))
        scores = memory["scores"][empty:]
        labels = memory["labels"][empty:]

        # similarities of all images, and edges to their nearest texts
        nodes = torch.cat([memory["features"][empty:], features])
        similarity = context_similarity(nodes, text)
        to_texts = nearest_texts(nodes, text, self.config.text_neighbours)
        to_texts = to_texts**self.config.gamma

        # image by image, each in a graph of the newest nodes up to it
        reached = []
        for end in range(len(scores) + 1, len(nodes) + 1):
            first = max(0, end - capacity)
            window = slice(first, end)
            forgotten = len(scores) - (end - 1 - first)
            image_scores, scores, labels = self._propagate(
                similarity[window, window],
                to_texts=to_texts[window],
                scores=scores[forgotten:],
                labels=labels[forgotten:],
            )
            reached.append(image_scores)

        # empty rows before the newest images
        padding = (capacity - len(scores), 0)
        memory["features"] = F.pad(nodes[-capacity:], (0, 0, *padding))
        memory["scores"] = F.pad(scores, padding)
        memory["labels"] = F.pad(labels, padding)
        memory["images"] = memory["images"] + len(features)

        # probabilities of the propagated scores and of the texts
        propagated = F.normalize(torch.stack(reached), p=1, dim=-1)
        zero_shot = (self.scale * features @ text.T).softmax(dim=-1)

        # mixed, so that classes out of reach stay finite
        mixed = torch.lerp(propagated, zero_shot, SMOOTHING)
        mixed = mixed.clamp_min(torch.finfo(features.dtype).tiny)
        return Prediction(mixed.log().float())

    def _propagate(
        self, similarity: Tensor, *, to_texts: Tensor, scores: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Predict the last image, which is in the graph twice: as itself and as a copy.

        Args:
            similarity: Of the images (M, M).
            to_texts: Weights (M, N) of their edges to texts.
            scores: Last best scores (M - 1,) of the earlier images.
            labels: Classes (M - 1,) of those.

        Returns:
            Scores (N,) of the copy; best scores and their classes (M,) of the images.

        """
        # edges among images, of weight similarity^γ
        images = len(similarity)
        weights, rows = nearest_images(similarity, self.config.image_neighbours)
        weights = weights**self.config.gamma

        # the copy has the texts of the last image
        to_texts = torch.cat([to_texts, to_texts[-1:]])

        # the label reset: earlier images start from a fifth of their last best score,
        # the last one and its copy from nothing
        start = torch.zeros_like(to_texts)
        start[: images - 1].scatter_(1, labels[:, None], scores[:, None] / RESET)
        reached = spread(to_texts, weights, rows, start, self.config.steps)

        # of the images as they are remembered
        best = reached[:images].max(dim=-1)
        return reached[images], best.values, best.indices
