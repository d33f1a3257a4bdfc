"""The adapter: mines, learns, retains and infers on every batch, and owns what is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods._shared.views import confident_views, mean_logits
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.registry import register
from cliquetta.methods.scap.cliques import Cliques, mine_cliques, similar_images, top_classes
from cliquetta.methods.scap.composition import (
    Passes,
    compose_prompts,
    merge_passes,
    plan_passes,
)
from cliquetta.methods.scap.config import PRESETS, SCAPConfig
from cliquetta.methods.scap.inference import composed_text, prompted_features
from cliquetta.methods.scap.learning import Learned, Learner, Task
from cliquetta.methods.scap.retention import Cache, best_entries, retain, running_mean
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.model.vision import VisionTower
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction, ViewSpec

MEMORY = {"cuda": 6 * 2**30, "cpu": 2**30}
"""Bytes of activations that one chunk of memberships may take, by device type."""


@register(
    "scap",
    config=SCAPConfig,
    summary="supportive cliques, attribute prompts in both modalities, retention",
    paper="Zhang et al., CVPR 2025",
    presets=PRESETS,
)
class SCAP(Adapter):
    """Supportive Clique-based Attribute Prompting."""

    batch_dependence = BatchDependence.JOINT
    config: SCAPConfig

    def __init__(
        self, model: CLIP, prompts: ClassPrompts, config: SCAPConfig, *, seed: int = 0
    ) -> None:
        super().__init__(model, prompts, config, seed=seed)
        needs = {"visual-prefix"} if config.learns_visual else set()
        fixed_text = prompts.features is not None or model.text is None
        if config.learns_text:
            needs |= {"text-prompts"}
            if prompts.features is not None:
                raise UserError("fixed text features cannot be prompted; set scap.modalities=image")
        model.require(frozenset(needs), by="scap")
        self.tower: VisionTower | None = None
        if isinstance(model.visual, VisionTower):
            self.tower = model.visual
            layers = len(self.tower.blocks)
            if config.blocks[-1] >= layers:
                raise UserError(f"scap.blocks {config.blocks}: {model.id} has {layers} blocks")
        self.classifier = model.classifier(prompts)
        self.text = None if fixed_text else PromptedText(model, prompts, config.text_mix)
        self.learner = Learner(
            self.tower, self.text, self.classifier, model.scale, config, self._rows()
        )
        if config.modalities == "text" and not self.learner.learns_text:
            raise UserError(
                f"nothing to learn: template {prompts.templates[0]!r} has no words before the "
                "class name; put another first, or set scap.modalities=image"
            )
        self._declare()

    def _rows(self) -> int:
        """Prompted images in memory at once."""
        if self.tower is None:
            return 1
        budget = MEMORY.get(self.model.device.type, MEMORY["cpu"])
        vision = self.tower.config
        element = self.tower.position.element_size()
        per_row = (vision.patches + 1) * (8 * vision.width + 2 * vision.hidden) * element
        return max(1, budget // per_row)

    def _declare(self) -> None:
        """Everything that is kept over the stream."""
        config, device = self.config, self.model.device
        real = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(self.seed)
        E, N = self.model.embed_dim, len(self.prompts)
        if self.tower is not None:
            shape = (len(config.blocks), config.prompt_length, 2, self.tower.config.width)
            draw = torch.rand(shape, generator=generator, dtype=real)
            start = config.prompt_scale * (2 * draw - 1)
            self.memory.declare("start_prompt", start.to(device))
            if config.learns_visual:
                places = config.capacity + 1
                self.memory.declare("keys", torch.zeros(N, places, E, dtype=real, device=device))
                flat = start.numel()
                values = torch.zeros(N, places, flat, dtype=real, device=device)
                self.memory.declare("values", values)
        self.memory.declare("count", torch.zeros(N, dtype=torch.long))
        if self.learner.learns_text and self.text is not None:
            mean = self.text.start.to(real)
            if config.text_scope == "class":
                mean = mean.expand(N, -1, -1)
            self.memory.declare("text_mean", mean)
        seen = int(config.count_start and self.learner.learns_text)
        self.memory.declare("text_seen", torch.tensor(seen))
        self.memory.declare("sets_learned", torch.tensor(0))
        self.memory.declare("batches", torch.tensor(0))
        self.memory.declare("generator", generator.get_state())

    @property
    def views(self) -> ViewSpec | None:
        """Zoom crops, if more than one view is asked for."""
        if self.config.views == 1:
            return None
        return ViewSpec(self.config.view_kind, self.config.views, self.config.view_zoom)

    def reset(self) -> None:
        """Forget the stream: the next batch is treated like the first."""
        super().reset()
        self._put_jacobian_away()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict` of an equally built adapter."""
        super().load_state_dict(state)
        self._put_jacobian_away()

    def _put_jacobian_away(self) -> None:
        """Let the tally decide again: it rounds otherwise than the products that it replaces."""
        if self.text is not None:
            self.text.put_jacobian_away()

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        config = self.config
        hidden, plain = self._encode(batch.images)
        start_features = None
        if config.mining_features == "start-prompt":
            start_features = self._start_features(hidden, plain)
        top, cliques = self._mine(plain if start_features is None else start_features)
        learned = self._learn(cliques, hidden, plain) if len(cliques) else None
        if learned is not None and config.start == "shared" and config.learns_visual:
            start_features = learned.start_features
        before = self._cache(), self._text_mean()
        if learned is not None:
            self._retain(cliques, learned)
        cache, text_mean = self._cache(), self._text_mean()
        if config.retention_order == "infer-first":
            cache, text_mean = before
        query = plain
        if config.query == "start" and cache is not None and int(cache.count.sum()):
            if start_features is None:
                start_features = self._start_features(hidden, plain)
            query = start_features
        count = self.memory["count"] if cache is None else cache.count
        passes = plan_passes(cliques, top, count, config)
        prompts, mask, places = self._compose(passes, learned, cache, query)
        words, which = self._words(cliques, learned, text_mean, top)
        if batch.views is None:
            scored = self._score(hidden, plain, passes, prompts, mask, words, which)
            logits = merge_passes(scored, top.to(plain.device), config.merge)
        else:
            logits = self._score_views(batch.views, passes, prompts, mask, words, which, top)
        self.memory["batches"] = self.memory["batches"] + 1
        evidence = self._evidence(cliques, learned, passes, places, top)
        if self.explain:
            evidence |= {"plain": plain, "prompts": prompts, "prompt_mask": mask}
        return Prediction(logits.float(), evidence)

    # --- the steps ------------------------------------------------------------------------------

    def _encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states at the first prompted block, and plain unit features."""
        if self.tower is None:
            return images[:0], self.model.encode_image(images, normalize=True)
        first = self.config.blocks[0]
        hidden = self.tower.run(self.tower.embed(images), 0, first)
        return hidden, l2_normalize(self.tower.pool(self.tower.run(hidden, first)))

    def _mine(self, features: Tensor) -> tuple[Tensor, Cliques]:
        """Top classes (b, k) and cliques of the batch (step 1), on the CPU: the one wait a batch.

        What follows is bookkeeping over small index tensors, which only then go to the device.
        """
        config = self.config
        top = top_classes(self.model.scale * features @ self.classifier.T, config.topk)
        similar = similar_images(features, config.threshold)
        top, similar = top.cpu(), similar.cpu()
        unique = config.deduplicate == "class"
        return top, mine_cliques(similar, top, full_set=config.full_set, deduplicate=unique)

    def _start_features(self, hidden: Tensor, plain: Tensor) -> Tensor:
        """Unit features under the start prompt."""
        if self.tower is None:
            return plain
        none = torch.zeros(0, dtype=torch.long, device=plain.device)
        task = Task(hidden, plain, none, none, 0)
        return self.learner.start_features(task, self.memory["start_prompt"])

    def _learn(self, cliques: Cliques, hidden: Tensor, plain: Tensor) -> Learned:
        """Prompts of the batch's distinct cliques (step 2)."""
        clique, image = (index.to(plain.device) for index in cliques.memberships())
        count = len(cliques.sets)
        self._maybe_build_jacobian(count)
        task = Task(hidden, plain, clique, image, count)
        start = self.memory["start_prompt"] if self.config.learns_visual else None
        if start is not None and self.config.start == "fresh":
            generator = self.memory.generator("generator")
            draw = torch.rand((count, *start.shape), generator=generator, dtype=start.dtype)
            self.memory.keep("generator", generator)
            start = (self.config.prompt_scale * (2 * draw - 1)).to(start.device)
        return self.learner.learn(task, start, explain=self.explain)

    def _maybe_build_jacobian(self, count: int) -> None:
        """Build the text Jacobian once the products that it saves would have cost as much.

        Building takes as many backward passes per class as a feature has entries; from then on
        cliques are free. The tally is part of the state, so that a resumed stream changes over at
        the same batch.
        """
        text = self.text
        self.memory["sets_learned"] = self.memory["sets_learned"] + count
        if text is None or not self.learner.learns_text or text.jacobian is not None:
            return
        if self.config.learns_visual and self.config.start == "fresh":
            return  # no two cliques share a start: their text gradients come by autograd
        device = self.model.device
        budget = MEMORY.get(device.type, MEMORY["cpu"])
        pays = int(self.memory["sets_learned"]) > self.model.embed_dim
        if pays and text.jacobian_bytes() <= budget:
            text.build_jacobian()

    def _retain(self, cliques: Cliques, learned: Learned) -> None:
        """Text running mean and visual cache, in mining order (step 3)."""
        which = cliques.set_of.to(self.model.device)
        if learned.text is not None:
            seen = int(self.memory["text_seen"])
            times = torch.bincount(cliques.set_of, minlength=len(cliques.sets))
            total = torch.einsum("u,u...->...", times.to(learned.text), learned.text)
            mean = self.memory["text_mean"]
            self.memory["text_mean"] = running_mean(mean, seen, total, len(cliques))
            self.memory["text_seen"] = torch.tensor(seen + len(cliques))
        cache = self._cache()
        if learned.visual is not None and cache is not None:
            values = learned.visual.flatten(1)
            cache = retain(
                cache, cliques.classes, learned.attributes[which], values[which], self.config
            )
            self.memory["keys"], self.memory["values"] = cache.keys, cache.values
            self.memory["count"] = cache.count

    def _cache(self) -> Cache | None:
        """The visual cache, if one is kept."""
        if not (self.config.retention and self.config.learns_visual):
            return None
        return Cache(self.memory["keys"], self.memory["values"], self.memory["count"])

    def _text_mean(self) -> Tensor | None:
        """The retained text context, or the start as long as nothing was retained."""
        if self.text is None:
            return None
        if not self.learner.learns_text:
            return self.text.start
        return self.memory["text_mean"]

    def _compose(
        self, passes: Passes, learned: Learned | None, cache: Cache | None, query: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts (R, S, V) of every pass, their mask, and the retained places (R, Q) used."""
        device = query.device
        R, Q = passes.labels.shape
        V = self.memory["start_prompt"].numel() if "start_prompt" in self.memory else 0
        real = query.dtype
        own, own_mask = passes.sets.to(device), passes.own.to(device)
        if learned is None or learned.visual is None:
            table = torch.zeros(R, 0, V, dtype=real, device=device)
            own_mask = torch.zeros(R, 0, dtype=torch.bool, device=device)
        else:
            table = learned.visual.flatten(1)[own]
        places = torch.full((R, Q), -1, device=device)
        if cache is None:
            kept = torch.zeros(R, 0, V, dtype=real, device=device)
            kept_mask = torch.zeros(R, 0, dtype=torch.bool, device=device)
        else:
            kept_mask = passes.kept.to(device)
            labels = passes.labels.to(device)
            asked = query[passes.image.to(device)].repeat_interleave(Q, dim=0)
            best = best_entries(cache, labels.reshape(-1), asked, self.config.match).view(R, Q)
            kept = cache.values[labels, best]
            places = torch.where(kept_mask, best, places)
        prompts, mask = compose_prompts(table, own_mask, kept, kept_mask, self.config)
        return prompts, mask, places

    def _words(
        self, cliques: Cliques, learned: Learned | None, mean: Tensor | None, top: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Text features of the passes, and which of them each pass takes if there are several."""
        if self.text is None or mean is None:
            return self.classifier, None
        own = None if learned is None else learned.text
        return composed_text(self.text, cliques, own, mean, top, self.config)

    def _score(
        self,
        hidden: Tensor,
        plain: Tensor,
        passes: Passes,
        prompts: Tensor,
        mask: Tensor,
        words: Tensor,
        which: Tensor | None,
    ) -> Tensor:
        """Logits (b, k, N) of all passes of one view (Eq. 19)."""
        config = self.config
        features = plain[passes.image.to(plain.device)]
        discarded = config.visual_inference == "discarded" or not config.learns_visual
        if not discarded and self.tower is not None:
            start = self.memory["start_prompt"]
            features = prompted_features(
                self.tower,
                hidden,
                features,
                passes,
                prompts,
                mask,
                start,
                config,
                rows=self.learner.rows,
            )
        if which is None:
            logits = self.model.scale * features @ words.T
        else:
            logits = self.model.scale * torch.einsum("re,rne->rn", features, words[which])
        return logits.view(len(plain), passes.width, -1)

    def _score_views(
        self,
        views: Tensor,
        passes: Passes,
        prompts: Tensor,
        mask: Tensor,
        words: Tensor,
        which: Tensor | None,
        top: Tensor,
    ) -> Tensor:
        """Logits (b, N): every view with the image's prompts, the confident ones averaged."""
        each = []
        for view in views.unbind(dim=1):
            hidden, plain = self._encode(view)
            scored = self._score(hidden, plain, passes, prompts, mask, words, which)
            each.append(merge_passes(scored, top.to(plain.device), self.config.merge))
        logits = torch.stack(each, dim=1)
        return mean_logits(logits, confident_views(logits, self.config.selection_fraction))

    def _evidence(
        self,
        cliques: Cliques,
        learned: Learned | None,
        passes: Passes,
        places: Tensor,
        top: Tensor,
    ) -> dict[str, Any]:
        """What happened, as tensors; :func:`cliquetta.methods.scap.evidence.describe` reads it."""
        jacobian = self.text is not None and self.text.jacobian is not None
        cost = {"jacobian_pays_off_after": self._pay_off()} if jacobian else {}
        visual = self.config.visual_inference if self.config.learns_visual else "none"
        return {
            "cliques": cliques,
            "learned": learned,
            "passes": passes,
            "retained": places,
            "top": top,
            "text_gradient": "jacobian" if jacobian else "vjp",
            "visual_prompts": visual,
            **cost,
        }

    def _pay_off(self) -> int | None:
        """Batches after which the Jacobian has saved the time that it took; ``None``: unknown."""
        seconds = self.learner.text_seconds
        if self.text is None or not {"vjp", "jacobian"} <= seconds.keys():
            return None
        saved = seconds["vjp"] - seconds["jacobian"]
        return math.ceil(self.text.jacobian_seconds / saved) if saved > 0 else None
