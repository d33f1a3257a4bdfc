"""Learning all cliques at once against one optimiser per clique and plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.learning import Learned, Learner, Task
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.block import Prefix
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.scenes import NAMES, build_model, make_batches, scap_config
from tests._helpers.tolerance import DOUBLE, STEP, SUM
from tests.reference.scap_equations import ReferenceSettings, clique_loss

MODEL = build_model(0)
PROMPTS = ClassPrompts(NAMES)
IMAGES = make_batches(5, 1, 6)[0]
SETS = ((0, 1, 4), (2, 3), (1, 2, 3, 5), (4,))
"""Ragged, overlapping, one alone."""


def make_learner(config: SCAPConfig, rows: int = 10_000) -> Learner:
    text = PromptedText(MODEL, PROMPTS, config.text_mix)
    tower = MODEL.require_vit()
    return Learner(tower, text, MODEL.classifier(PROMPTS), MODEL.scale, config, rows)


def make_task(config: SCAPConfig, sets: tuple[tuple[int, ...], ...] = SETS) -> Task:
    tower = MODEL.require_vit()
    hidden = tower.run(tower.embed(IMAGES), 0, config.blocks[0])
    plain = MODEL.encode_image(IMAGES, normalize=True)
    pairs = [(u, j) for u, members in enumerate(sets) for j in members]
    clique, image = torch.tensor(pairs).unbind(dim=1)
    return Task(hidden, plain, clique, image, len(sets))


def make_start(config: SCAPConfig) -> Tensor:
    shape = (len(config.blocks), config.prompt_length, 2, 32)
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(0)).double() - 1


def learn_alone(
    members: tuple[int, ...], start: Tensor | None, config: SCAPConfig
) -> tuple[Tensor | None, Tensor | None, list[float]]:
    """Visual prompt (B, P, 2, D) and text context of one clique, and its losses over time."""
    tower, text_tower = MODEL.require_vit(), MODEL.require_text()
    ids = MODEL.tokenizer(PROMPTS.texts(PROMPTS.templates[0]))
    visual = None if start is None else start.clone().requires_grad_()
    context = None
    if config.learns_text:
        context = MODEL.context("a photo of a").clone()
        if config.rules.text_per_class:
            context = context.repeat(len(NAMES), 1, 1)
        context.requires_grad_()
    leaves = [leaf for leaf in (visual, context) if leaf is not None]
    decay = config.rules.weight_decay
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    optimiser = kind(leaves, lr=config.lr, weight_decay=decay)
    losses = []
    weights = ReferenceSettings(
        concentration=config.concentration,
        member_entropy=config.rules.member_entropy,
        mean_concentration=config.rules.mean_concentration,
    )
    for step in range(config.steps + 1):
        prefix = None
        if visual is not None:
            prefix = {block: Prefix(visual[at][None]) for at, block in enumerate(config.blocks)}
        features = torch.nn.functional.normalize(tower(IMAGES[list(members)], prefix=prefix), dim=1)
        words = torch.nn.functional.normalize(text_tower(ids, context=context), dim=1)
        loss = clique_loss(features, words, MODEL.scale, weights).total
        losses.append(float(loss.detach()))
        if step < config.steps:
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return (
        None if visual is None else visual.detach(),
        None if context is None else context.detach(),
        losses,
    )


def check(learned: Learned, start: Tensor | None, config: SCAPConfig) -> None:
    """Every clique equals itself learned alone."""
    assert learned.after is not None
    for u, members in enumerate(SETS):
        visual, context, losses = learn_alone(members, start, config)
        assert float(learned.before.total[u]) == pytest.approx(losses[0], abs=STEP)
        assert float(learned.after.total[u]) == pytest.approx(losses[-1], abs=SUM)
        if visual is not None:
            assert learned.visual is not None
            torch.testing.assert_close(learned.visual[u], visual, rtol=0, atol=STEP)
        if context is not None:
            assert learned.text is not None
            torch.testing.assert_close(learned.text[u], context, rtol=0, atol=STEP)


LITERAL: list[dict[str, Any]] = [
    {},
    {"blocks": (1, 2)},
    {"blocks": (0, 2), "prompt_length": 2},
    {"blocks": (1, 2), "steps": 3},
    {"text_per_class": True},
    {"text_per_class": True, "steps": 2},
    {"text_per_class": True, "member_entropy": True, "mean_concentration": True},
    {"weight_decay": 0.01, "steps": 3, "lr": 5e-3},
]


@pytest.mark.parametrize("options", LITERAL, ids=str)
def test_every_clique_equals_itself_learned_alone(options: dict[str, Any]) -> None:
    config = scap_config(**options)
    start = make_start(config)
    learned = make_learner(config).learn(make_task(config), start, explain=True)
    check(learned, start, config)


@pytest.mark.parametrize("options", [{}, {"steps": 3}], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 18])
def test_parts_that_fit_in_memory_give_the_whole(options: dict[str, Any], rows: int) -> None:
    config = SCAPConfig(**options)
    start = make_start(config)
    task = make_task(config)
    full = make_learner(config).learn(task, start, explain=True)
    parts = make_learner(config, rows).learn(task, start, explain=True)
    assert full.visual is not None
    assert parts.visual is not None
    torch.testing.assert_close(parts.visual, full.visual, rtol=0, atol=STEP)
    torch.testing.assert_close(parts.text, full.text, rtol=0, atol=STEP)
    assert full.after is not None
    assert parts.after is not None
    torch.testing.assert_close(parts.after.total, full.after.total, rtol=0, atol=STEP)
    torch.testing.assert_close(parts.attributes, full.attributes, rtol=0, atol=DOUBLE)


@pytest.mark.parametrize("rows", [1, 6, 9, 12, 18, 1000])
def test_a_part_holds_whole_cliques_within_its_bound(rows: int) -> None:
    config = SCAPConfig()
    learner = make_learner(config, rows)
    task = make_task(config)
    parts = list(learner._parts(task))
    sizes = [len(members) for members in SETS]
    assert [sets.start for sets, _ in parts] == [0, *[sets.stop for sets, _ in parts[:-1]]]
    assert parts[-1][0].stop == len(SETS)
    for sets, part in parts:
        assert len(part.image) == len(part.clique) == sum(sizes[sets])
        assert part.count == sets.stop - sets.start
        assert sets.stop - sets.start == 1 or sum(sizes[sets]) <= learner.graph_rows
    assert len(parts) == (1 if rows == 1000 else len(parts)) <= len(SETS)
