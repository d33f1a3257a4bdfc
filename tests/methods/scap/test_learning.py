"""Learning against the reference, and in parts that fit in memory against all at once."""

from typing import Any

import pytest
import torch

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
    text = PromptedText(MODEL, PROMPTS, config.text_mix)
    tower = MODEL.require_vit()
    return Learner(tower, text, MODEL.classifier(PROMPTS), MODEL.scale, config, rows)


def make_task(config: SCAPConfig) -> Task:
    tower = MODEL.require_vit()
    hidden = tower.run(tower.embed(IMAGES), 0, config.blocks[0])
    plain = MODEL.encode_image(IMAGES, normalize=True)
    pairs = [(u, j) for u, members in enumerate(SETS) for j in members]
    clique, image = torch.tensor(pairs).unbind(dim=1)
    return Task(hidden, plain, clique, image, len(SETS))


@pytest.mark.parametrize("options", [{}, {"steps": 3}], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 18])
def test_parts_that_fit_in_memory_learn_the_same(
    options: dict[str, Any], rows: int
) -> None:
    config = SCAPConfig(**options)
    start = (
        2 * torch.rand(1, 1, 2, 32, generator=torch.Generator().manual_seed(0)).double()
        - 1
    )
    full = make_learner(config, 10_000).learn(make_task(config), start, explain=True)
    parts = make_learner(config, rows).learn(make_task(config), start, explain=True)
    assert_near(parts.visual, full.visual, STEP)
    assert_near(parts.text, full.text, STEP)
    assert_near(parts.after.total, full.after.total, STEP)
    assert_near(parts.attributes, full.attributes, DOUBLE)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_every_step_is_that_of_the_reference(steps: int) -> None:
    """Each clique alone, by plain autograd and torch's own Adam."""
    config = SCAPConfig(steps=steps)
    settings = ReferenceSettings(steps=steps)
    start = (
        2 * torch.rand(1, 1, 2, 32, generator=torch.Generator().manual_seed(0)).double()
        - 1
    )
    context = MODEL.context(PROMPTS.templates[0].split("{}")[0].strip())
    learned = make_learner(config, 10_000).learn(make_task(config), start, explain=True)
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
    sizes = [len(members) for members in SETS]
    assert [sets.start for sets, _ in parts] == [
        0,
        *[sets.stop for sets, _ in parts[:-1]],
    ]
    assert parts[-1][0].stop == len(SETS)
    for sets, part in parts:
        assert len(part.image) == len(part.set_index) == sum(sizes[sets])
        assert part.count == sets.stop - sets.start
        assert sets.stop - sets.start == 1 or sum(sizes[sets]) <= learner.graph_rows
    assert len(parts) == count
