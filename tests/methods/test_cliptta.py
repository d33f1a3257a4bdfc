"""CLIPTTA's loss against loops over pairs, its steps and memory against a training loop."""

import torch
from torch import Tensor

from cliquetta.methods.cliptta import CLIPTTA, CLIPTTAConfig
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.live import Live, descend, double_clip, flat
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


def literal_loss(v: Tensor, text: Tensor, scale: float) -> Tensor:
    """Entropies over the batch, image by image."""
    texts = []
    for f in v:
        label = int((text @ f).argmax())
        texts.append(text[label])
    loss = v.new_zeros(())

    for f in v:
        logits = torch.stack([scale * (f @ t) for t in texts])
        p = logits.softmax(dim=0)
        loss = loss - (p * p.log()).sum()
    return loss / len(v)


def test_a_stream_equals_a_training_loop() -> None:
    config = CLIPTTAConfig(lr=1e-3, steps=3, memory_shots=1, diversity_weight=0.7)
    cliptta = CLIPTTA(double_clip(), TINY_PROMPTS, config)
    live = Live()
    optimiser = torch.optim.Adam(live.norms, lr=1e-3, eps=1e-6)
    remembered: dict[int, tuple[float, Tensor]] = {}

    def total_loss(images: Tensor) -> Tensor:
        probabilities = live.logits(images).softmax(dim=-1)
        mean = probabilities.mean(dim=0)
        evenness = (mean * (mean + 1e-6).log()).sum()
        features = live.features(images)
        contrast = literal_loss(features, live.text, live.scale)
        return contrast + 0.7 * evenness

    for images in TINY_IMAGES.split([5, 5]):
        prediction = cliptta.predict(images).logits

        # every class remembers the image that is likeliest of it
        with torch.no_grad():
            cosines = live.features(images) @ live.text.T
        for image, p in zip(images, cosines.softmax(dim=-1), strict=True):
            best, label = p.max(dim=0)
            before, _ = remembered.get(int(label), (0.0, image))
            if best > before:
                remembered[int(label)] = (float(best), image)

        # at most one image per class: all of them are drawn
        drawn = torch.stack([image for _, image in remembered.values()])
        for _ in range(3):
            loss = total_loss(images) + total_loss(drawn)
            descend(optimiser, loss)
        torch.testing.assert_close(prediction, live.predict(images))

    torch.testing.assert_close(cliptta.memory["norms.values"], flat(live.norms))
    for label, (_, image) in remembered.items():
        torch.testing.assert_close(cliptta.memory["images"][label, 0], image)


def test_every_class_is_drawn_equally_often() -> None:
    """Two of every class that has them, other ones each time; one where there is one."""
    config = CLIPTTAConfig(memory_shots=4, memory_drawn=2 * 5 + 4, steps=1)
    cliptta = CLIPTTA(TINY, TINY_PROMPTS, config)
    # four images of class 0, whose pixels are their numbers, and one of class 3
    cliptta.memory["doubt"][0, :4] = 0.5
    cliptta.memory["images"][0] = torch.arange(4.0).view(4, 1, 1, 1)
    cliptta.memory["doubt"][3, :1] = 0.5
    cliptta.memory["images"][3, 0] = 9.0

    seen = set()
    for _ in range(20):
        first, second, third = sorted(cliptta._recall()[:, 0, 0, 0].tolist())
        assert first < second <= 3
        assert third == 9
        seen |= {first, second}

    assert seen == {0.0, 1.0, 2.0, 3.0}


def test_one_image_of_every_class_is_drawn_if_there_are_more_classes_than_images_to_draw() -> (
    None
):
    """Of 50 classes, 40 / 50 of an image each would be none."""
    names = tuple(f"thing {number}" for number in range(50))
    config = CLIPTTAConfig(memory_shots=2, memory_drawn=40)
    cliptta = CLIPTTA(TINY, ClassPrompts(names), config)
    # pixels of an image are the number of its class
    remembered = [0, 17, 49]
    for number in remembered:
        cliptta.memory["doubt"][number] = 0.5
        cliptta.memory["images"][number] = float(number)

    drawn = cliptta._recall()
    assert drawn[:, 0, 0, 0].tolist() == remembered
