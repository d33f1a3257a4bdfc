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

from cliquetta.methods.building.base import Adapter


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
        """Classify one image (H, W, C)."""
        return self.predict_all([arg])[0]

    def predict_all(self, args: Sequence[NDArray[np.uint8]]) -> list[Classification]:
        """Classify a batch of images (H, W, C), which the method may learn from."""
        images = [Image.fromarray(np.asarray(image)) for image in args]
        prediction = self.adapter.predict(images)
        probabilities, classes = prediction.topk()
        confidences = probabilities[:, 0].tolist()
        names = self.classes
        logits = prediction.logits.cpu().numpy() if self.store_logits else None

        labels = []
        for row, best in enumerate(classes[:, 0].tolist()):
            label: dict[str, Any] = {
                "label": names[best],
                "confidence": confidences[row],
            }
            if logits is not None:
                label["logits"] = logits[row]
            labels.append(Classification(**label))
        return labels
