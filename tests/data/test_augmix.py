"""AugMix's operations against Pillow's, and its mixture against the formula."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from cliquetta.data.augmix import (
    OPERATIONS,
    apply_operation,
    augmix_chains,
    draw_recipe,
    mix,
)
from tests._helpers.tolerance import sampling

SIZE = 42  # a translation by one pixel at the highest level, no power of two
BILINEAR = Image.Resampling.BILINEAR


def with_pillow(name: str, image: Image.Image, level: float) -> Image.Image:
    """Appendix B, literally: level in (0.1, 1), negative for the other direction."""
    sign, strength = np.sign(level), abs(level)
    if name == "autocontrast":
        return ImageOps.autocontrast(image)
    if name == "equalize":
        return ImageOps.equalize(image)
    if name == "posterize":
        return ImageOps.posterize(image, 4 - int(strength * 4 / 10))
    if name == "rotate":
        return image.rotate(sign * int(strength * 30 / 10), resample=BILINEAR)
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(strength * 256 / 10))
    shear = sign * strength * 0.3 / 10
    shift = sign * int(strength * (SIZE / 3) / 10)
    matrix = {
        "shear-x": (1, shear, 0, 0, 1, 0),
        "shear-y": (1, 0, 0, shear, 1, 0),
        "translate-x": (1, 0, shift, 0, 1, 0),
        "translate-y": (1, 0, 0, 0, 1, shift),
    }[name]
    return image.transform(
        (SIZE, SIZE), Image.Transform.AFFINE, matrix, resample=BILINEAR
    )


def pictures() -> np.ndarray:
    """Noise, smooth, narrow in contrast, one colour, two colours."""
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, SIZE)[:, None, None] * np.ones((SIZE, SIZE, 3))
    narrow = generator.integers(90, 140, (SIZE, SIZE, 3), dtype=np.uint8)
    flat = np.full((SIZE, SIZE, 3), 77, dtype=np.uint8)
    halves = flat.copy()
    halves[: SIZE // 2] = 200
    return np.stack([noise, ramp.astype(np.uint8), narrow, flat, halves])


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("level", [0.1, 0.35, -0.7, 0.999, -0.999])
def test_operations_are_pillows(name: str, level: float) -> None:
    images = pictures()
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    result = (
        apply_operation(name, tensor, np.full(len(images), level))
        .permute(0, 2, 3, 1)
        .numpy()
    )
    expected = [
        np.asarray(with_pillow(name, Image.fromarray(i), level), int) for i in images
    ]
    difference = np.abs(result.astype(int) - np.stack(expected))
    assert difference.max() <= 1
    if name != "autocontrast":
        assert (difference > 0).mean() < 5e-3
    if name.startswith("translate"):
        assert difference.max() == 0


def test_recipes_are_drawn_as_defined() -> None:
    recipe = draw_recipe(20_000, np.random.default_rng(0))
    depth = (recipe.operation >= 0).sum(axis=2)
    shares = np.bincount(depth.ravel()) / depth.size
    assert shares == pytest.approx(
        [0, 1 / 3, 1 / 3, 1 / 3], abs=sampling(0.47, depth.size)
    )
    assert (np.diff((recipe.operation >= 0).astype(int), axis=2) <= 0).all()
    used = recipe.operation[recipe.operation >= 0]
    shares = np.bincount(used) / len(used)
    assert shares == pytest.approx([1 / 9] * 9, abs=sampling(0.31, len(used)))
    assert 0.1 <= np.abs(recipe.level).min() < 0.101
    assert 0.999 < np.abs(recipe.level).max() <= 1.0
    assert (recipe.level < 0).mean() == pytest.approx(
        0.5, abs=sampling(0.5, recipe.level.size)
    )
    assert recipe.weights.sum(axis=1) == pytest.approx(1)
    assert recipe.weights.mean(axis=0) == pytest.approx(
        [1 / 3] * 3, abs=sampling(0.24, 20_000)
    )
    assert recipe.plain.mean() == pytest.approx(0.5, abs=sampling(0.29, 20_000))
    assert recipe.plain.var() == pytest.approx(1 / 12, abs=sampling(0.075, 20_000))


def test_chains_and_mixture_follow_the_formula() -> None:
    recipes = [draw_recipe(4, np.random.default_rng(s)) for s in range(2)]
    views = (
        torch.from_numpy(pictures()[:2])
        .permute(0, 3, 1, 2)[:, None]
        .repeat(1, 4, 1, 1, 1)
    )
    chains = augmix_chains(views, recipes)
    mixed = mix(views.double(), chains.double(), recipes)
    for image, recipe in enumerate(recipes):
        for view in range(4):
            total = torch.zeros(3, SIZE, SIZE, dtype=torch.float64)
            for chain in range(3):
                x = views[image, view][None]
                for depth in range(3):
                    index = recipe.operation[view, chain, depth]
                    if index >= 0:
                        level = recipe.level[view, chain, depth : depth + 1]
                        x = apply_operation(OPERATIONS[index], x, level)
                assert torch.equal(x[0], chains[image, view, chain])
                total += recipe.weights[view, chain] * x[0]
            m = recipe.plain[view]
            expected = m * views[image, view].double() + (1 - m) * total
            torch.testing.assert_close(mixed[image, view], expected)
