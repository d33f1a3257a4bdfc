"""SCAP, literally: the oracle that the engine is compared with.

One clique at a time, whole forward passes, plain autograd, ``torch.optim.Adam``; Python loops,
lists and sets. Written from the paper's equations and their reading in the specification; nothing
is shared, batched or rearranged. Everything runs in the model's dtype when that is float64, in
float32 otherwise.

Readings, where the paper is silent:

* Order. Classes ascend, rows of a set are in batch order, a clique keeps its first place. All
  ties (top-k, neighbours, closest pair, match, confidence) go to the lower index.
* ``full_set`` puts the whole set S_i, even of one image, in front of its rows; a row that gives
  the whole set again is not added again, even with ``deduplicate="none"``.
* Text. The learnable template is the first; its context stands right behind the start token. The
  feature is unit((1 - rho) u_learn + rho u_fix). A learner without context (``start_context`` is
  ``None`` or has no tokens) learns no text. Text for which no prompt was learned is the plain
  classifier, so that a run without prompts is zero-shot CLIP, also with several templates.
* ``modalities="text"`` never prompts an image, neither in the loss nor at inference, and retains
  no visual prompt.
* An image without any prompt is scored by its plain feature, whatever ``mining_features`` is.
* ``retention=False`` drops the visual cache only: "the text retention prompts are always used"
  (footnote of the component ablation).
* Text composition (Eq. 18) is per class i, over all cliques of i in the batch; a class without
  cliques takes the retained prompt alone, which is the start context as long as tau is 0.
* ``infer-first`` scores with cache and text prompt as they were before the batch; the cliques'
  own prompts are used all the same.
* Mean combinations. ``clique_combination="mean"`` turns the G prompts of an image's cliques into
  one. ``retained_combination="mean"`` averages each prompt that is left with the retained one,
  half and half, and adds none; without clique prompts the retained one stands alone.
* ``own-class``: the logit of class i comes from the pass of set i for every i in the top-k, that
  of any other class is the mean over the passes; softmax over the result.
* ``union``: one pass. Clique prompts of all top-k classes in mining order (equal member sets
  once), then the retained prompt of each class in top-k order; with
  ``retained_combination="mean"`` the retained prompts are first averaged into one. The text
  context is the mean of the classes' composed contexts.
* ``replace_keys=False``: propagated keys only choose the pair; raw keys are averaged and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests.reference.scap_equations import (
    Clique,
    Entry,
    ReferenceSettings,
    best_match,
    compose,
    fixed_features,
    image_features,
    learn,
    merge_passes,
    mine,
    plain_classifier,
    retain,
    running_mean,
    text_features,
    top_classes,
    working_dtype,
)

__all__ = ["ReferenceResult", "ReferenceSCAP", "ReferenceSettings"]


@dataclass
class ReferenceResult:
    """Everything that one batch produced. Lists are parallel to ``cliques`` (mining order)."""

    logits: Tensor
    """(b, N); softmax of them is ``probabilities``."""
    top: list[list[int]]
    """The top-k classes of every image, best first."""
    cliques: list[Clique]
    visual: list[Tensor | None]
    """Learned visual prompts (P, 2, D)."""
    text: list[Tensor | None]
    """Learned text contexts (M, Dt)."""
    keys: list[Tensor]
    losses_before: list[float]
    losses_after: list[float]
    retained: dict[int, list[Entry]]
    """The cache after the batch: classes that hold something, pairs in order."""
    text_mean: Tensor | None
    """The text retention prompt after the batch; ``None`` before there is one."""
    tau: int
    used: dict[tuple[int, int], tuple[tuple[int, ...], int | None]] = field(default_factory=dict)
    """(image, class) -> indices into ``cliques`` and the index matched in R_i at inference."""

    @property
    def probabilities(self) -> Tensor:
        """(b, N)."""
        return self.logits.softmax(dim=-1)


class ReferenceSCAP:
    """A stream of batches. ``start_prefix`` (P, 2, D) is P0^I, ``start_context`` (M, Dt) P0^T."""

    def __init__(
        self,
        model: CLIP,
        prompts: ClassPrompts,
        settings: ReferenceSettings,
        start_prefix: Tensor | None,
        start_context: Tensor | None,
    ) -> None:
        dtype = working_dtype(model)
        has_context = start_context is not None and len(start_context) > 0
        self.learns_visual = settings.modalities in ("both", "image")
        self.learns_text = settings.modalities in ("both", "text") and has_context
        if settings.modalities == "text" and not has_context:
            raise ValueError("nothing to learn: text only, and no context")
        if prompts.features is not None and start_context is not None:
            raise ValueError("fixed text features take no context")
        if start_prefix is None:
            if self.learns_visual or settings.mining_features == "start-prompt":
                raise ValueError("these settings need a start prefix")
        elif start_prefix.shape[:2] != (settings.prompt_length, 2):
            raise ValueError(f"start prefix is (P, 2, D), got {tuple(start_prefix.shape)}")
        self.model, self.prompts, self.settings = model, prompts, settings
        self.P0_I = None if start_prefix is None else start_prefix.detach().to(dtype)
        self.P0_T = None if start_context is None else start_context.detach().to(dtype)
        with torch.no_grad():
            self.W0 = plain_classifier(model, prompts)
            self.u_fix = None if self.P0_T is None else fixed_features(model, prompts)
        self.reset()

    def reset(self) -> None:
        """Start of a stream."""
        self.retained: dict[int, list[Entry]] = {}
        counted = self.settings.count_start and self.learns_text
        self.text_mean: Tensor | None = self.P0_T if counted else None
        self.tau = 1 if counted else 0

    @torch.no_grad()
    def predict(self, images: Tensor) -> ReferenceResult:
        """Mine, learn, retain and infer on one batch (b, 3, S, S), b > 0."""
        s = self.settings
        plain = image_features(self.model, images, None, s.prompt_block)
        start = None
        if self.P0_I is not None:
            start = image_features(self.model, images, self.P0_I, s.prompt_block)
        mining = plain if s.mining_features == "plain" else start
        assert mining is not None
        top = top_classes(self.model.scale * mining @ self.W0.T, min(s.topk, len(self.prompts)))
        cliques = mine(mining, top, s.threshold, full_set=s.full_set, deduplicate=s.deduplicate)
        learned = [
            learn(
                self.model,
                images[sorted(members)],
                self.P0_I if self.learns_visual else None,
                self.P0_T if self.learns_text else None,
                self.text_of,
                s,
                learn_text=self.learns_text,
            )
            for _, members in cliques
        ]
        result = ReferenceResult(
            logits=torch.empty(0),
            top=top,
            cliques=cliques,
            visual=[x.visual for x in learned],
            text=[x.text for x in learned],
            keys=[x.key for x in learned],
            losses_before=[float(x.before.total) for x in learned],
            losses_after=[float(x.after.total) for x in learned],
            retained={},
            text_mean=None,
            tau=0,
        )
        query = plain if s.query == "plain" or start is None else start
        if s.retention_order == "infer-first":
            result.logits = self._infer(images, plain, query, result)
            self._retain(result)
        else:
            self._retain(result)
            result.logits = self._infer(images, plain, query, result)
        result.retained = {i: list(entries) for i, entries in self.retained.items()}
        result.text_mean, result.tau = self.text_mean, self.tau
        return result

    def text_of(self, context: Tensor | None) -> Tensor:
        """Text features (N, E) with ``context``, or the plain classifier without one."""
        if context is None:
            return self.W0
        mix = self.settings.text_mix
        return text_features(self.model, self.prompts, context, self.u_fix, mix)

    def composed_context(self, i: int, result: ReferenceResult) -> Tensor | None:
        """Eq. 18: P_C^T of class i, or ``None`` as long as no text prompt is in use."""
        retained = self.text_mean
        if retained is None:
            unused = self.settings.text_retained_share == 1 or not any(
                text is not None for text in result.text
            )
            if unused:
                return None
            retained = self.P0_T
        own = [
            text
            for (c, _), text in zip(result.cliques, result.text, strict=True)
            if c == i and text is not None
        ]
        if not own or retained is None:
            return retained
        share = self.settings.text_retained_share
        return share * retained + (1 - share) * torch.stack(own).mean(dim=0)

    def _retain(self, result: ReferenceResult) -> None:
        """Step 3, clique by clique in mining order."""
        for g, (i, _) in enumerate(result.cliques):
            text, visual = result.text[g], result.visual[g]
            if text is not None:
                self.text_mean = running_mean(self.text_mean, text, self.tau)
                self.tau += 1
            if visual is not None and self.settings.retention:
                entries = self.retained.get(i, [])
                self.retained[i] = retain(entries, result.keys[g], visual, self.settings)

    def _infer(
        self, images: Tensor, plain: Tensor, query: Tensor, result: ReferenceResult
    ) -> Tensor:
        """Step 4 for every image; notes the prompts used in ``result.used``."""
        s = self.settings
        seen = sorted({i for classes in result.top for i in classes})
        text = {i: self.text_of(self.composed_context(i, result)) for i in seen}
        rows = []
        for j in range(len(images)):
            classes = result.top[j][:1] if s.merge == "top-1" else result.top[j]
            own: dict[int, list[int]] = {}
            kept: dict[int, list[Tensor]] = {}
            for i in classes:
                own[i] = [g for g, (c, C) in enumerate(result.cliques) if c == i and j in C]
                entries = self.retained.get(i, [])
                best = best_match(query[j], [k for k, _ in entries], s.match) if entries else None
                kept[i] = [] if best is None else [entries[best][1]]
                result.used[j, i] = (tuple(own[i]), best)
            if s.merge == "union":
                passes = [self._union_pass(images[j], plain[j], classes, own, kept, result)]
            else:
                passes = []
                for i in classes:
                    prompt = compose(self._prompts(own[i], result), kept[i], s)
                    passes.append(self._score(images[j], plain[j], prompt, text[i]))
            rows.append(merge_passes(torch.stack(passes), classes, s.merge))
        return torch.stack(rows)

    def _union_pass(
        self,
        image: Tensor,
        plain: Tensor,
        classes: Sequence[int],
        own: dict[int, list[int]],
        kept: dict[int, list[Tensor]],
        result: ReferenceResult,
    ) -> Tensor:
        """Logits of one pass with the prompts of all of an image's sets."""
        unique: dict[frozenset[int], int] = {}
        for g in sorted(g for cliques in own.values() for g in cliques):
            unique.setdefault(result.cliques[g][1], g)
        prompts = self._prompts(list(unique.values()), result)
        prompt = compose(prompts, [value for i in classes for value in kept[i]], self.settings)
        contexts = [self.composed_context(i, result) for i in classes]
        given = [context for context in contexts if context is not None]
        text = self.text_of(torch.stack(given).mean(dim=0) if given else None)
        return self._score(image, plain, prompt, text)

    def _prompts(self, cliques: Sequence[int], result: ReferenceResult) -> list[Tensor]:
        """The visual prompts of these cliques; none when text alone is learned."""
        return [visual for g in cliques if (visual := result.visual[g]) is not None]

    def _score(self, image: Tensor, plain: Tensor, prompt: Tensor | None, text: Tensor) -> Tensor:
        """Eq. 19, 7: logits (N,) of one image in one pass."""
        feature = plain
        if prompt is not None:
            block = self.settings.prompt_block
            feature = image_features(self.model, image[None], prompt, block)[0]
        return self.model.scale * text @ feature
