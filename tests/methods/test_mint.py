"""Mint against loops over images and autograd on the model's own LayerNorms."""

import torch
from torch import Tensor

from cliquetta.methods.mint import Mint, MintConfig
from tests._helpers.live import Live, double_clip, flat, load_norms, unit_rows
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import SUM


def test_a_stream_equals_loops() -> None:
    config = MintConfig(text_weight=4)
    mint = Mint(double_clip(), TINY_PROMPTS, config)
    text = mint.classifier
    gradients = []
    seen: list[list[Tensor]] = [[] for _ in text]
    stepped: list[list[Tensor]] = [[] for _ in text]

    for images in TINY_IMAGES.split([4, 1, 5]):
        live = Live()  # the norms start again with every batch
        z = live.features(images)
        labels = (z @ text.T).argmax(dim=-1).tolist()
        for feature, label in zip(z.detach(), labels, strict=True):
            seen[label].append(feature)

        # images should lie near their class's mean, and far from everybody's
        everything = torch.stack([f for part in seen for f in part]).mean(dim=0)
        objective = z.new_zeros(())
        for feature, label in zip(z, labels, strict=True):
            own = torch.stack(seen[label]).mean(dim=0)
            total = ((feature - everything) ** 2).sum()
            within = ((feature - own) ** 2).sum()
            gain = total - within
            objective = objective + gain / labels.count(label) / len(set(labels))

        # one step of Adam along the mean gradient of all batches
        gradient = torch.autograd.grad(-objective, live.norms)
        gradients.append(flat(list(gradient)))
        step = torch.nn.Parameter(flat(live.norms))
        step.grad = torch.stack(gradients).mean(dim=0)
        torch.optim.Adam([step], lr=config.lr).step()

        # texts are mixed with the means of the features under these norms
        with torch.no_grad():
            load_norms(live.norms, step)
            z = live.features(images)
            for feature in z:
                label = int((text @ feature).argmax())
                stepped[label].append(feature)
            count = sum(map(len, stepped))
            mixed = config.text_weight * text
            for c, some in enumerate(stepped):
                if some:
                    mixed[c] += count * torch.stack(some).mean(dim=0)
            expected = live.scale * z @ unit_rows(mixed).T
        torch.testing.assert_close(mint.predict(images).logits, expected.float())


def test_one_image_alone_teaches_nothing_at_first() -> None:
    """It is its class's mean and everybody's: there is no variance to gain."""
    mint = Mint(TINY, TINY_PROMPTS, MintConfig())
    image = TINY_IMAGES[:1]
    mint.predict(image)

    gradient = mint.memory["gradient"]
    assert float(gradient.abs().max()) < SUM
