"""Attribute prompt learning: every clique of a batch at once (Eq. 4-10, 14).

At the first step all cliques stand at the same prompts: :meth:`Learner._start_gradients`
takes one forward pass per image and pulls all their gradients back through it. At later
steps they stand apart, and :meth:`Learner._gradients` runs autograd over every
membership.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cliquetta.methods.building.adam import AdamState, adam_step
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.losses import (
    CliqueLosses,
    Members,
    classify,
    clique_losses,
    clique_sum,
)
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize, to_float32
from cliquetta.model.cuda import Replayed
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import VisualTape, VisualTapes, chunks

# Prompts by modality, "visual" and "text" as far as they are learned, of all sets.
Prompts = Mapping[str, Tensor]

# Entries of the outer products of gradients and features that are held at once.
OUTER_ENTRIES = 2**26


@dataclass(frozen=True)
class Task:
    """The U distinct member sets of a batch, ready to be learned.

    Row r of the M memberships: image ``image[r]`` is in set ``set_index[r]``.
    """

    hidden: Tensor  # (b, T, D): the images' states at the first prompted block.
    plain: Tensor  # (b, E): unit features without prompts.
    set_index: Tensor  # (M,), ascending: a number below U.
    image: Tensor  # (M,): a number below b.
    count: int  # U.


@dataclass(frozen=True)
class Learned:
    """Prompts of all distinct sets; ``None`` for a modality that is not learned."""

    visual: Tensor | None  # P^I (U, B, P, 2, D) for B prompted blocks.
    text: Tensor | None  # P^T (U, M, D), or (U, N, M, D) when classes have their own.
    attributes: Tensor  # Keys (U, E): mean features, not normalised.
    before: CliqueLosses  # Under the start prompts.
    after: CliqueLosses | None  # Under the learned ones, if asked for.
    start_features: Tensor
    """Unit features (b, E) of the images under the start prompt, if there is one."""


class Learner:
    """Learns the cliques of a batch; at most ``rows`` prompted images at once."""

    def __init__(
        self,
        tower: VisionTower | None,
        text: PromptedText | None,
        classifier: Tensor,
        scale: float,
        config: SCAPConfig,
        rows: int,
        replayed: Replayed | None = None,
    ) -> None:
        self.tower = tower
        self.text = text
        self.scale = scale
        self.config = config
        # Class texts (N, E) at the start.
        self.start_text = classifier if text is None else text.start_features
        self.learns_text = text is not None and len(text.start) > 0
        # Images at once where one block is in memory, and where autograd holds them all.
        self.rows = rows
        self.graph_rows = rows
        self.tapes: VisualTapes | None = None
        if tower is not None:
            self.graph_rows = max(1, rows // len(tower.blocks))
            replayed = replayed or Replayed()
            self.tapes = VisualTapes(tower, config.blocks, replayed, self.graph_rows)

    def record(self, hidden: Tensor, start: Tensor) -> VisualTape:
        """Record the pass over images with these states under the start prompt."""
        assert self.tapes is not None
        return self.tapes(hidden, start)

    def learn(
        self,
        task: Task,
        start: Tensor | None,
        *,
        tape: VisualTape | None = None,
        explain: bool = False,
    ) -> Learned:
        """Learn the prompts of all sets: ``steps`` steps of Adam down Eq. 14.

        Args:
            task: The sets.
            start: The visual prompt (B, P, 2, D) that all start from, if images take
                one.
            tape: The pass of :meth:`record`, if that ran.
            explain: Evaluate the losses after learning, too.

        Returns:
            Prompts, keys and losses.

        """
        # A fresh optimiser for every set: states of (U, ...) prompts.
        states: dict[str, AdamState] = {}
        if start is not None:
            visual = start.expand(task.count, -1, -1, -1, -1)
            states["visual"] = AdamState.begin(visual)
            tape = tape or self.record(task.hidden, start)
        if self.learns_text and self.text is not None:
            context = to_float32(self.text.start)
            if self.config.rules.text_per_class:
                context = context.expand(self.text.classes, -1, -1)
            text = context.expand(task.count, *context.shape)
            states["text"] = AdamState.begin(text)

        before, gradients, start_features = self._start_gradients(task, tape)
        for step in range(self.config.steps):
            if step > 0:
                gradients = self._gradients(task, _values(states))
            states = {
                name: adam_step(state, gradients[name], self.config.adam)
                for name, state in states.items()
            }

        prompts = _values(states)
        return Learned(
            visual=prompts.get("visual"),
            text=prompts.get("text"),
            attributes=before.attributes,
            before=before,
            after=self._losses(task, prompts) if explain else None,
            start_features=start_features,
        )

    # --- the first step, from the shared start ----------------------------------------

    def _start_gradients(
        self, task: Task, tape: VisualTape | None
    ) -> tuple[CliqueLosses, dict[str, Tensor], Tensor]:
        """Evaluate all cliques at the start prompts, by one forward pass per image.

        Returns:
            Losses, gradients by modality, and the images' unit features (b, E).

        """
        config = self.config
        raw = task.plain if tape is None else to_float32(tape.features)

        # Eq. 4-10 from the features of every membership (M, E), not yet normalised.
        with torch.enable_grad():
            rows = raw[task.image].detach().requires_grad_()
            members = Members(l2_normalize(rows), task.set_index, task.count)
            queries, logits = classify(
                members, self.start_text, self.scale, config.rules
            )
            losses = clique_losses(members, logits, queries.clique, config)
            grad_rows, grad_logits = torch.autograd.grad(
                losses.total.sum(), [rows, logits]
            )

        # From there back through the towers, whose passes are recorded.
        gradients = {}
        if tape is not None:
            gradients["visual"] = self._visual_gradient(tape, task, grad_rows)
        if self.learns_text:
            queries = queries._replace(features=queries.features.detach())
            # By the cosines, of which logits are `scale` times.
            grad_cosines = grad_logits * self.scale
            gradients["text"] = self._text_gradient(grad_cosines, queries)
        before = CliqueLosses._make(value.detach() for value in losses)
        return before, gradients, l2_normalize(raw)

    def _visual_gradient(self, tape: VisualTape, task: Task, grad: Tensor) -> Tensor:
        """Pull gradients (M, E) of raw features back to visual prompts, per set."""
        blocks = self.config.blocks
        width = tape.tower.config.width
        length = self.config.prompt_length
        total = grad.new_zeros(task.count, len(blocks), length, 2, width)
        for part in chunks(len(grad), self.rows):
            # Of every membership, the gradient of its own copy of the prompt.
            by_block = tape.vjp(grad[part], task.image[part])
            in_order = [by_block[block] for block in blocks]
            stacked = torch.stack(in_order, dim=1)
            # The copies of a set are one prompt.
            set_index = task.set_index[part]
            total += clique_sum(stacked, set_index, task.count)
        return total

    def _text_gradient(self, grad_cosines: Tensor, queries: Members) -> Tensor:
        """Pull gradients (Q, N) of cosines back to the text prompts, per set."""
        assert self.text is not None
        rules = self.config.rules
        features, owner, count = queries
        if not rules.text_per_class:
            gradients = self.text.vjp_shared(grad_cosines, features)
            if rules.member_entropy:  # Q members, not U means.
                gradients = clique_sum(gradients, owner, count)
            return gradients

        # Cotangents (U, N, E) of the class texts: sums of outer products over queries.
        N = grad_cosines.shape[1]
        E = features.shape[1]
        total = grad_cosines.new_zeros(count, N, E)
        at_once = max(1, OUTER_ENTRIES // (N * E))
        for part in chunks(len(grad_cosines), at_once):
            left = grad_cosines[part]
            outer = left[:, :, None] * features[part][:, None]
            total += clique_sum(outer, owner[part], count)
        return self.text.vjp(total)

    # --- later steps, where every clique stands elsewhere -----------------------------

    def _gradients(self, task: Task, prompts: Prompts) -> dict[str, Tensor]:
        """Differentiate Eq. 14 by autograd, over as many cliques at a time as fit."""
        parts: dict[str, list[Tensor]] = {name: [] for name in prompts}
        for sets, part in self._parts(task):
            leaves = {}
            for name, value in prompts.items():
                leaf = value[sets].detach()
                leaves[name] = leaf.requires_grad_()

            # Cliques share no parameter, so one backward pass serves all of a part.
            with torch.enable_grad():
                losses = self._losses_of(part, leaves)
                total = losses.total.sum()
                gradients = torch.autograd.grad(total, list(leaves.values()))
            for name, gradient in zip(leaves, gradients, strict=True):
                parts[name].append(gradient)
        return {name: torch.cat(gradients) for name, gradients in parts.items()}

    @torch.no_grad()
    def _losses(self, task: Task, prompts: Prompts) -> CliqueLosses:
        """Evaluate the losses of all cliques at their own prompts."""
        parts = []
        for sets, part in self._parts(task):
            part_prompts = {}
            for name, value in prompts.items():
                part_prompts[name] = value[sets]
            losses = self._losses_of(part, part_prompts)
            parts.append(losses)
        columns = zip(*parts, strict=True)
        return CliqueLosses._make(torch.cat(column) for column in columns)

    def _losses_of(self, task: Task, prompts: Prompts) -> CliqueLosses:
        """Evaluate the losses of the cliques of ``task`` from full forward passes."""
        # Eq. 4: every member under its clique's visual prompt, (M, E).
        features = task.plain[task.image]
        if "visual" in prompts:
            hidden = task.hidden[task.image]
            own_prompts = prompts["visual"][task.set_index]
            features = self.prompted(hidden, own_prompts)

        # Eq. 6: the classes under every clique's text prompt, (U, N, E).
        text_features = self.start_text
        if "text" in prompts and self.text is not None:
            text_features = self.text.features(prompts["text"])

        # Eq. 5, 7-10.
        members = Members(features, task.set_index, task.count)
        queries, logits = classify(
            members, text_features, self.scale, self.config.rules
        )
        return clique_losses(members, logits, queries.clique, self.config)

    def prompted(self, hidden: Tensor, visual: Tensor) -> Tensor:
        """Encode states (R, T, D) under prompts (R or 1, B, P, 2, D) (Eq. 4)."""
        assert self.tower is not None
        blocks = self.config.blocks
        prefix = {
            block: Prefix(visual[:, number]) for number, block in enumerate(blocks)
        }
        states = self.tower.run(hidden, blocks[0], prefix=prefix)
        features = self.tower.pool(states)
        return l2_normalize(features)

    def _parts(self, task: Task) -> Iterator[tuple[slice, Task]]:
        """Split the task, between sets, into at most ``graph_rows`` memberships."""
        set_index = task.set_index.cpu()
        sizes = torch.bincount(set_index, minlength=task.count)
        ends = sizes.cumsum(0).tolist()
        texts = 1 if self.text is None else self.text.classes
        first_set = 0
        first_row = 0
        for index, end in enumerate(ends):
            next_end = ends[index + 1] if index + 1 < task.count else math.inf

            # Whether one set more would be too many rows, or too many texts.
            rows_full = next_end - first_row > self.graph_rows
            next_count = index + 2 - first_set
            texts_full = next_count * texts > 4 * self.graph_rows
            if rows_full or texts_full:
                rows = slice(first_row, end)
                sets = slice(first_set, index + 1)
                part = replace(
                    task,
                    set_index=task.set_index[rows] - first_set,
                    image=task.image[rows],
                    count=index + 1 - first_set,
                )
                yield sets, part
                first_set = index + 1
                first_row = end


def _values(states: Mapping[str, AdamState]) -> dict[str, Tensor]:
    """Read the prompts out of the optimiser's states."""
    return {name: state.values for name, state in states.items()}
