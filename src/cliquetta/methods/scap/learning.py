"""Attribute prompt learning: every clique of a batch at once (Eq. 4-10, 15)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.losses import (
    CliqueLosses,
    attribute_features,
    clique_losses,
    clique_sum,
    concentration_loss,
    entropy_loss,
    queries,
)
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize, to_float32
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import VisualTape, chunks


@dataclass(frozen=True)
class Task:
    """The cliques of a batch, ready to be learned.

    Row r of the memberships says that image ``image[r]`` is in distinct set ``clique[r]``.
    ``hidden`` (b, T, D) are the states at the first prompted block, ``plain`` (b, E) unit features
    without prompts.
    """

    hidden: Tensor
    plain: Tensor
    clique: Tensor
    image: Tensor
    count: int


@dataclass(frozen=True)
class Learned:
    """Prompts of all distinct sets; ``None`` for a modality that is not learned."""

    visual: Tensor | None
    """(U, B, P, 2, D) for B prompted blocks."""
    text: Tensor | None
    """(U, M, D), or (U, N, M, D) when classes have their own."""
    attributes: Tensor
    """Keys (U, E): mean features, not normalised."""
    before: CliqueLosses
    after: CliqueLosses | None
    start_features: Tensor
    """Unit features (b, E) of the images under the start prompt; plain ones without a prompt."""


@dataclass(frozen=True)
class Moments:
    """Adam's state for one parameter."""

    first: Tensor
    second: Tensor

    @classmethod
    def zero(cls, parameter: Tensor) -> Moments:
        """No steps yet."""
        return cls(torch.zeros_like(parameter), torch.zeros_like(parameter))


def adam_step(
    parameter: Tensor, gradient: Tensor, moments: Moments, step: int, config: SCAPConfig
) -> tuple[Tensor, Moments]:
    """One step of Adam or AdamW (beta 0.9 and 0.999, eps 1e-8); ``step`` counts from 1.

    Coordinates do not interact, so that one call over stacked cliques is one optimiser each. From
    zero moments this is lr * g / (|g| + eps).
    """
    if config.optimiser == "adamw":
        parameter = parameter * (1 - 0.01 * config.lr)
    first = 0.9 * moments.first + 0.1 * gradient
    second = 0.999 * moments.second + 0.001 * gradient.square()
    size = (second / (1 - 0.999**step)).sqrt() + 1e-8
    moved = parameter - config.lr * (first / (1 - 0.9**step)) / size
    return moved, Moments(first, second)


class Learner:
    """Learns the cliques of one batch after another from the same start.

    ``rows`` bounds how many prompted images are pulled back at once; autograd, which keeps every
    block, gets a part of that.
    """

    def __init__(
        self,
        tower: VisionTower | None,
        text: PromptedText | None,
        classifier: Tensor,
        scale: float,
        config: SCAPConfig,
        rows: int,
    ) -> None:
        self.tower, self.text, self.classifier = tower, text, classifier
        self.scale, self.config, self.rows = scale, config, rows
        self.graph_rows = max(1, rows // (1 if tower is None else len(tower.blocks)))
        self.learns_text = config.learns_text and text is not None and len(text.start) > 0
        self.text_seconds: dict[str, float] = {}
        """Seconds of the last batch's text gradients by products (``vjp``) and of the first batch's
        through the Jacobian; the device is waited for only until both are known."""
        self.reduce: Callable[[Tensor], Tensor] = lambda gradient: gradient
        """Sums visual gradients over processes that share the memberships; one has them all."""
        self.share: Callable[[int], slice] = lambda total: slice(0, total)
        """The part of the memberships that this process pulls back."""

    @property
    def start_text(self) -> Tensor:
        """Text features (N, E) at the start."""
        return self.classifier if self.text is None else self.text.start_features

    def learn(self, task: Task, start: Tensor | None, *, explain: bool = False) -> Learned:
        """Prompts of all sets. ``start`` is (B, P, 2, D), (U, B, P, 2, D) or ``None`` (no image).

        ``explain`` evaluates the losses again afterwards, one more forward pass per membership.
        """
        config = self.config
        shared = start is not None and start.ndim == 4
        visual = text = None
        if start is not None:
            visual = start.expand(task.count, *start.shape[-4:])
        if self.learns_text and self.text is not None:
            context = self.text.start
            if config.text_scope == "class":
                context = context.expand(self.text.classes, -1, -1)
            text = context.expand(task.count, *context.shape)
        state_v = None if visual is None else Moments.zero(visual)
        state_t = None if text is None else Moments.zero(text)
        tape_features = task.plain
        for step in range(1, config.steps + 1):
            if step == 1 and (shared or start is None):
                before, grad_v, grad_t, tape_features = self._start_gradients(task, start)
            else:
                losses, grad_v, grad_t = self._gradients(task, visual, text)
                before = losses if step == 1 else before
            if visual is not None and grad_v is not None and state_v is not None:
                visual, state_v = adam_step(visual, grad_v, state_v, step, config)
            if text is not None and grad_t is not None and state_t is not None:
                text, state_t = adam_step(text, grad_t, state_t, step, config)
        after = None
        if explain or config.key == "updated":
            after = self._losses(task, visual, text)
        attributes = before.attributes
        if config.key == "updated" and after is not None:
            attributes = after.attributes
        return Learned(visual, text, attributes, before, after, tape_features)

    def start_features(self, task: Task, start: Tensor | None) -> Tensor:
        """Unit features (b, E) of the images under the shared start prompt."""
        if start is None:
            return task.plain
        return self._prompted(task, start.expand(1, *start.shape), slice(0, 0), whole=True)

    # --- the first step, from the shared start --------------------------------------------------

    def _start_gradients(
        self, task: Task, start: Tensor | None
    ) -> tuple[CliqueLosses, Tensor | None, Tensor | None, Tensor]:
        """Losses and gradients at the start, where all cliques share one forward pass an image."""
        config, U = self.config, task.count
        tape = None
        if start is not None and self.tower is not None:
            first = config.blocks[0]
            tape = VisualTape(self.tower, task.hidden, first, prefixes(start[None], config))
            raw = to_float32(tape.features)
        else:
            raw = task.plain
        with torch.enable_grad():
            rows = raw[task.image].detach().requires_grad_()
            features = l2_normalize(rows)
            asked, owner = queries(features, task.clique, U, config.entropy)
            logits = self.scale * asked @ self.start_text.T
            certainty = entropy_loss(logits, owner, U, config.entropy)
            attributes = attribute_features(features, task.clique, U)
            spread = concentration_loss(
                features, task.clique, attributes, config.concentration_form
            )
            total = certainty + config.concentration * spread
            grad_rows, slopes = torch.autograd.grad(total.sum(), [rows, logits])
        losses = CliqueLosses(
            certainty.detach(), spread.detach(), total.detach(), attributes.detach()
        )
        grad_v = None
        if tape is not None and start is not None:
            grad_v = self._pull_visual(tape, task, grad_rows, start)
        grad_t = None
        if self.learns_text:
            grad_t = self._pull_text(slopes * self.scale, asked.detach(), owner, U)
        return losses, grad_v, grad_t, l2_normalize(raw)

    def _pull_visual(self, tape: VisualTape, task: Task, grad: Tensor, start: Tensor) -> Tensor:
        """Gradients (U, B, P, 2, D) of all cliques' visual prompts: one row per membership."""
        total = grad.new_zeros(task.count, *start.shape)
        mine = self.share(len(grad))
        for part in chunks(mine.stop - mine.start, self.rows):
            part = slice(mine.start + part.start, mine.start + part.stop)
            found = tape.pull(grad[part], task.image[part])
            stacked = torch.stack([found[block] for block in self.config.blocks], dim=1)
            total += clique_sum(stacked, task.clique[part], task.count)
        return self.reduce(total)

    def _pull_text(self, slopes: Tensor, asked: Tensor, owner: Tensor, count: int) -> Tensor:
        """Gradients of all cliques' text prompts from those of the logits, (Q, N)."""
        assert self.text is not None
        way = "vjp" if self.text.jacobian is None else "jacobian"
        if way == "jacobian" and way in self.text_seconds:
            return self._pulled_text(slopes, asked, owner, count)
        _wait(slopes.device)
        started = time.perf_counter()
        found = self._pulled_text(slopes, asked, owner, count)
        _wait(slopes.device)
        self.text_seconds[way] = time.perf_counter() - started
        return found

    def _pulled_text(self, slopes: Tensor, asked: Tensor, owner: Tensor, count: int) -> Tensor:
        """The same, untimed."""
        assert self.text is not None
        if self.config.text_scope == "shared":
            found = self.text.pull_shared(slopes, asked)
            if len(slopes) == count and self.config.entropy == "mean-feature":
                return found
            return clique_sum(found, owner, count)
        total = slopes.new_zeros(count, slopes.shape[1], asked.shape[1])
        for part in chunks(len(slopes), max(1, 2**26 // (slopes.shape[1] * asked.shape[1]))):
            outer = slopes[part][:, :, None] * asked[part][:, None]
            total += clique_sum(outer, owner[part], count)
        return self.text.pull(total)

    # --- later steps, where every clique stands elsewhere ---------------------------------------

    def _gradients(
        self, task: Task, visual: Tensor | None, text: Tensor | None
    ) -> tuple[CliqueLosses, Tensor | None, Tensor | None]:
        """Losses and gradients by autograd, over as many whole cliques at a time as fit."""
        parts: list[CliqueLosses] = []
        grads_v: list[Tensor] = []
        grads_t: list[Tensor] = []
        for sets, rows in self._whole_cliques(task):
            own = replace(
                task,
                clique=task.clique[rows] - sets.start,
                image=task.image[rows],
                count=sets.stop - sets.start,
            )
            leaf_v = None if visual is None else visual[sets].detach().requires_grad_()
            leaf_t = None if text is None else text[sets].detach().requires_grad_()
            with torch.enable_grad():
                losses = self._losses_of(own, leaf_v, leaf_t)
                total = losses.total.sum()
            leaves = [leaf for leaf in (leaf_v, leaf_t) if leaf is not None]
            found = list(torch.autograd.grad(total, leaves))
            if leaf_v is not None:
                grads_v.append(found.pop(0))
            if leaf_t is not None:
                grads_t.append(found.pop(0))
            parts.append(losses)
        return (
            _joined(parts),
            torch.cat(grads_v) if grads_v else None,
            torch.cat(grads_t) if grads_t else None,
        )

    @torch.no_grad()
    def _losses(self, task: Task, visual: Tensor | None, text: Tensor | None) -> CliqueLosses:
        """Losses of all cliques at their own prompts."""
        parts = []
        for sets, rows in self._whole_cliques(task):
            own = replace(
                task,
                clique=task.clique[rows] - sets.start,
                image=task.image[rows],
                count=sets.stop - sets.start,
            )
            parts.append(
                self._losses_of(
                    own,
                    None if visual is None else visual[sets],
                    None if text is None else text[sets],
                )
            )
        return _joined(parts)

    def _losses_of(self, task: Task, visual: Tensor | None, text: Tensor | None) -> CliqueLosses:
        """Losses of the cliques of ``task`` from whole forward passes."""
        if visual is None:
            features = task.plain[task.image]
        else:
            features = self._prompted(task, visual, slice(0, len(task.image)))
        words = self.start_text
        if text is not None and self.text is not None:
            words = self.text.features_of_each(text)
        return clique_losses(features, task.clique, task.count, words, self.scale, self.config)

    def _prompted(self, task: Task, visual: Tensor, rows: slice, *, whole: bool = False) -> Tensor:
        """Unit features of the memberships ``rows`` under their cliques' prompts."""
        assert self.tower is not None
        if whole:
            hidden, own = task.hidden, visual
        else:
            hidden, own = task.hidden[task.image[rows]], visual[task.clique[rows]]
        first = self.config.blocks[0]
        out = self.tower.run(hidden, first, prefix=prefixes(own, self.config))
        return l2_normalize(self.tower.pool(out))

    def _whole_cliques(self, task: Task) -> list[tuple[slice, slice]]:
        """Sets and memberships in parts of at most ``rows`` memberships, never splitting a set."""
        ends = torch.bincount(task.clique.cpu(), minlength=task.count).cumsum(0).tolist()
        texts = 1 if self.text is None else self.text.classes
        parts, first, begun = [], 0, 0
        for index, end in enumerate(ends):
            last = index + 1 == len(ends)
            following = ends[index if last else index + 1]
            texts_full = (index + 2 - first) * texts > 4 * self.graph_rows
            if last or following - begun > self.graph_rows or texts_full:
                parts.append((slice(first, index + 1), slice(begun, end)))
                first, begun = index + 1, end
        return parts


def prefixes(visual: Tensor, config: SCAPConfig) -> dict[int, Prefix]:
    """Prompts (R, B, P, 2, D) as the prefix of every prompted block."""
    return {block: Prefix(visual[:, at]) for at, block in enumerate(config.blocks)}


def _wait(device: torch.device) -> None:
    """Let the device finish, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _joined(parts: list[CliqueLosses]) -> CliqueLosses:
    """Losses of consecutive cliques in one."""
    return CliqueLosses(
        torch.cat([part.entropy.detach() for part in parts]),
        torch.cat([part.concentration.detach() for part in parts]),
        torch.cat([part.total.detach() for part in parts]),
        torch.cat([part.attributes.detach() for part in parts]),
    )
