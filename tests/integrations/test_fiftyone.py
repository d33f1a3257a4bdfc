"""The FiftyOne model against the method itself; needs no database."""

import numpy as np
import pytest
from PIL import Image

from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tolerance import FEATURE, SUM

pytest.importorskip("fiftyone")


def test_predictions_are_those_of_the_method(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts
) -> None:
    from fiftyone.core.models import Model

    from cliquetta.integrations.fiftyone import FiftyOneModel

    model = FiftyOneModel(create_method("tent", tiny_clip, tiny_prompts))
    assert isinstance(model, Model)
    assert model.media_type == "image"
    assert model.classes == list(tiny_prompts.names)

    plain = create_method("tent", tiny_clip, tiny_prompts)
    generator = np.random.default_rng(0)

    for shape in ((40, 48, 3), (32, 32, 4), (20, 30)):  # colour, with alpha, grey
        images = [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(3)]
        expected = plain.predict([Image.fromarray(image) for image in images])
        with model:
            model.store_logits = True
            labels = model.predict_all(images)
        best = expected.probabilities.max(dim=1)
        names = [tiny_prompts.names[i] for i in best.indices.tolist()]
        assert [label.label for label in labels] == names
        np.testing.assert_allclose(
            [label.confidence for label in labels], best.values, atol=SUM
        )
        logits = np.stack([label.logits for label in labels])
        np.testing.assert_allclose(logits, expected.logits, atol=FEATURE)

    assert model.predict(images[0]).label in model.classes
