"""AugMix's operations against Pillow's, and its mixture against the formula."""

from typing import Any

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
    sign = np.sign(level)
    strength = abs(level)
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
    shape = (SIZE, SIZE, 3)
    noise = generator.integers(0, 256, shape, dtype=np.uint8)
    levels = np.linspace(0, 255, SIZE).astype(np.uint8)
    ramp = np.broadcast_to(levels[:, None, None], shape)
    narrow = generator.integers(90, 140, shape, dtype=np.uint8)
    flat = np.full(shape, 77, dtype=np.uint8)
    halves = flat.copy()
    halves[: SIZE // 2] = 200
    return np.stack([noise, ramp, narrow, flat, halves])


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("level", [0.1, 0.35, -0.7, 0.999, -0.999])
def test_operations_are_pillows(name: str, level: float) -> None:
    images = pictures()
    tensor = torch.from_numpy(images).movedim(-1, 1)
    levels = np.full(len(images), level)
    result = apply_operation(name, tensor, levels).movedim(1, -1).numpy()
    expected = []
    for image in images:
        theirs = with_pillow(name, Image.fromarray(image), level)
        expected.append(np.asarray(theirs, int))

    difference = np.abs(result - np.stack(expected))
    assert difference.max() <= 1
    if name != "autocontrast":
        assert (difference > 0).mean() < 5e-3
    if name.startswith("translate"):
        assert difference.max() == 0


def test_depths_and_operations_of_recipes_are_uniform() -> None:
    recipe = draw_recipe(20_000, np.random.default_rng(0))
    given = recipe.operation >= 0
    # a chain has no gaps: after its last operation there is none
    assert (np.diff(given.astype(int), axis=2) <= 0).all()

    depth = given.sum(axis=2)
    of_depth = np.bincount(depth.ravel()) / depth.size
    tolerance = sampling(0.47, depth.size)
    assert of_depth == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3], abs=tolerance)

    used = recipe.operation[given]
    of_operation = np.bincount(used) / len(used)
    tolerance = sampling(0.31, len(used))
    assert of_operation == pytest.approx([1 / 9] * 9, abs=tolerance)


def test_levels_of_recipes_have_both_directions() -> None:
    level = draw_recipe(20_000, np.random.default_rng(0)).level
    strength = np.abs(level)
    assert 0.1 <= strength.min() < 0.101
    assert 0.999 < strength.max() <= 1.0
    negative = (level < 0).mean()
    assert negative == pytest.approx(0.5, abs=sampling(0.5, level.size))


def test_weights_of_recipes_are_dirichlet_and_uniform() -> None:
    count = 20_000
    recipe = draw_recipe(count, np.random.default_rng(0))
    assert recipe.weights.sum(axis=1) == pytest.approx(1)
    weight = recipe.weights.mean(axis=0)
    assert weight == pytest.approx([1 / 3] * 3, abs=sampling(0.24, count))

    # the weight of the plain image is uniform from 0 to 1: variance 1/12
    plain = recipe.plain
    assert plain.mean() == pytest.approx(0.5, abs=sampling(0.29, count))
    assert plain.var() == pytest.approx(1 / 12, abs=sampling(0.075, count))


def run_chain(view: torch.Tensor, operations: np.ndarray, levels: Any) -> torch.Tensor:
    """Apply one operation after the other; -1 is none."""
    x = view[None]
    for depth, index in enumerate(operations):
        if index >= 0:
            x = apply_operation(OPERATIONS[index], x, levels[depth : depth + 1])
    return x[0]


def test_chains_and_mixture_follow_the_formula() -> None:
    recipes = [draw_recipe(4, np.random.default_rng(seed)) for seed in range(2)]
    images = torch.from_numpy(pictures()[:2]).movedim(-1, 1)
    views = images[:, None].repeat(1, 4, 1, 1, 1)
    chains = augmix_chains(views, recipes)
    mixed = mix(views.double(), chains.double(), recipes)
    for image, recipe in enumerate(recipes):
        for view in range(4):
            plain = views[image, view]
            total = torch.zeros(3, SIZE, SIZE, dtype=torch.float64)
            for chain in range(3):
                out = run_chain(
                    plain,
                    recipe.operation[view, chain],
                    recipe.level[view, chain],
                )
                assert torch.equal(chains[image, view, chain], out)
                total += recipe.weights[view, chain] * out
            # m x + (1 - m) (w1 chain1 + w2 chain2 + w3 chain3)
            m = recipe.plain[view]
            expected = m * plain.double() + (1 - m) * total
            torch.testing.assert_close(mixed[image, view], expected)
