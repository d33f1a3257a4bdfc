"""Learning against the reference, and in parts that fit in memory against all at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.learning import Learner, Task
from cliquetta.methods.scap.text import PromptedText
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tolerance import DOUBLE, STEP, SUM, assert_near
from tests.reference.scap_equations import ReferenceSettings, learn
from tests.reference.scap_reference import ReferenceSCAP

MODEL = build_model(0)
PROMPTS = ClassPrompts(NAMES)
IMAGES = make_batches(5, 1, 6)[0]
SETS = ((0, 1, 4), (2, 3), (1, 2, 3, 5), (4,))  # Ragged, overlapping, one alone.


def make_learner(config: SCAPConfig, rows: int) -> Learner:
    return Learner(
        MODEL.require_vit(),
        PromptedText(MODEL, PROMPTS, config.text_mix),
        MODEL.classifier(PROMPTS),
        MODEL.scale,
        config,
        rows,
    )


def make_task(config: SCAPConfig) -> Task:
    """The images of ``SETS``, up to the first prompted block."""
    tower = MODEL.require_vit()
    embedded = tower.embed(IMAGES)
    clique: list[int] = []
    image: list[int] = []
    for number, members in enumerate(SETS):
        clique += [number] * len(members)
        image += members
    return Task(
        tower.run(embedded, 0, config.blocks[0]),
        MODEL.encode_image(IMAGES, normalize=True),
        torch.tensor(clique),
        torch.tensor(image),
        len(SETS),
    )


def start_prompt() -> Tensor:
    """A start between -1 and 1, of one block and one prompt of a key and a value."""
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.rand(1, 1, 2, 32, generator=generator).double() - 1


@pytest.mark.parametrize("options", [{}, {"steps": 3}], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 18])
def test_parts_that_fit_in_memory_learn_the_same(
    options: dict[str, Any], rows: int
) -> None:
    config = SCAPConfig(**options)
    task = make_task(config)
    at_once = make_learner(config, 10_000)
    full = at_once.learn(task, start_prompt(), explain=True)
    in_parts = make_learner(config, rows)
    parts = in_parts.learn(task, start_prompt(), explain=True)

    assert_near(parts.visual, full.visual, STEP)
    assert_near(parts.text, full.text, STEP)
    assert_near(parts.after.total, full.after.total, STEP)
    assert_near(parts.attributes, full.attributes, DOUBLE)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_every_step_is_that_of_the_reference(steps: int) -> None:
    """Each clique alone, by plain autograd and torch's own Adam."""
    config = SCAPConfig(steps=steps)
    start = start_prompt()
    learner = make_learner(config, 10_000)
    learned = learner.learn(make_task(config), start, explain=True)

    settings = ReferenceSettings(steps=steps)
    context = MODEL.context("a photo of a")
    text_of = ReferenceSCAP(MODEL, PROMPTS, settings, start, context).text_of

    for clique, members in enumerate(SETS):
        images = IMAGES[list(members)]
        expected = learn(MODEL, images, start, context, text_of, settings)
        assert_near(learned.visual[clique], expected.visual, SUM)
        assert_near(learned.text[clique], expected.text, SUM)
        assert_near(learned.before.total[clique], expected.before.total, SUM)
        assert_near(learned.after.total[clique], expected.after.total, SUM)


@pytest.mark.parametrize(
    ("rows", "count"), [(1, 4), (6, 4), (9, 4), (12, 4), (18, 2), (1000, 1)]
)
def test_a_part_holds_complete_cliques_within_its_bound(rows: int, count: int) -> None:
    learner = make_learner(SCAPConfig(), rows)
    parts = list(learner._parts(make_task(SCAPConfig())))

    assert len(parts) == count

    sizes = [len(members) for members in SETS]
    done = 0
    for sets, part in parts:
        # the next cliques, complete
        assert sets.start == done
        done = sets.stop
        assert part.count == sets.stop - sets.start
        images = sum(sizes[sets])
        assert len(part.image) == images
        assert len(part.set_index) == images
        # a clique that is larger than the bound comes alone
        assert part.count == 1 or images <= learner.graph_rows

    assert done == len(SETS)
