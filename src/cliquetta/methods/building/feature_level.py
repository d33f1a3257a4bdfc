"""Methods that need of an image nothing but the features of its views.

They also predict from features that were encoded once and stored
(:mod:`cliquetta.data.prepared`): a dataset of ImageNet's size then takes seconds.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.views import ViewsConfig
from cliquetta.methods.building.zero_shot_reference import OPTIONAL
from cliquetta.model.clip import encode_views
from cliquetta.model.cuda import Replayed
from cliquetta.types import Batch, Prediction

# Images that an :class:`ImageByImage` takes at once; memory grows with its square.
GROUP = 64


class FeatureLevel(Adapter):
    """Base of methods that read features only."""

    batch_dependence = BatchDependence.INDEPENDENT

    def predict_features(self, features: Tensor) -> Prediction:
        """Predict images by the unit features (B, V, E) of their views, or (B, E)."""
        if features.ndim == 2:
            features = features[:, None]
        E = self.model.embed_dim
        if features.ndim != 3 or features.shape[2] != E or features.shape[1] == 0:
            raise UserError(
                f"features must be (B, V, {E}) for {self.model.id}, got {tuple(features.shape)}"
            )
        if len(features) == 0:
            nothing = torch.zeros(0, len(self.prompts), device=self.model.device)
            return Prediction(nothing, names=self.prompts.names)
        with torch.no_grad():
            features = features.to(self.model.device, non_blocking=True)
            return self._predict_safely(
                inputs=features,
                keys=(),
                predict=lambda: self._predict_features(features),
                encode=lambda: features[:, 0],
            )

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        # The image itself is the only view where none are asked for.
        views = batch.images[:, None] if self.views is None else batch.views
        assert views is not None

        chunk = len(batch)
        if isinstance(self.config, ViewsConfig):
            chunk = self.config.chunk
        features = encode_views(self.model, views, chunk=chunk)
        return self._predict_features(features)

    @abstractmethod
    def _predict_features(self, features: Tensor) -> Prediction:
        """Predict unit features (B, V, E) of at least one image, without gradients."""


class FixedText(FeatureLevel):
    """Base of those that leave the class texts, ``classifier`` (N, E), as they are."""

    def _setup(self) -> None:
        self.classifier = self.model.classifier(self.prompts)
        self.scale = self.model.scale
        self._replayed = Replayed()

    def replay(
        self, step: Callable[[Tensor], tuple[Tensor, ...]], features: Tensor
    ) -> tuple[Tensor, ...]:
        """Call ``step(features)``, recorded on CUDA.

        The step may replace the memory, but wait for nothing. A recording reads and
        writes arguments only, so the memory goes in and comes out as some.
        """
        memory = self.memory
        names = [name for name in memory if name not in OPTIONAL]

        def function(features: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            for name, value in zip(names, state, strict=True):
                memory[name] = value
            results = step(features)
            after = tuple(memory[name] for name in names)
            return after + results

        function.__name__ = step.__name__  # distinguishes recordings
        state = [memory[name] for name in names]
        results = self._replayed(function, features, *state)
        for name, value in zip(names, results, strict=False):
            memory[name] = value
        return results[len(names) :]


class ImageByImage(FixedText):
    """Base of those that learn image by image, computed in groups."""

    batch_dependence = BatchDependence.SEQUENTIAL

    def _predict_features(self, features: Tensor) -> Prediction:
        images = features[:, 0]
        groups = torch.split(images, GROUP)
        p = torch.cat([self.predict_group(group) for group in groups])

        # A probability of zero stays finite.
        least = torch.finfo(torch.float32).tiny
        log_p = p.clamp_min(least).log()
        return Prediction(log_p.float())

    @abstractmethod
    def predict_group(self, features: Tensor) -> Tensor:
        """Predict unit features (B, E), learned from in order: probabilities (B, N)."""


class Transductive(FixedText):
    """Base of those that explain a batch jointly; on CUDA the steps are replayed."""

    batch_dependence = BatchDependence.JOINT
    transduce: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    """Log assignments (B, N) from features, zero-shot ones, texts and config."""

    def _predict_features(self, features: Tensor) -> Prediction:
        images = features[:, 0]
        logits = self.scale * images @ self.classifier.T
        log_prior = logits.log_softmax(dim=-1)
        (logs,) = self._replayed(self._assign, images, log_prior)
        return Prediction(logs.float())

    def _assign(self, features: Tensor, log_prior: Tensor) -> tuple[Tensor]:
        logs = self.transduce(features, log_prior, self.classifier, self.config)
        return (logs,)
