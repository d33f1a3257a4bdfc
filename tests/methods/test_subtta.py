"""SubTTA's distance against principal angles, its gradient and steps against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.batclip import batclip_loss
from cliquetta.methods.subtta import SubTTA, SubTTAConfig, chordal_distance, top_eigenvectors
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import (
    double_clip,
    flat,
    literal_entropy,
    open_norms,
    unit_rows,
)
from tests._helpers.tolerance import DOUBLE, FEATURE, LOGIT, SUM


def random_products(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 7, generator=generator, dtype=torch.float64)
    return x.T @ x


def test_the_distance_is_that_of_principal_angles() -> None:
    products, basis = random_products(9, 0), top_eigenvectors(random_products(9, 1), 3)
    ours, _ = chordal_distance(products, basis)
    cosines = torch.linalg.svdvals(basis @ top_eigenvectors(products, 3).T)
    torch.testing.assert_close(ours, (1 - cosines**2).sum())
    same, _ = chordal_distance(products, top_eigenvectors(products, 3))
    assert abs(float(same)) < DOUBLE


def test_its_gradient_is_that_of_finite_differences() -> None:
    products, basis = random_products(9, 2), top_eigenvectors(random_products(9, 3), 3)
    _, gradient = chordal_distance(products, basis)
    way = random_products(4, 4)
    ends = [chordal_distance(products + s * way, basis)[0] for s in (1e-6, -1e-6)]
    slope = float(ends[0] - ends[1]) / 2e-6
    assert slope == pytest.approx(float((gradient * way).sum()), rel=FEATURE)


@pytest.mark.parametrize("objective", ["batclip", "tent"])
def test_a_stream_equals_two_steps_per_batch(
    tiny_prompts: ClassPrompts, tiny_images: Tensor, objective: Any
) -> None:
    config = SubTTAConfig(rank=3, objective=objective)
    subtta = SubTTA(double_clip(), tiny_prompts, config)
    live = double_clip()
    text = live.classifier(tiny_prompts)
    basis = torch.linalg.svd(text, full_matrices=False).Vh[:3]
    norms = open_norms(live.visual)
    optimiser = torch.optim.Adam(norms, lr=1e-3)
    average = text.T @ text
    for images in tiny_images.split([6, 4]):
        v = unit_rows(live.encode_image(images))
        average = 0.5 * average.detach() + 0.5 * v.T @ v
        spanned = torch.linalg.eigh(average).eigenvectors[:, -3:]  # torch's own derivative
        optimiser.zero_grad()
        (3 - (basis @ spanned).square().sum()).backward()
        optimiser.step()
        features = live.encode_image(images) @ basis.T @ basis
        logits = live.scale * unit_rows(features) @ text.T
        answer = subtta.predict(Batch(images)).logits
        torch.testing.assert_close(answer, logits.detach().float(), atol=LOGIT, rtol=LOGIT)
        optimiser.zero_grad()
        if objective == "tent":
            literal_entropy(logits).backward()
        else:
            batclip_loss(logits, features, text).backward()
        optimiser.step()
    torch.testing.assert_close(subtta.memory["norms.values"], flat(norms), atol=SUM, rtol=SUM)


def test_alignment_brings_the_spans_together(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    subtta = SubTTA(tiny_clip, tiny_prompts, SubTTAConfig(rank=3, objective="tent", lr=5e-4))
    seen = []
    for _ in range(12):
        subtta.predict(Batch(tiny_images))
        seen.append(float(chordal_distance(subtta.memory["products"], subtta.basis)[0]))
    assert seen[-1] < seen[4]
