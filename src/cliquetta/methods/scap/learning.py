"""Attribute prompt learning: every clique of a batch at once (Eq. 4-10, 14)."""

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


@dataclass(frozen=True)
class Task:
    """The cliques of a batch, ready to be learned.

    Row r of the memberships: image ``image[r]`` is in distinct set ``clique[r]``.
    ``hidden`` (b, T, D) are the states at the first prompted block, ``plain`` (b, E)
    unit features without prompts.
    """

    hidden: Tensor
    plain: Tensor
    clique: Tensor
    image: Tensor
    count: int


@dataclass(frozen=True)
class Learned:
    """Prompts of all distinct sets; ``None`` for a modality that is not learned."""

    visual: Tensor | None  # (U, B, P, 2, D) for B prompted blocks.
    text: Tensor | None  # (U, M, D), or (U, N, M, D) when classes have their own.
    attributes: Tensor  # Keys (U, E): mean features, not normalised.
    before: CliqueLosses
    after: CliqueLosses | None
    start_features: Tensor
    """Unit features (b, E) of the images under the start prompt; plain ones without a prompt."""


Prompts = Mapping[
    str, Tensor
]  # "visual" and "text", as far as they are learned, of all sets


class Learner:
    """Learns the cliques of one batch after another; ``rows`` prompted images at once, or fewer."""

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
        self.tower, self.text, self.scale = tower, text, scale
        self.config, self.rows = config, rows
        self.start_text = classifier if text is None else text.start_features  # (N, E)
        self.learns_text = text is not None and len(text.start) > 0
        self.graph_rows, self.tapes = rows, None
        if tower is not None:
            self.graph_rows = max(1, rows // len(tower.blocks))
            replayed = replayed or Replayed()
            self.tapes = VisualTapes(tower, config.blocks, replayed, self.graph_rows)

    def record(self, hidden: Tensor, start: Tensor) -> VisualTape:
        """The pass over images with these hidden states under the shared start prompt."""
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
        """Prompts of all sets from ``start`` (B, P, 2, D), if images take one, and the context.

        ``tape`` is of :meth:`record`, if that ran. ``explain`` evaluates the losses
        afterwards.
        """
        config, states = self.config, dict[str, AdamState]()
        if start is not None:
            states["visual"] = AdamState.begin(start.expand(task.count, *start.shape))
            tape = tape or self.record(task.hidden, start)
        if self.learns_text and self.text is not None:
            context = to_float32(self.text.start)
            if config.rules.text_per_class:
                context = context.expand(self.text.classes, -1, -1)
            states["text"] = AdamState.begin(context.expand(task.count, *context.shape))
        before, gradients, start_features = self._start_gradients(task, tape)
        for step in range(config.steps):
            if step > 0:
                gradients = self._gradients(
                    task, {k: state.values for k, state in states.items()}
                )
            states = {
                k: adam_step(s, gradients[k], config.adam) for k, s in states.items()
            }
        prompts = {name: state.values for name, state in states.items()}
        after = self._losses(task, prompts) if explain else None
        visual, text = prompts.get("visual"), prompts.get("text")
        return Learned(visual, text, before.attributes, before, after, start_features)

    # --- the first step, from the shared start --------------------------------------------------

    def _start_gradients(
        self, task: Task, tape: VisualTape | None
    ) -> tuple[CliqueLosses, dict[str, Tensor], Tensor]:
        """Losses, gradients and features where all cliques share one forward pass per image."""
        config = self.config
        raw = task.plain if tape is None else to_float32(tape.features)
        with torch.enable_grad():
            rows = raw[task.image].detach().requires_grad_()
            members = Members(l2_normalize(rows), task.clique, task.count)
            queries, logits = classify(
                members, self.start_text, self.scale, config.rules
            )
            losses = clique_losses(members, logits, queries.clique, config)
            grad_rows, grad_logits = torch.autograd.grad(
                losses.total.sum(), [rows, logits]
            )
        gradients = {}
        if tape is not None:
            gradients["visual"] = self._visual_gradient(tape, task, grad_rows)
        if self.learns_text:
            queries = queries._replace(features=queries.features.detach())
            gradients["text"] = self._text_gradient(grad_logits * self.scale, queries)
        before = CliqueLosses(*(value.detach() for value in losses))
        return before, gradients, l2_normalize(raw)

    def _visual_gradient(self, tape: VisualTape, task: Task, grad: Tensor) -> Tensor:
        """Gradients (U, B, P, 2, D) of all cliques' visual prompts: one row per membership."""
        width = tape.tower.config.width
        shape = len(self.config.blocks), self.config.prompt_length, 2, width
        total = grad.new_zeros(task.count, *shape)
        for part in chunks(len(grad), self.rows):
            by_block = tape.vjp(grad[part], task.image[part])
            stacked = torch.stack(
                [by_block[block] for block in self.config.blocks], dim=1
            )
            total += clique_sum(stacked, task.clique[part], task.count)
        return total

    def _text_gradient(self, grad_logits: Tensor, rows: Members) -> Tensor:
        """Gradients of all cliques' text prompts from those of the logits (Q, N) of query rows."""
        assert self.text is not None
        query_features, owner, count = rows
        rules = self.config.rules
        if not rules.text_per_class:
            shared = self.text.vjp_shared(grad_logits, query_features)
            return clique_sum(shared, owner, count) if rules.member_entropy else shared
        size = grad_logits.shape[1], query_features.shape[1]
        total = grad_logits.new_zeros(count, *size)
        for part in chunks(len(grad_logits), max(1, 2**26 // math.prod(size))):
            outer = grad_logits[part][:, :, None] * query_features[part][:, None]
            total += clique_sum(outer, owner[part], count)
        return self.text.vjp(total)

    # --- later steps, where every clique stands elsewhere ---------------------------------------

    def _gradients(self, task: Task, prompts: Prompts) -> dict[str, Tensor]:
        """Gradients by autograd, over as many cliques at a time as fit."""
        parts = []
        for sets, own in self._parts(task):
            leaves = {
                k: value[sets].detach().requires_grad_() for k, value in prompts.items()
            }
            with torch.enable_grad():
                total = self._losses_of(own, leaves).total.sum()
                parts.append(torch.autograd.grad(total, list(leaves.values())))
        joined = [torch.cat(part) for part in zip(*parts, strict=True)]
        return dict(zip(prompts, joined, strict=True))

    @torch.no_grad()
    def _losses(self, task: Task, prompts: Prompts) -> CliqueLosses:
        """Losses of all cliques at their own prompts."""
        parts = [
            self._losses_of(own, {name: value[sets] for name, value in prompts.items()})
            for sets, own in self._parts(task)
        ]
        return CliqueLosses(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _losses_of(self, task: Task, prompts: Prompts) -> CliqueLosses:
        """Losses of the cliques of ``task`` from full forward passes."""
        features, text_features = task.plain[task.image], self.start_text
        if "visual" in prompts:
            features = self.prompted(
                task.hidden[task.image], prompts["visual"][task.clique]
            )
        if "text" in prompts and self.text is not None:
            text_features = self.text.features(prompts["text"])
        members = Members(features, task.clique, task.count)
        queries, logits = classify(
            members, text_features, self.scale, self.config.rules
        )
        return clique_losses(members, logits, queries.clique, self.config)

    def prompted(self, hidden: Tensor, visual: Tensor) -> Tensor:
        """Unit features of hidden states (R, T, D) under prompts (R or 1, B, P, 2, D)."""
        assert self.tower is not None
        blocks = self.config.blocks
        prefix = {block: Prefix(visual[:, at]) for at, block in enumerate(blocks)}
        return l2_normalize(
            self.tower.pool(self.tower.run(hidden, blocks[0], prefix=prefix))
        )

    def _parts(self, task: Task) -> Iterator[tuple[slice, Task]]:
        """The task in parts of at most ``graph_rows`` memberships; none splits a set."""
        ends = (
            torch.bincount(task.clique.cpu(), minlength=task.count).cumsum(0).tolist()
        )
        texts = 1 if self.text is None else self.text.classes
        first, begun = 0, 0
        for index, (end, following) in enumerate(
            zip(ends, [*ends[1:], math.inf], strict=True)
        ):
            texts_full = (index + 2 - first) * texts > 4 * self.graph_rows
            if following - begun > self.graph_rows or texts_full:
                rows, sets = slice(begun, end), slice(first, index + 1)
                clique, image = task.clique[rows] - first, task.image[rows]
                yield (
                    sets,
                    replace(task, clique=clique, image=image, count=index + 1 - first),
                )
                first, begun = index + 1, end
