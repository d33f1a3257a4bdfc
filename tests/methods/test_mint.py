"""Mint against loops over images and autograd on the model's own LayerNorms."""

import torch
from torch import Tensor

from cliquetta.methods.mint import Mint, MintConfig
from tests._helpers.live import Live, double_clip, flat, load_norms, unit_rows
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import SUM


def test_a_stream_equals_loops() -> None:
    config = MintConfig(text_weight=4)
    gradients = []
    mint = Mint(double_clip(), TINY_PROMPTS, config)
    text = mint.classifier
    seen, stepped = ([list[Tensor]() for _ in text] for _ in range(2))
    for images in TINY_IMAGES.split([4, 1, 5]):
        live = Live()  # the norms start again with every batch
        z = live.features(images)
        labels = (z @ text.T).argmax(dim=-1).tolist()
        for feature, label in zip(z.detach(), labels, strict=True):
            seen[label].append(feature)
        everything = torch.stack([f for part in seen for f in part]).mean(dim=0)
        objective = z.new_zeros(())
        for feature, label in zip(z, labels, strict=True):
            own = torch.stack(seen[label]).mean(dim=0)
            gain = ((feature - everything) ** 2).sum() - ((feature - own) ** 2).sum()
            objective = objective + gain / labels.count(label) / len(set(labels))
        gradients.append(flat(list(torch.autograd.grad(-objective, live.norms))))
        step = torch.nn.Parameter(flat(live.norms))
        step.grad = torch.stack(gradients).mean(dim=0)
        torch.optim.Adam([step], lr=config.lr).step()
        with torch.no_grad():
            load_norms(live.norms, step)
            z = live.features(images)
            for feature in z:
                stepped[int((text @ feature).argmax())].append(feature)
            count = sum(map(len, stepped))
            mixed = 4 * text
            for c, some in enumerate(stepped):
                mixed[c] += count * (torch.stack(some).mean(dim=0) if some else 0)
            expected = live.scale * z @ unit_rows(mixed).T
        torch.testing.assert_close(mint.predict(images).logits, expected.float())


def test_one_image_alone_teaches_nothing_at_first() -> None:
    """It is its class's mean and everybody's: there is no variance to gain."""
    mint = Mint(TINY, TINY_PROMPTS, MintConfig())
    mint.predict(TINY_IMAGES[:1])
    assert float(mint.memory["gradient"].abs().max()) < SUM
