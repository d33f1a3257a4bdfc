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

from cliquetta.methods.base import BatchDependence
from cliquetta.methods.building.config import Count, MethodConfig, Positive
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.memory import NON_NEGATIVE, UNIT, Range
from cliquetta.methods.registry import register
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
    """Similarities (M, M) of images, dimensions weighted on the earlier one by their variance."""
    weighted = F.normalize(features * text.var(dim=0), dim=-1) @ features.T
    return weighted.triu() + weighted.triu(1).T


def nearest_texts(features: Tensor, text: Tensor, count: int) -> Tensor:
    """Cosines (M, N) with each image's nearest texts, zero elsewhere and if negative."""
    cosine = features @ text.T
    nearest = cosine.topk(min(count, len(text)), dim=-1)
    return torch.zeros_like(cosine).scatter(
        1, nearest.indices, nearest.values.clamp_min(0)
    )


def nearest_images(similarity: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and rows (M + 1, k) of the nearest images; the last node is a copy of the last."""
    M = len(similarity)
    nearest = similarity.topk(min(count, M), dim=-1)
    values = torch.cat([nearest.values, similarity[:, -1:]], dim=1)
    rows = F.pad(nearest.indices, (0, 1), value=M)
    best = values.sort(dim=-1, descending=True, stable=True)
    values = best.values[:, :count].clamp_min(0)
    rows = rows.gather(1, best.indices[:, :count])
    return torch.cat([values, values[-1:]]), torch.cat([rows, rows[-1:]])


def spread(
    to_texts: Tensor, weights: Tensor, rows: Tensor, scores: Tensor, steps: int
) -> Tensor:
    """``steps`` rounds of ``scores`` (M, N) of images ← S Y, with Y those of texts and images.

    Images have edges to texts ``to_texts`` (M, N) and to images ``rows``, of
    ``weights`` (M, k).
    """
    tiny = torch.finfo(weights.dtype).tiny
    ends = rows.flatten()
    degree = to_texts.sum(dim=1) + weights.sum(dim=1)
    degree = degree.index_add(0, ends, weights.flatten())
    image_degree = degree.clamp_min(tiny).rsqrt()[:, None]
    text_degree = to_texts.sum(dim=0).clamp_min(tiny).rsqrt()
    texts = (
        image_degree * to_texts * text_degree
    )  # the rows of texts in Y are the identity
    for _ in range(steps):
        own = image_degree * scores
        out = torch.einsum("mk,mkn->mn", weights, own[rows])
        back = (weights[:, :, None] * own[:, None]).flatten(0, 1)
        scores = torch.addcmul(texts, image_degree, out.index_add_(0, ends, back))
    return scores


@register("ecalp", setting="all datasets")
class ECALP(FixedText):
    """Labels spread from the texts over a graph of the images seen; no training."""

    batch_dependence = BatchDependence.SEQUENTIAL
    config: ECALPConfig

    def _setup(self) -> None:
        super()._setup()
        M, E = self.config.capacity, self.classifier.shape[1]
        self.memory.declare("features", self.classifier.new_zeros(M, E), UNIT)
        self.memory.declare("scores", self.classifier.new_zeros(M), NON_NEGATIVE)
        labels = torch.zeros(M, dtype=torch.long, device=self.model.device)
        self.memory.declare("labels", labels, Range(below=len(self.prompts)))
        self.memory.declare("images", torch.zeros((), dtype=torch.long))

    def _predict_features(self, features: Tensor) -> Prediction:
        features, memory, config = features[:, 0], self.memory, self.config
        M, text = config.capacity, self.classifier
        empty = max(0, M - int(memory["images"]))
        nodes = torch.cat([memory["features"][empty:], features])
        similarity = context_similarity(nodes, text)
        to_texts = nearest_texts(nodes, text, config.text_neighbours) ** config.gamma
        scores, labels = memory["scores"][empty:], memory["labels"][empty:]
        reached = []
        for end in range(len(scores) + 1, len(nodes) + 1):
            window = slice(max(0, end - M), end)  # the oldest is forgotten
            held = window.start - end + 1 or len(scores)
            own, scores, labels = self._propagate(
                similarity[window, window],
                to_texts[window],
                scores[held:],
                labels[held:],
            )
            reached.append(own)
        for name, values in (
            ("features", nodes[-M:]),
            ("scores", scores),
            ("labels", labels),
        ):
            memory[name] = F.pad(
                values, [0, 0] * (values.ndim - 1) + [M - len(values), 0]
            )
        memory["images"] = memory["images"] + len(features)
        zero_shot = (self.scale * features @ text.T).softmax(dim=-1)
        tiny = torch.finfo(features.dtype).tiny
        mixed = torch.lerp(
            F.normalize(torch.stack(reached), p=1, dim=-1), zero_shot, SMOOTHING
        )
        return Prediction(mixed.clamp_min(tiny).log().float())

    def _propagate(
        self, similarity: Tensor, to_texts: Tensor, scores: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (N,) of the last image; best scores and labels (M,) of all, from those before."""
        config, M = self.config, len(similarity)
        weights, rows = nearest_images(similarity, config.image_neighbours)
        to_texts = torch.cat([to_texts, to_texts[-1:]])
        start = torch.zeros_like(to_texts)
        start[: M - 1].scatter_(1, labels[:, None], scores[:, None] / RESET)
        reached = spread(to_texts, weights**config.gamma, rows, start, config.steps)
        best = reached[:M].max(dim=-1)
        return reached[M], best.values, best.indices
