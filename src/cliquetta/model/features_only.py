"""A model that is not here: only the features that it made are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cliquetta.model.clip import CLIP, MissingCapabilityError
from cliquetta.model.preprocess import Preprocess


class FeaturesOnly(CLIP):
    """Stands for a model behind an embedding API: methods that need features only run on it.

    >>> from cliquetta import ClassPrompts, create_method
    >>> import torch
    >>> text = torch.eye(2, 512)
    >>> classes = ClassPrompts(("cat", "dog"), features=text)
    >>> method = create_method("tda", FeaturesOnly(512), classes)
    >>> method.predict_features(text).logits.argmax(dim=1)
    tensor([0, 1])

    Args:
        width: Entries of a feature.
        scale: What cosines are multiplied by to become logits; 100 for CLIP.
        id: A name for records and saved states.
        device: Where methods compute.

    """

    def __init__(
        self,
        width: int,
        *,
        scale: float = 100.0,
        id: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        nn.Module.__init__(self)
        self.id = id or f"features-{width}"
        self.embed_dim = width
        self.image_size = 1
        self.preprocess = Preprocess(1)  # of no image: there are none
        self.visual, self.text, self._tokenizer = nn.Identity(), None, None
        log_scale = torch.tensor(float(scale), device=device).log()
        self.logit_scale = nn.Parameter(log_scale, requires_grad=False)
        self.logit_bias = None

    @property
    def dtype(self) -> torch.dtype:
        """Features are float32."""
        return torch.float32

    @property
    def capabilities(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def encode_image(self, pixels: Tensor, **options: Any) -> Tensor:
        """Raise: there is no image tower."""
        raise MissingCapabilityError(
            f"{self.id} stands for a model that is not here: it cannot encode images"
        )
