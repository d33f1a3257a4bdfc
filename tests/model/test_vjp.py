"""Many backward passes from one forward pass equal autograd, one backward pass at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP, initialise
from cliquetta.model.config import CLIPConfig, TextConfig, VisionConfig
from cliquetta.model.text import with_context
from cliquetta.model.vjp import TextTape, VisualTape, chunks
from tests._helpers.tolerance import DOUBLE, SUM


@pytest.fixture(params=["quick_gelu", "gelu", "siglip"])
def clip(request: pytest.FixtureRequest) -> CLIP:
    siglip = request.param == "siglip"
    activation: Any = "gelu_tanh" if siglip else request.param
    shape: Any = {
        "width": 32,
        "layers": 3,
        "heads": 2,
        "hidden": 64,
        "activation": activation,
    }
    vision = VisionConfig(32, 8, **shape, pooling="attention" if siglip else "class")
    how: Any = {"merges": 512, "causal": not siglip, "projection_bias": siglip}
    text = TextConfig(32, 512 + 512 + 2, **shape, **how)
    config = CLIPConfig(32 if siglip else 24, vision, text, sigmoid=siglip)
    return initialise(CLIP(config), 3).double()


def one_at_a_time(
    features: Tensor, leaf: Tensor, rows: Tensor, cotangents: Tensor
) -> Tensor:
    """Gradient of row ``rows[r]`` of the leaf for every cotangent, by plain autograd."""
    gradients = [
        torch.autograd.grad(features[row] @ cotangent, leaf, retain_graph=True)[0][row]
        for row, cotangent in zip(rows, cotangents, strict=True)
    ]
    return torch.stack(gradients)


@pytest.mark.parametrize("blocks", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_visual_gradients_equal_autograd(clip: CLIP, blocks: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tower = clip.require_vit()
    pixels = torch.randn(4, 3, 32, 32, generator=generator).double()
    start = {b: torch.rand(1, 2, 2, 32, generator=generator).double() for b in blocks}
    hidden = tower.run(tower.embed(pixels), 0, blocks[0])
    shared = {block: Prefix(prompts) for block, prompts in start.items()}
    tape = VisualTape(tower, hidden, shared)

    # for autograd every image has prompts of its own
    leaves = {}
    for block, prompts in start.items():
        leaves[block] = prompts.expand(4, -1, -1, -1).clone().requires_grad_()
    features = tower(
        pixels,
        prefix={block: Prefix(leaf) for block, leaf in leaves.items()},
    )
    torch.testing.assert_close(tape.features, features.detach(), rtol=0, atol=DOUBLE)

    rows = torch.tensor([0, 3, 3, 1, 2, 0])
    cotangents = torch.randn(6, clip.embed_dim, generator=generator).double() * 1e-3
    actual = tape.vjp(cotangents, rows)
    assert sorted(actual) == sorted(blocks)
    for block, leaf in leaves.items():
        expected = one_at_a_time(features, leaf, rows, cotangents)
        assert expected.abs().max() > 1e-7
        torch.testing.assert_close(actual[block], expected, rtol=DOUBLE, atol=DOUBLE)


def test_text_gradients_equal_autograd(clip: CLIP) -> None:
    generator = torch.Generator().manual_seed(1)
    tower = clip.require_text()
    texts = ["a photo of a cat.", "a photo of a big dog.", "a photo of a car"]
    ids = clip.tokenizer(texts)
    ends = tower.ends(ids)
    cut = int(ends.max()) + 1
    start = clip.context("a photo of a")
    positions = torch.arange(1, len(start) + 1).expand(3, -1)
    embedded = with_context(tower.tokens(ids[:, :cut]), start, positions)
    tape = TextTape(tower, embedded, ends)

    # for autograd every class has a context of its own
    leaf = start.expand(3, -1, -1).clone().requires_grad_()
    features = tower(ids, context=leaf)
    torch.testing.assert_close(tape.features, features.detach(), rtol=0, atol=DOUBLE)

    rows = torch.tensor([2, 0, 1, 1])
    cotangents = torch.randn(4, clip.embed_dim, generator=generator).double()
    actual = tape.vjp(cotangents, rows, positions[rows])
    expected = one_at_a_time(features, leaf, rows, cotangents)
    torch.testing.assert_close(actual, expected, rtol=DOUBLE, atol=DOUBLE)


def test_half_precision_survives_tiny_cotangents(clip: CLIP) -> None:
    """1e-9 is nothing in float16; the tape pulls directions and scales afterwards."""
    tower = clip.to(torch.float16).require_vit()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    hidden = tower.run(tower.embed(pixels), 0, 1)
    prefix = Prefix(torch.full((1, 1, 2, 32), 0.5))
    tape = VisualTape(tower, hidden, {1: prefix})

    generator = torch.Generator().manual_seed(1)
    cotangents = torch.randn(2, clip.embed_dim, generator=generator)
    rows = torch.arange(2)
    of_usual = tape.vjp(cotangents, rows)[1]
    of_tiny = tape.vjp(cotangents * 1e-9, rows)[1]
    torch.testing.assert_close(of_tiny * 1e9, of_usual, rtol=SUM, atol=SUM)
    assert of_usual.dtype == torch.float32


def test_chunks_cover_everything_once() -> None:
    covered = [i for part in chunks(10, 4) for i in range(part.start, part.stop)]
    assert covered == list(range(10))
    assert chunks(0, 4) == []
