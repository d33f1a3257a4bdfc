"""An adapted model inside FiftyOne.

>>> import fiftyone  # doctest: +SKIP
>>> from cliquetta import create_method, create_model
>>> method = create_method("domain_norm", create_model("micro"), ["cat", "dog"])
>>> dataset = fiftyone.Dataset.from_images_dir("photos")  # doctest: +SKIP
>>> dataset.apply_model(FiftyOneModel(method), "clip", batch_size=64)  # doctest: +SKIP
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fiftyone.core.labels import Classification
from fiftyone.core.models import LogitsMixin, Model
from numpy.typing import NDArray
from PIL import Image

from cliquetta.methods.base import Adapter


class FiftyOneModel(LogitsMixin, Model):  # type: ignore[misc]
    """A method as a FiftyOne model: images in, classifications with confidence out.

    It goes on adapting from batch to batch; give ``batch_size`` to ``apply_model``,
    because images that come one by one teach methods less. ``Adapter.reset`` makes it
    forget.
    """

    media_type = "image"
    has_logits = True
    ragged_batches = False
    transforms = None
    preprocess = True

    def __init__(self, adapter: Adapter) -> None:
        LogitsMixin.__init__(self)
        self.adapter = adapter
        self.config = adapter.config

    @property
    def classes(self) -> list[str]:
        """Class names, in the order of the logits."""
        return list(self.adapter.prompts.names)

    def predict(self, arg: NDArray[np.uint8]) -> Classification:
        """The class of one image (H, W, C)."""
        return self.predict_all([arg])[0]

    def predict_all(self, args: Sequence[NDArray[np.uint8]]) -> list[Classification]:
        """The class of every image (H, W, C) of a batch, which the method may learn from."""
        prediction = self.adapter.predict(
            [Image.fromarray(np.asarray(image)) for image in args]
        )
        best, ranked = (part[:, 0].tolist() for part in prediction.topk())
        rows: list[dict[str, Any]] = [
            {"label": self.classes[index], "confidence": confidence}
            for confidence, index in zip(best, ranked, strict=True)
        ]
        if self.store_logits:
            for label, logits in zip(
                rows, prediction.logits.cpu().numpy(), strict=True
            ):
                label["logits"] = logits
        return [Classification(**label) for label in rows]
