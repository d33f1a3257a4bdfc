"""SCAP, literally: the oracle that the engine is compared with.

One clique at a time, complete forward passes, plain autograd, ``torch.optim.Adam``;
Python loops, lists and sets, in float64 if the model is. Readings where the paper is
silent:

* Classes ascend, rows of a set are in batch order, all ties go to the lower index.
* ``full_sets`` puts the set S_i, even of one image, in front of its rows, and only
  once.
* A learned context stands in the first template. Text for which none was learned is the
  plain classifier; images without any prompt have their plain feature.
* ``modalities="text"`` never prompts an image and retains no visual prompt;
  ``retention=False`` drops the visual cache only. Eq. 18 has alpha_r = 1: the running
  mean alone.
* ``retained_combination="mean"`` averages each clique prompt with the retained one,
  half and half.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests.reference import scap_equations as eq
from tests.reference.scap_equations import Clique, Entry, Learned, ReferenceSettings


@dataclass
class ReferenceResult:
    """Everything that one batch produced."""

    top: list[list[int]]
    cliques: list[Clique]  # in mining order
    learned: list[Learned]  # of each clique
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # (b, N)
    retained: dict[int, list[Entry]] = field(default_factory=dict)  # after the batch
    text_mean: Tensor | None = None
    tau: int = 0
    used: dict[tuple[int, int], tuple[tuple[int, ...], int | None]] = field(
        default_factory=dict
    )
    """(image, class) -> indices into ``cliques`` and the index matched in R_i at inference."""

    @property
    def probabilities(self) -> Tensor:
        """(b, N)."""
        return self.logits.softmax(dim=-1)


class ReferenceSCAP:
    """A stream of batches from P0^I, ``start_prefix`` (B, P, 2, D), and P0^T (M, Dt)."""

    def __init__(
        self,
        model: CLIP,
        prompts: ClassPrompts,
        settings: ReferenceSettings,
        start_prefix: Tensor,
        start_context: Tensor,
    ) -> None:
        dtype = eq.working_dtype(model)
        self.model = model
        self.prompts = prompts
        self.settings = settings
        self.P0_I = start_prefix.detach().to(dtype)
        self.P0_T = start_context.detach().to(dtype)
        if settings.text_per_class:
            self.P0_T = self.P0_T.repeat(len(prompts), 1, 1)
        with torch.no_grad():
            self.W0 = eq.plain_classifier(model, prompts)
            self.u_fix = eq.fixed_features(model, prompts)
        self.retained: dict[int, list[Entry]] = {}
        self.text_mean: Tensor | None = None
        self.tau = 0

    @torch.no_grad()
    def predict(self, images: Tensor) -> ReferenceResult:
        """Mine, learn, retain and infer on one batch (b, 3, S, S), b > 0."""
        s = self.settings
        plain = eq.image_features(self.model, images, None, s.blocks)
        start = eq.image_features(self.model, images, self.P0_I, s.blocks)
        mining = start if s.prompted_mining else plain
        top = eq.top_classes(
            self.model.scale * mining @ self.W0.T, min(s.topk, len(self.prompts))
        )
        cliques = eq.mine(
            mining, top, s.threshold, full_sets=s.full_sets, repeats=s.repeated_cliques
        )
        learned = [
            eq.learn(
                self.model,
                images[sorted(members)],
                None if s.modalities == "text" else self.P0_I,
                None if s.modalities == "image" else self.P0_T,
                self.text_of,
                s,
            )
            for _, members in cliques
        ]
        result = ReferenceResult(top, cliques, learned)
        self._retain(result)
        result.logits = self._infer(images, plain, start, result)
        result.retained = {i: list(entries) for i, entries in self.retained.items()}
        result.text_mean = self.text_mean
        result.tau = self.tau
        return result

    def text_of(self, context: Tensor | None) -> Tensor:
        """Text features (N, E) with ``context``, or the plain classifier without one."""
        if context is None:
            return self.W0
        return eq.text_features(
            self.model, self.prompts, context, self.u_fix, self.settings.text_mix
        )

    def _retain(self, result: ReferenceResult) -> None:
        """Step 3, clique by clique in mining order."""
        s = self.settings
        for (i, _), own in zip(result.cliques, result.learned, strict=True):
            if own.text is not None:
                mean = eq.running_mean(self.text_mean, own.text, self.tau)
                self.text_mean = mean
                self.tau += 1

            if own.visual is not None and s.retention:
                before = self.retained.get(i, [])
                after = eq.retain(before, own.key, own.visual, s)
                self.retained[i] = after

    def _infer(
        self, images: Tensor, plain: Tensor, query: Tensor, result: ReferenceResult
    ) -> Tensor:
        """Step 4 for every image; notes the prompts used in ``result.used``."""
        s = self.settings
        text = self.text_of(self.text_mean)
        rows = []

        for j in range(len(images)):
            classes = result.top[j]
            if s.best_class_only:
                classes = classes[:1]
            passes = []
            for i in classes:
                # prompts of the class's cliques with this image
                own = []
                prompts = []
                for g, (c, C) in enumerate(result.cliques):
                    if c != i or j not in C:
                        continue
                    own.append(g)
                    visual = result.learned[g].visual
                    if visual is not None:
                        prompts.append(visual)

                # and the retained one whose key matches it best
                entries = self.retained.get(i, [])
                best = None
                retained = []
                if entries:
                    best = eq.best_match(query[j], [key for key, _ in entries])
                    retained = [entries[best][1]]

                result.used[j, i] = (tuple(own), best)
                prompt = eq.compose(prompts, retained, s)
                passes.append(self._score(images[j], plain[j], prompt, text))
            rows.append(eq.merge_passes(torch.stack(passes)))
        return torch.stack(rows)

    def _score(
        self, image: Tensor, plain: Tensor, prompt: Tensor | None, text: Tensor
    ) -> Tensor:
        """Eq. 19, 7: logits (N,) of one image in one pass."""
        feature = plain
        if prompt is not None:
            block = self.settings.blocks
            feature = eq.image_features(self.model, image[None], prompt, block)[0]
        return self.model.scale * text @ feature
