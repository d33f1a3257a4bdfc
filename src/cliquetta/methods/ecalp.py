"""ECALP: propagate labels from the texts over a graph of the images seen so far.

Li et al., Efficient and Context-Aware Label Propagation for Zero-/Few-Shot Training-Free Adaptation
of Vision-Language Model, ICLR 2025; the zero-shot variant. Nodes are the texts and the images. An
image is joined to its three nearest texts by cosine and to its eight nearest images by

    (f ⊙ w)·f' / |f ⊙ w|,   w = variance of each dimension over the texts,

which looks where the classes differ; weights are similarities to the power γ = 10. With the
symmetric normalisation S = D^-½ (W + Wᵀ) D^-½ three rounds Y ← S Y, the rows of texts held at
their class, give an image its scores. Images seen earlier start from a fifth of their last best
score (the label reset), new ones from nothing.

The official code (MIT) keeps every image of the stream and redoes this for each. Memory is fixed
here: ours keeps the newest ``capacity`` images, adds a batch at a time and leaves out a node's edge
to itself. With batches of one and no overflow that is the paper's procedure. Logits are the
logarithm of normalised scores mixed with a thousandth of the zero-shot answer, so that classes out
of reach stay finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods._shared.config import Count, MethodConfig, Positive
from cliquetta.methods._shared.feature_level import FixedText
from cliquetta.methods._shared.mixtures import nearest_affinity
from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import register
from cliquetta.types import Prediction

RESET = 5.0
"""Earlier images start from their last best score divided by this."""
SMOOTHING = 1e-3
"""Share of the zero-shot answer in the probabilities."""


@dataclass(frozen=True)
class ECALPConfig(MethodConfig):
    """Label propagation with the authors' settings, the same for all datasets."""

    text_neighbours: Count = 3
    """Nearest texts that an image is joined to."""
    image_neighbours: Count = 8
    """Nearest images that an image is joined to."""
    gamma: Positive = 10.0
    """γ: exponent of similarities."""
    steps: Count = 3
    """Rounds of propagation per batch."""
    capacity: Count = 2048
    """Images remembered, the newest ones; the paper keeps all."""


def context_similarity(features: Tensor, text: Tensor) -> Tensor:
    """Similarities (M, M) of images, dimensions weighted by their variance over the texts."""
    return F.normalize(features * text.var(dim=0), dim=-1) @ features.T


def nearest_texts(features: Tensor, text: Tensor, count: int) -> Tensor:
    """Cosines (M, N) with each image's nearest texts, zero elsewhere and if negative."""
    cosine = features @ text.T
    nearest = cosine.topk(min(count, len(text)), dim=-1)
    return torch.zeros_like(cosine).scatter(1, nearest.indices, nearest.values.clamp_min(0))


def spread(to_texts: Tensor, to_images: Tensor, scores: Tensor, steps: int) -> Tensor:
    """``steps`` rounds of ``scores`` (M, N) of images ← S Y, with Y those of texts and images.

    Edges lead from images only: ``to_texts`` (M, N) and ``to_images`` (M, M). Scores are multiplied
    by D^-½ instead of the larger matrix.
    """
    between = to_images + to_images.T
    tiny = torch.finfo(between.dtype).tiny
    image_degree = (between.sum(dim=1) + to_texts.sum(dim=1)).clamp_min(tiny).rsqrt()[:, None]
    text_degree = to_texts.sum(dim=0).clamp_min(tiny).rsqrt()
    texts = image_degree * to_texts * text_degree  # the rows of texts in Y are the identity
    for _ in range(steps):
        scores = torch.addcmul(texts, image_degree, between @ (image_degree * scores))
    return scores


@register(
    "ecalp",
    paper="Li et al., Efficient and Context-Aware Label Propagation for Zero-/Few-Shot "
    "Training-Free Adaptation of Vision-Language Model, ICLR 2025",
)
class ECALP(FixedText):
    """Labels spread from the texts over a graph of the images seen; no training.

    log of the scores that reach an image.
    """

    batch_dependence = BatchDependence.JOINT
    config: ECALPConfig

    def _setup(self) -> None:
        super()._setup()
        M, E = self.config.capacity, self.classifier.shape[1]
        self.memory.declare("features", self.classifier.new_zeros(M, E))
        self.memory.declare("scores", self.classifier.new_zeros(M))
        labels = torch.zeros(M, dtype=torch.long, device=self.model.device)
        self.memory.declare("labels", labels, below=len(self.prompts))
        self.memory.declare("images", torch.zeros((), dtype=torch.long))

    def _predict_features(self, features: Tensor) -> Prediction:
        features, memory, M = features[:, 0], self.memory, self.config.capacity
        # nodes of zeros join nothing: a GPU takes all, so that shapes stay and can be recorded
        empty = 0 if features.is_cuda else max(0, M - int(memory["images"]))
        nodes = torch.cat([memory["features"][empty:], features])
        logs, scores, labels = self._replayed(
            self._propagate, nodes, memory["scores"][empty:], memory["labels"][empty:]
        )
        for name, values in (("features", nodes), ("scores", scores), ("labels", labels)):
            newest = values[-M:]
            memory[name] = F.pad(newest, [0, 0] * (values.ndim - 1) + [M - len(newest), 0])
        memory["images"] = memory["images"] + len(features)
        return Prediction(logs.float())

    def _propagate(
        self, nodes: Tensor, scores: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the new ones of image nodes (M, E), best scores and labels of all.

        The earlier ones, which come first, start from ``scores`` of their ``labels``.
        """
        config, text, held = self.config, self.classifier, len(scores)
        similarity, gamma = context_similarity(nodes, text), config.gamma
        to_images = nearest_affinity(similarity, config.image_neighbours, power=gamma)
        to_texts = nearest_texts(nodes, text, config.text_neighbours) ** gamma
        start = torch.zeros_like(to_texts)
        start[:held].scatter_(1, labels[:, None], scores[:, None] / RESET)
        reached = spread(to_texts, to_images, start, config.steps)

        answer = F.normalize(reached[held:], p=1, dim=-1)
        zero_shot = (self.scale * nodes[held:] @ text.T).softmax(dim=-1)
        tiny = torch.finfo(nodes.dtype).tiny
        logs = torch.lerp(answer, zero_shot, SMOOTHING).clamp_min(tiny).log()
        best = reached.max(dim=-1)
        return logs, best.values, best.indices
