"""The adapter: mines, learns, retains and infers on every batch, and owns the memory."""

import warnings
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.building.explanation import (
    CacheCount,
    Explanation,
    PromptedPasses,
)
from cliquetta.methods.building.memory import Range
from cliquetta.methods.building.views import confident_views, mean_logits
from cliquetta.methods.registry import register
from cliquetta.methods.scap import composition, evidence
from cliquetta.methods.scap.cliques import (
    Cliques,
    mine_cliques,
    similar_images,
    top_classes,
)
from cliquetta.methods.scap.config import PRESETS, SCAPConfig
from cliquetta.methods.scap.learning import Learned, Learner, Task
from cliquetta.methods.scap.retention import Cache, retain, running_mean
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.cuda import Fetched, Replayed, send
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import VisualTape
from cliquetta.types import Batch, Prediction


@register(
    "scap",
    paper="Zhang et al., SCAP: Transductive Test-Time Adaptation via Supportive Clique-based "
    "Attribute Prompting, CVPR 2025",
    presets=PRESETS,
)
class SCAP(Adapter):
    """Supportive cliques, attribute prompts in both modalities, retention."""

    batch_dependence = BatchDependence.JOINT
    config: SCAPConfig
    visual: composition.PrefixedTower | None

    def _setup(self) -> None:
        model, prompts, config = self.model, self.prompts, self.config
        needs = {"visual-prefix"} if config.learns_visual else set()
        if config.learns_text:
            needs |= {"text-prompts"}
            if prompts.features is not None:
                raise UserError(
                    "fixed text features cannot be prompted; set scap.modalities=image"
                )
        model.require(frozenset(needs), by="scap")
        self._replayed, self.visual, tower, rows = Replayed(), None, None, 1
        if isinstance(model.visual, VisionTower):
            tower, blocks, length = model.visual, config.blocks, config.prompt_length
            self.visual = composition.PrefixedTower(
                tower, blocks, length, self._replayed
            )
            rows = self.visual.rows
            if blocks[-1] >= len(tower.blocks):
                raise UserError(
                    f"scap.blocks {blocks}: {model.id} has {len(tower.blocks)} blocks"
                )
        self.classifier = model.classifier(prompts)
        self.text = (
            PromptedText(model, prompts, config.text_mix)
            if config.learns_text
            else None
        )
        texts = self.text, self.classifier, model.scale
        self.learner = Learner(tower, *texts, config, rows, self._replayed)
        if config.modalities == "text" and not self.learner.learns_text:
            raise UserError(
                f"nothing to learn: template {prompts.templates[0]!r} has no words before the "
                "class name; put another first, or set scap.modalities=image"
            )
        for name in config.without_effect():
            warnings.warn(
                f"scap.{name} has no effect beside the other settings", stacklevel=2
            )
        if config.learns_text and not self.learner.learns_text:
            warnings.warn(
                f"no text prompt is learned: {self._text_prompts()}; put a template with words in "
                "front of the class name first, or set scap.modalities=image",
                stacklevel=2,
            )
        self._declare()

    def _text_prompts(self) -> str:
        """Whether text prompts are learned, and why not."""
        if not self.config.learns_text:
            return "not asked for"
        first = self.prompts.templates[0]
        return (
            "learned"
            if self.learner.learns_text
            else f"{first!r} has no words before the name"
        )

    def _declare(self) -> None:
        config, device = self.config, self.model.device
        real = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(self.seed)
        E, N = self.model.embed_dim, len(self.prompts)
        if self.visual is not None:
            shape = (
                len(config.blocks),
                config.prompt_length,
                2,
                self.visual.tower.config.width,
            )
            draw = torch.rand(shape, generator=generator, dtype=real)
            self.memory.declare("start_prompt", (2 * draw - 1).to(device))  # U(-1, 1)
            if config.learns_visual:
                for name, size in (("keys", E), ("values", draw.numel())):
                    empty = torch.zeros(
                        N, config.capacity + 1, size, dtype=real, device=device
                    )
                    self.memory.declare(name, empty)
        below = Range(below=config.capacity + 1)
        self.memory.declare("count", torch.zeros(N, dtype=torch.long), below)
        if self.learner.learns_text and self.text is not None:
            mean = self.text.start.to(real)
            if config.rules.text_per_class:
                mean = mean.expand(N, -1, -1)
            self.memory.declare("text_mean", mean)
        for name in ("text_seen", "sets_learned", "batches"):
            self.memory.declare(name, torch.tensor(0))

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        config, rules = self.config, self.config.rules
        hidden, plain = self._encode(batch.images)
        mined = self._start_features(hidden, plain) if rules.prompted_mining else plain
        top = top_classes(self.model.scale * mined @ self.classifier.T, config.topk)
        related = Fetched(top, similar_images(mined, config.threshold))
        tape = None
        if (
            config.learns_visual and hidden.is_cuda
        ):  # the GPU runs it while the CPU mines
            tape = self.learner.record(hidden, self.memory["start_prompt"])
        top, cliques = self._mine(related)
        learned = self._learn(cliques, hidden, plain, tape) if len(cliques) else None
        if learned is not None:
            self._retain(cliques, learned)
        cache, query = self._cache(), plain
        if cache is not None and int(cache.count.sum()):
            if learned is not None:
                query = learned.start_features
            else:
                query = (
                    mined
                    if rules.prompted_mining
                    else self._start_features(hidden, plain)
                )
        composed = self._compose(cliques, top, learned, cache, query)
        if batch.views is None:
            logits = self._logits(hidden, plain, composed)
        else:
            views = [self._encode(view) for view in batch.views.unbind(dim=1)]
            each = torch.stack([self._logits(*view, composed) for view in views], dim=1)
            logits = mean_logits(each, confident_views(each, config.selection_fraction))
        self.memory["batches"] = self.memory["batches"] + 1
        rests_on = self._evidence(cliques, learned, composed, top)
        if self.collect_evidence:
            rests_on |= {
                "plain": plain,
                "prompts": composed.prompts,
                "prompt_mask": composed.mask,
            }
            rests_on["retained_prompts"] = None if cache is None else cache.values
        return Prediction(logits.float(), rests_on)

    # --- the steps ------------------------------------------------------------------------------

    def _encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states at the first prompted block, and plain unit features."""
        if self.visual is None:
            return images[:0], self.model.encode_image(images, normalize=True)
        hidden, plain = self._replayed(self.visual.hidden_and_plain, images)
        return hidden, plain

    def _mine(self, related: Fetched) -> tuple[Tensor, Cliques]:
        """Top classes and cliques of the batch, on the CPU: the one synchronisation per batch."""
        (top, similar), rules = related.wait(), self.config.rules
        full, repeats = rules.full_sets, rules.repeated_cliques
        return top, mine_cliques(similar, top, full_sets=full, repeats=repeats)

    def _start_features(self, hidden: Tensor, plain: Tensor) -> Tensor:
        """Unit features under the start prompt."""
        if self.visual is None:
            return plain
        return self.learner.prompted(hidden, self.memory["start_prompt"][None])

    def _learn(
        self, cliques: Cliques, hidden: Tensor, plain: Tensor, tape: VisualTape | None
    ) -> Learned:
        """Prompts of the batch's distinct cliques (step 2)."""
        memberships, count = cliques.sets.nonzero(as_tuple=True), len(cliques.sets)
        clique, image = (
            send(index, plain.device) for index in memberships
        )  # sets ascending
        self.memory["sets_learned"] = self.memory["sets_learned"] + count
        if self.text is not None and self.learner.learns_text:
            self.text.choose_gradient(int(self.memory["sets_learned"]))
        task = Task(hidden, plain, clique, image, count)
        start = self.memory["start_prompt"] if self.config.learns_visual else None
        return self.learner.learn(task, start, tape=tape, explain=self.collect_evidence)

    def _retain(self, cliques: Cliques, learned: Learned) -> None:
        """Text running mean and visual cache, in mining order (step 3)."""
        index = send(cliques.set_of, self.model.device)
        if learned.text is not None:
            mean, seen = self.memory["text_mean"], int(self.memory["text_seen"])
            times = torch.bincount(cliques.set_of, minlength=len(cliques.sets))
            times = send(times, learned.text.device).to(learned.text.dtype)
            total = torch.einsum("u,u...->...", times, learned.text)
            self.memory["text_mean"] = running_mean(mean, seen, total, len(cliques))
            self.memory["text_seen"] = torch.tensor(seen + len(cliques))
        cache = self._cache()
        if learned.visual is not None and cache is not None:
            pairs = learned.attributes[index], learned.visual.flatten(1)[index]
            cache = retain(cache, cliques.classes, *pairs, self.config, self._replayed)
            for name in ("keys", "values", "count"):
                self.memory[name] = getattr(cache, name)

    def _cache(self) -> Cache | None:
        """Retained visual prompts, where there are such."""
        if not (self.config.retention and self.config.learns_visual):
            return None
        return Cache(self.memory["keys"], self.memory["values"], self.memory["count"])

    def _compose(
        self,
        cliques: Cliques,
        top: Tensor,
        learned: Learned | None,
        cache: Cache | None,
        query: Tensor,
    ) -> composition.Composed:
        """Prompts that every pass is scored with (step 4), and texts.

        Those are under the running mean, once there is one (Eq. 18 with alpha_r = 1, as
        printed).
        """
        passes = composition.plan_passes(
            cliques, top, self.memory["count"], self.config
        )
        size = (
            self.memory["start_prompt"].numel() if "start_prompt" in self.memory else 0
        )
        own = query.new_zeros(0, size)
        if learned is not None and learned.visual is not None:
            own = learned.visual.flatten(1)
        prompts = composition.gather_prompts(passes, own, cache, query, self.config)
        text = self.classifier
        if self.text is not None and int(self.memory["text_seen"]) > 0:
            text = self.text.features(self.memory["text_mean"][None])[0]
        return composition.Composed(passes, *prompts, text)

    def _logits(
        self, hidden: Tensor, plain: Tensor, composed: composition.Composed
    ) -> Tensor:
        """Logits (b, N) of one view of every image (step 5)."""
        config = self.config
        if (
            self.visual is None
            or not config.learns_visual
            or config.rules.discarded_prompts
        ):
            features = plain[send(composed.passes.image, plain.device)]
        else:
            features = self.visual.pass_features(hidden, plain, composed)
        logits = self.model.scale * features @ composed.text_features.T  # Eq. 19
        return composition.merge_passes(
            logits.view(-1, composed.passes.width, logits.shape[-1])
        )

    # --- for reports and the app ------------------------------------------------

    def _evidence(
        self,
        cliques: Cliques,
        learned: Learned | None,
        composed: composition.Composed,
        top: Tensor,
    ) -> dict[str, Any]:
        """Tensors for :func:`cliquetta.methods.scap.evidence.describe`."""
        visual = "discarded" if self.config.rules.discarded_prompts else "composed"
        by_jacobian = (
            learned and self.text is not None and self.text.jacobian is not None
        )
        return {
            "cliques": cliques,
            "learned": learned,
            "passes": composed.passes,
            "retained": composed.slots,
            "top": top,
            "text_prompts": self._text_prompts(),
            "visual_prompts": visual if self.config.learns_visual else "none",
            "text_gradient": "jacobian" if by_jacobian else "vjp",
        }

    @torch.no_grad()
    def explain(
        self, batch: Batch, prediction: Prediction, *, maps: int = 0
    ) -> Explanation:
        """The explanation of any method, with cliques, prompted features and attention maps."""
        plain = super().explain(batch, prediction)
        return evidence.explain(self, batch, prediction, plain, maps)

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """Counts of cliques and of images scored with prompts."""
        return evidence.summary(prediction)

    def prompted_passes(
        self, prediction: Prediction, index: int
    ) -> PromptedPasses | None:
        """The passes over image ``index`` of a batch that were scored with prompts."""
        return evidence.prompted_passes(self, prediction, index)

    def cache_counts(self) -> dict[str, CacheCount]:
        """Retained prompts of every class."""
        if self._cache() is None:
            return {}
        held = tuple(self.memory["count"].tolist())
        return {"retained prompts": CacheCount(held, self.config.capacity)}
