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
    prefix = draw(1, 2, 2, 32).requires_grad_()
    clip.encode_image(tiny_images[:2], prefix={1: Prefix(prefix)}).sum().backward()
    assert prefix.grad is not None
    assert all(not p.requires_grad and p.grad is None for p in clip.parameters())
    assert not clip.encode_image(tiny_images[:2]).requires_grad
    assert not clip.training


@pytest.mark.parametrize(
    ("dtype", "cosine"), [(torch.bfloat16, 0.995), (torch.float16, 0.9999)]
)
def test_half_precision_is_close(
    tiny_clip: CLIP, tiny_images: Tensor, dtype: torch.dtype, cosine: float
) -> None:
    checkpoint = Checkpoint(
        tiny_clip.config, tiny_clip.state_dict(), "tiny", tiny_clip.preprocess
    )
    half = build(checkpoint, dtype=dtype)
    prefix = {1: Prefix(draw(10, 2, 2, 32))}
    both = (tiny_clip, half)
    for plain, rounded in (
        [model.encode_image(tiny_images, normalize=True) for model in both],
        [
            model.encode_image(tiny_images, normalize=True, prefix=prefix)
            for model in both
        ],
        [model.encode_text(TEXTS, normalize=True) for model in both],
    ):
        assert rounded.dtype == torch.float32
        assert (plain * rounded).sum(dim=-1).min() > cosine
    assert half.dtype == dtype and half.scale == tiny_clip.scale


def test_towers_trace_as_one_graph(tiny_clip: CLIP, tiny_images: Tensor) -> None:
    tower, text = tiny_clip.require_vit(), tiny_clip.require_text()
    prefix, ids = draw(10, 2, 2, 32), tiny_clip.tokenizer(TEXTS)

    def encode_image(images: Tensor, tokens: Tensor) -> Tensor:
        return tower(images, prefix={1: Prefix(tokens)})

    inputs: list[tuple[Any, tuple[Tensor, ...]]] = [
        (encode_image, (tiny_images, prefix)),
        (text.encode, (text.tokens(ids), ids.argmax(dim=1))),
    ]
    for function, given in inputs:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(
            compiled(*given), function(*given), atol=FEATURE, rtol=FEATURE
        )


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
