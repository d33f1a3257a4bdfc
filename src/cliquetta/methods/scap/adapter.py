"""SCAP on one batch after another: section 3 of the paper, step by step.

:meth:`SCAP._predict` is the way through: mine the supportive cliques (`cliques`), learn
their attribute prompts (`learning`), retain them (`retention`), compose the prompts of
every image and infer (`composition`). ``b`` is the number of images, ``N`` that of
classes, ``E`` the width of a feature, ``U`` the number of distinct member sets.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.explanation import (
    CacheCount,
    Explanation,
    PromptedPasses,
)
from cliquetta.methods.building.memory import Range
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import confident_views, mean_logits
from cliquetta.methods.scap import evidence
from cliquetta.methods.scap.cliques import (
    Cliques,
    mine_cliques,
    similar_images,
    top_classes,
)
from cliquetta.methods.scap.composition import (
    Composed,
    PrefixedTower,
    gather_prompts,
    merge_passes,
    plan_passes,
)
from cliquetta.methods.scap.config import PRESETS, SCAPConfig
from cliquetta.methods.scap.learning import Learned, Learner, Task
from cliquetta.methods.scap.retention import Cache, retain, running_mean
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.cuda import Fetched, Replayed, send
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import VisualTape
from cliquetta.types import Batch, Prediction


class Encoded(NamedTuple):
    """Images without prompts; without a tower that takes some, there are no states."""

    hidden: Tensor  # States (b, T, D) at the first prompted block.
    plain: Tensor  # Unit features (b, E).


@register(
    "scap",
    paper="Zhang et al., SCAP: Transductive Test-Time Adaptation via Supportive Clique-based "
    "Attribute Prompting, CVPR 2025",
    presets=PRESETS,
)
class SCAP(Adapter):
    """Supportive cliques, attribute prompts in both modalities, retention.

    The memory holds ``start_prompt`` (P0^I), the cache R (``keys``, ``values``,
    ``count``), the mean text prompt (``text_mean`` over ``text_seen`` cliques) and two
    tallies (``sets_learned``, ``batches``).
    """

    batch_dependence = BatchDependence.JOINT
    config: SCAPConfig
    visual: PrefixedTower | None
    text: PromptedText | None

    def _setup(self) -> None:
        config = self.config
        self._refuse_model()
        self._replayed = Replayed()
        self.visual = self._build_visual()
        self.text = None
        self.classifier = self.model.classifier(self.prompts)
        if config.learns_text:
            self.text = PromptedText(self.model, self.prompts, config.text_mix)
        self.learner = Learner(
            tower=None if self.visual is None else self.visual.tower,
            text=self.text,
            classifier=self.classifier,
            scale=self.model.scale,
            config=config,
            rows=1 if self.visual is None else self.visual.rows,
            replayed=self._replayed,
        )
        self._warn()
        self._declare()

    # --- one batch, as section 3 of the paper -----------------------------------

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        images = self._encode(batch.images)

        # Section 3.2: mine the supportive cliques (Eq. 1-3). The CPU mines; a GPU runs
        # the first pass of 3.3 in the meantime and records it on a tape.
        related = self._relate(images)
        tape = self._record_ahead(images)
        top, cliques = self._mine(related)

        # Section 3.3: learn the attribute prompts of every clique (Eq. 4-10, 14).
        learned = self._learn(cliques, images, tape)

        # Section 3.4: retain them (Eq. 11-13).
        self._retain(cliques, learned)

        # Section 3.5: compose the prompts of every image (Eq. 15-18) and infer (Eq. 19).
        query = self._query(images, learned)
        composed = self._compose(cliques, top, learned, query)
        logits = self._infer(batch, images, composed)

        self.memory["batches"] = self.memory["batches"] + 1
        rests_on = self._evidence(images, cliques, top, learned, composed)
        return Prediction(logits.float(), rests_on)

    def _encode(self, images: Tensor) -> Encoded:
        """Encode images (b, 3, S, S) without prompts."""
        # A tower that takes no prompts has no states to go on from.
        if self.visual is None:
            no_states = images[:0]
            plain = self.model.encode_image(images, normalize=True)
            return Encoded(no_states, plain)
        hidden, plain = self._replayed(self.visual.hidden_and_plain, images)
        return Encoded(hidden, plain)

    def _start_features(self, images: Encoded) -> Tensor:
        """Compute unit features (b, E) under the start prompt P0^I (Eq. 4)."""
        if self.visual is None:
            return images.plain
        start = self.memory["start_prompt"]
        return self.learner.prompted(images.hidden, start[None])

    def _relate(self, images: Encoded) -> Fetched:
        """Send top classes (b, k) and similar pairs (b, b) on their way to the CPU."""
        features = images.plain
        if self.config.rules.prompted_mining:
            features = self._start_features(images)
        # Eq. 1: topk(x_j) by the logits of plain text features.
        logits = self.model.scale * features @ self.classifier.T
        top = top_classes(logits, self.config.topk)
        # Eq. 2-3: the entries of M above t.
        similar = similar_images(features, self.config.threshold)
        return Fetched(top, similar)

    def _record_ahead(self, images: Encoded) -> VisualTape | None:
        """Queue the pass under the start prompt on a GPU, which runs it meanwhile."""
        is_ahead = self.config.learns_visual and images.hidden.is_cuda
        if not is_ahead:
            return None
        start = self.memory["start_prompt"]
        return self.learner.record(images.hidden, start)

    def _mine(self, related: Fetched) -> tuple[Tensor, Cliques]:
        """Mine the cliques (Eq. 3) on the CPU: the one synchronisation per batch."""
        top, similar = related.wait()
        rules = self.config.rules
        cliques = mine_cliques(
            similar, top, full_sets=rules.full_sets, repeats=rules.repeated_cliques
        )
        return top, cliques

    def _learn(
        self, cliques: Cliques, images: Encoded, tape: VisualTape | None
    ) -> Learned | None:
        """Learn prompts of the distinct member sets; ``None`` if there are none."""
        count = len(cliques.sets)
        if count == 0:
            return None
        self.memory["sets_learned"] = self.memory["sets_learned"] + count
        # On a long stream, text gradients come from a Jacobian that is built once.
        if self.text is not None and self.learner.learns_text:
            self.text.choose_gradient(int(self.memory["sets_learned"]))
        set_index, image = cliques.sets.nonzero(as_tuple=True)
        device = images.plain.device
        task = Task(
            hidden=images.hidden,
            plain=images.plain,
            set_index=send(set_index, device),
            image=send(image, device),
            count=count,
        )
        start = self.memory["start_prompt"] if self.config.learns_visual else None
        return self.learner.learn(task, start, tape=tape, explain=self.collect_evidence)

    def _retain(self, cliques: Cliques, learned: Learned | None) -> None:
        """Retain the prompts of all cliques, in mining order."""
        if learned is None:
            return
        set_of = send(cliques.set_of, self.model.device)
        if learned.text is not None:
            self._retain_text(cliques, learned.text)
        cache = self._cache()
        if learned.visual is not None and cache is not None:
            cache = retain(
                cache,
                classes=cliques.classes,
                keys=learned.attributes[set_of],
                values=learned.visual.flatten(1)[set_of],
                config=self.config,
                replayed=self._replayed,
            )
            self.memory["keys"] = cache.keys
            self.memory["values"] = cache.values
            self.memory["count"] = cache.count

    def _retain_text(self, cliques: Cliques, text: Tensor) -> None:
        """Average the text prompts (U, ...) of all cliques so far (Eq. 11)."""
        # Every clique counts, so a set counts as often as it is a clique of a class.
        sets = len(cliques.sets)
        times = torch.bincount(cliques.set_of, minlength=sets)
        times = send(times, text.device)
        times = times.to(text.dtype)
        total = torch.einsum("u,u...->...", times, text)

        # Eq. 11 for all of them at once.
        new = len(cliques)
        seen = int(self.memory["text_seen"])
        mean = self.memory["text_mean"]
        self.memory["text_mean"] = running_mean(mean, seen, total, new)
        self.memory["text_seen"] = torch.tensor(seen + new)

    def _cache(self) -> Cache | None:
        """Read the retained visual prompts R, where there are such."""
        if not (self.config.retention and self.config.learns_visual):
            return None
        memory = self.memory
        return Cache(memory["keys"], memory["values"], memory["count"])

    def _query(self, images: Encoded, learned: Learned | None) -> Tensor:
        """Choose the features (b, E) that are matched with the keys: f_j^I of Eq. 16.

        They are under the start prompt, as the keys are.
        """
        cache = self._cache()
        if cache is None or int(cache.count.sum()) == 0:
            return images.plain  # nothing to match
        if learned is not None:
            return learned.start_features
        return self._start_features(images)

    def _compose(
        self, cliques: Cliques, top: Tensor, learned: Learned | None, query: Tensor
    ) -> Composed:
        """Compose the visual prompts of every pass (Eq. 15-17) and texts (Eq. 18)."""
        passes = plan_passes(cliques, top, self.memory["count"], self.config)
        if learned is not None and learned.visual is not None:
            visual = learned.visual.flatten(1)
        else:
            has_start = "start_prompt" in self.memory
            size = self.memory["start_prompt"].numel() if has_start else 0
            visual = query.new_zeros(0, size)
        prompts, mask, slots = gather_prompts(
            passes, visual, self._cache(), query, self.config
        )
        return Composed(
            passes=passes,
            prompts=prompts,
            mask=mask,
            slots=slots,
            text_features=self._text_features(),
        )

    def _text_features(self) -> Tensor:
        """Encode the classes (N, E) under P_C^T (Eq. 18 with alpha_r = 1)."""
        if self.text is None or int(self.memory["text_seen"]) == 0:
            return self.classifier
        context = self.memory["text_mean"]
        features = self.text.features(context[None])
        return features[0]

    def _infer(self, batch: Batch, images: Encoded, composed: Composed) -> Tensor:
        """Score every image (b, N), or the most confident of its views."""
        if batch.views is None:
            return self._logits(images, composed)
        # (b, V, N): every view under the prompts of its image.
        views = [self._encode(view) for view in batch.views.unbind(dim=1)]
        by_view = [self._logits(view, composed) for view in views]
        logits = torch.stack(by_view, dim=1)
        confident = confident_views(logits, self.config.selection_fraction)
        return mean_logits(logits, confident)

    def _logits(self, images: Encoded, composed: Composed) -> Tensor:
        """Score one view of every image, (b, N): Eq. 19, then Eq. 7."""
        passes = composed.passes
        plain = images.plain
        if self.visual is None or not self.config.scores_with_visual:
            features = plain[send(passes.image, plain.device)]
        else:
            features = self.visual.pass_features(images.hidden, plain, composed)

        # One row per pass, then one per image.
        logits = self.model.scale * features @ composed.text_features.T
        classes = logits.shape[-1]
        by_image = logits.view(-1, passes.width, classes)
        return merge_passes(by_image)

    # --- set-up -----------------------------------------------------------------

    def _refuse_model(self) -> None:
        """Refuse a model or class prompts that cannot be prompted."""
        needs = set()
        if self.config.learns_visual:
            needs.add("visual-prefix")
        if self.config.learns_text:
            needs.add("text-prompts")
            if self.prompts.features is not None:
                raise UserError(
                    "fixed text features cannot be prompted; set scap.modalities=image"
                )
        self.model.require(frozenset(needs), by="scap")

    def _build_visual(self) -> PrefixedTower | None:
        """Build the prompted image tower; ``None`` if it takes no prompts."""
        tower = self.model.visual
        if not isinstance(tower, VisionTower):
            return None
        blocks = self.config.blocks
        if blocks[-1] >= len(tower.blocks):
            raise UserError(
                f"scap.blocks {blocks}: {self.model.id} has {len(tower.blocks)} blocks"
            )
        return PrefixedTower(tower, blocks, self.config.prompt_length, self._replayed)

    def _warn(self) -> None:
        """Warn of settings without effect; refuse those that learn nothing."""
        if self.config.modalities == "text" and not self.learner.learns_text:
            raise UserError(
                f"nothing to learn: template {self.prompts.templates[0]!r} has no words "
                "before the class name; put another first, or set scap.modalities=image"
            )
        for name in self.config.without_effect():
            warnings.warn(
                f"scap.{name} has no effect beside the other settings", stacklevel=3
            )
        if self.config.learns_text and not self.learner.learns_text:
            warnings.warn(
                f"no text prompt is learned: {self._text_prompts()}; put a template "
                "with words in front of the class name first, or set "
                "scap.modalities=image",
                stacklevel=3,
            )

    def _text_prompts(self) -> str:
        """Say whether text prompts are learned, and why not."""
        if not self.config.learns_text:
            return "not asked for"
        if self.learner.learns_text:
            return "learned"
        return f"{self.prompts.templates[0]!r} has no words before the name"

    def _declare(self) -> None:
        """Declare what is remembered between batches."""
        config = self.config
        model = self.model
        real = torch.float64 if model.dtype == torch.float64 else torch.float32
        classes = len(self.prompts)

        # P0^I from U(-1, 1), which every clique starts from, and the cache R.
        if self.visual is not None:
            width = self.visual.tower.config.width
            shape = len(config.blocks), config.prompt_length, 2, width
            generator = torch.Generator().manual_seed(self.seed)
            draw = torch.rand(shape, generator=generator, dtype=real)
            start = 2 * draw - 1
            start = start.to(model.device)
            self.memory.declare("start_prompt", start)

            if config.learns_visual:
                slots = config.capacity + 1
                keys = start.new_zeros(classes, slots, model.embed_dim)
                values = start.new_zeros(classes, slots, start.numel())
                self.memory.declare("keys", keys)
                self.memory.declare("values", values)
        at_most = Range(below=config.capacity + 1)
        count = torch.zeros(classes, dtype=torch.long)
        self.memory.declare("count", count, at_most)

        # The mean text prompt, and over how many cliques.
        if self.learner.learns_text and self.text is not None:
            mean = self.text.start.to(real)
            if config.rules.text_per_class:
                mean = mean.expand(classes, -1, -1)
            self.memory.declare("text_mean", mean)
        self.memory.declare("text_seen", torch.tensor(0))

        # Tallies: of the gradient's choice, and for readers of a state.
        self.memory.declare("sets_learned", torch.tensor(0))
        self.memory.declare("batches", torch.tensor(0))

    # --- for reports and the app ------------------------------------------------

    def _evidence(
        self,
        images: Encoded,
        cliques: Cliques,
        top: Tensor,
        learned: Learned | None,
        composed: Composed,
    ) -> dict[str, Any]:
        """Collect what :func:`cliquetta.methods.scap.evidence.describe` reads."""
        visual_prompts = "none"
        if self.config.learns_visual:
            scored = self.config.scores_with_visual
            visual_prompts = "composed" if scored else "discarded"
        by_jacobian = (
            learned and self.text is not None and self.text.jacobian is not None
        )
        rests_on = {
            "cliques": cliques,
            "learned": learned,
            "passes": composed.passes,
            "retained": composed.slots,
            "top": top,
            "text_prompts": self._text_prompts(),
            "visual_prompts": visual_prompts,
            "text_gradient": "jacobian" if by_jacobian else "vjp",
        }
        if self.collect_evidence:  # what an explanation reads
            cache = self._cache()
            rests_on["plain"] = images.plain
            rests_on["prompts"] = composed.prompts
            rests_on["prompt_mask"] = composed.mask
            rests_on["retained_prompts"] = None if cache is None else cache.values
        return rests_on

    @torch.no_grad()
    def explain(
        self, batch: Batch, prediction: Prediction, *, maps: int = 0
    ) -> Explanation:
        """Explain as any method does, with cliques, prompts and attention maps."""
        plain = super().explain(batch, prediction)
        return evidence.explain(self, batch, prediction, plain, maps)

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """Count cliques, and images that were scored with prompts."""
        return evidence.summary(prediction)

    def prompted_passes(
        self, prediction: Prediction, index: int
    ) -> PromptedPasses | None:
        """Return the passes over image ``index`` that were scored with prompts."""
        return evidence.prompted_passes(self, prediction, index)

    def cache_counts(self) -> dict[str, CacheCount]:
        """Count the retained prompts of every class."""
        if self._cache() is None:
            return {}
        counts = tuple(self.memory["count"].tolist())
        return {"retained prompts": CacheCount(counts, self.config.capacity)}
