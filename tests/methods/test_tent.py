"""Tent against a training loop on the model's own LayerNorms."""

import torch

from cliquetta.methods.tent import Tent, TentConfig
from tests._helpers.live import Live, descend, double_clip, entropies, flat
from tests._helpers.tiny_world import TINY_IMAGES, TINY_PROMPTS


def test_a_stream_equals_a_training_loop() -> None:
    tent = Tent(double_clip(), TINY_PROMPTS, TentConfig())
    live = Live()
    optimiser = torch.optim.Adam(live.norms, lr=1e-3, betas=(0.9, 0.999))

    for images in TINY_IMAGES.split([4, 3, 3]):
        prediction = tent.predict(images).logits

        # predicted before the step
        logits = live.logits(images)
        torch.testing.assert_close(prediction, logits.detach().float())
        mean_entropy = entropies(logits).mean()
        descend(optimiser, mean_entropy)

    torch.testing.assert_close(tent.memory["norms.values"], flat(live.norms))
