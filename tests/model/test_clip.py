"""One model: frozen, in half precision, compiled, and refusing what its towers lack."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model.block import Prefix
from cliquetta.model.checkpoints.state import Checkpoint, build
from cliquetta.model.clip import (
    CLIP,
    MissingCapabilityError,
    encode_views,
    initialise,
)
from cliquetta.model.config import CLIPConfig, ResNetConfig, VisionConfig
from tests._helpers.literal_towers import draw
from tests._helpers.tolerance import FEATURE

TEXTS = [
    "cat",
    "a photo of a small frog.",
    "ship",
    "a truck, which is a type of thing on a road",
]


def test_no_gradients_on_weights(clip: CLIP, tiny_images: Tensor) -> None:
    images = tiny_images[:2]
    tokens = draw(1, 2, 2, 32).requires_grad_()
    features = clip.encode_image(images, prefix={1: Prefix(tokens)})
    features.sum().backward()
    assert tokens.grad is not None
    for weight in clip.parameters():
        assert not weight.requires_grad
        assert weight.grad is None
    assert not clip.encode_image(images).requires_grad
    assert not clip.training


@pytest.mark.parametrize(
    ("dtype", "cosine"),
    [(torch.bfloat16, 0.995), (torch.float16, 0.9999)],
    ids=["bfloat16", "float16"],
)
def test_half_precision_is_close(
    tiny_clip: CLIP, tiny_images: Tensor, dtype: torch.dtype, cosine: float
) -> None:
    checkpoint = Checkpoint(
        tiny_clip.config,
        tiny_clip.state_dict(),
        "tiny",
        tiny_clip.preprocess,
    )
    half = build(checkpoint, dtype=dtype)
    assert half.dtype == dtype
    assert half.scale == tiny_clip.scale

    prefix = {1: Prefix(draw(10, 2, 2, 32))}
    for encode in (
        lambda model: model.encode_image(tiny_images, normalize=True),
        lambda model: model.encode_image(tiny_images, normalize=True, prefix=prefix),
        lambda model: model.encode_text(TEXTS, normalize=True),
    ):
        plain = encode(tiny_clip)
        rounded = encode(half)
        assert rounded.dtype == torch.float32
        assert (plain * rounded).sum(dim=-1).min() > cosine


def trace(function: Any) -> Any:
    """Compile without a break of the graph."""
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_the_image_tower_traces_as_one_graph(
    tiny_clip: CLIP, tiny_images: Tensor
) -> None:
    tower = tiny_clip.require_vit()
    prefix = draw(10, 2, 2, 32)

    def encode(images: Tensor, tokens: Tensor) -> Tensor:
        return tower(images, prefix={1: Prefix(tokens)})

    traced = trace(encode)(tiny_images, prefix)
    expected = encode(tiny_images, prefix)
    torch.testing.assert_close(traced, expected, atol=FEATURE, rtol=FEATURE)


def test_the_text_tower_traces_as_one_graph(tiny_clip: CLIP) -> None:
    text = tiny_clip.require_text()
    ids = tiny_clip.tokenizer(TEXTS)
    tokens = text.tokens(ids)
    ends = ids.argmax(dim=1)
    traced = trace(text.encode)(tokens, ends)
    expected = text.encode(tokens, ends)
    torch.testing.assert_close(traced, expected, atol=FEATURE, rtol=FEATURE)


def test_prompts_without_their_tower_are_refused(tiny_images: Tensor) -> None:
    model = CLIP(
        CLIPConfig(24, ResNetConfig(32, 8, (1, 1, 1, 1), 4), None), id="rn-tiny"
    )
    assert not model.capabilities
    with pytest.raises(MissingCapabilityError):
        model.encode_image(tiny_images, prefix={0: Prefix(torch.zeros(1, 1, 2, 8))})
    with pytest.raises(MissingCapabilityError, match="prefixes"):
        model.require(frozenset({"visual-prefix"}), by="scap")
    with pytest.raises(MissingCapabilityError):
        model.encode_text(["cat"])


SMALL: Any = {"width": 32, "layers": 1, "heads": 2, "hidden": 64}


@pytest.mark.parametrize(
    "tower",
    [
        pytest.param(VisionConfig(32, 8, **SMALL), id="class token"),
        pytest.param(VisionConfig(32, 8, **SMALL, pooling="attention"), id="SigLIP"),
        pytest.param(ResNetConfig(32, 8, (1, 1, 1, 1), 4), id="ResNet"),
    ],
)
def test_initial_weights_depend_on_the_seed_alone(tower: Any) -> None:
    config = CLIPConfig(embed_dim=16, vision=tower, text=None)
    drawn = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        drawn.append(initialise(CLIP(config), seed=3).state_dict())

    first, second = drawn
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert differing == []


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_views_are_encoded_one_by_one_whatever_the_chunk(
    clip: CLIP, tiny_images: Tensor, chunk: int
) -> None:
    """Two images in three views."""
    views = tiny_images[:6].unflatten(0, (2, 3))
    features = encode_views(clip, views, chunk=chunk)
    assert features.shape == (2, 3, 24)
    for image, of_image in zip(views, features, strict=True):
        for view, feature in zip(image, of_image, strict=True):
            alone = clip.encode_image(view[None], normalize=True)[0]
            torch.testing.assert_close(feature, alone, atol=FEATURE, rtol=0)
