"""The adapter: mines, learns, retains and infers on every batch, and owns what is kept."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.building.explanation import CacheCount, Explanation, PromptedPasses
from cliquetta.methods.building.memory import Range
from cliquetta.methods.building.views import confident_views, mean_logits
from cliquetta.methods.registry import register
from cliquetta.methods.scap import explanation
from cliquetta.methods.scap.cliques import Cliques, mine_cliques, similar_images, top_classes
from cliquetta.methods.scap.composition import Composed, gather_prompts, merge_passes, plan_passes
from cliquetta.methods.scap.config import PRESETS, SCAPConfig
from cliquetta.methods.scap.evidence import summary
from cliquetta.methods.scap.inference import PromptedTower, TextPrompts, composed_text
from cliquetta.methods.scap.learning import Frozen, Learned, Learner, Task
from cliquetta.methods.scap.parallel import split_memberships
from cliquetta.methods.scap.retention import Cache, Retained, retain, running_mean
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.cuda_graph import Replayed
from cliquetta.model.tapes import VisualTape
from cliquetta.model.transfer import Fetched, send
from cliquetta.model.vision import VisionTower
from cliquetta.types import Batch, Prediction


@register(
    "scap",
    paper="Zhang et al., SCAP: Transductive Test-Time Adaptation via Supportive Clique-based "
    "Attribute Prompting, CVPR 2025",
    presets=PRESETS,
)
class SCAP(Adapter):
    """Supportive cliques, attribute prompts in both modalities, retention.

    Supportive Clique-based Attribute Prompting.
    """

    batch_dependence = BatchDependence.JOINT
    config: SCAPConfig

    def _setup(self) -> None:
        model, prompts, config = self.model, self.prompts, self.config
        needs = {"visual-prefix"} if config.learns_visual else set()
        fixed_text = prompts.features is not None or model.text is None
        if config.learns_text:
            needs |= {"text-prompts"}
            if prompts.features is not None:
                raise UserError("fixed text features cannot be prompted; set scap.modalities=image")
        model.require(frozenset(needs), by="scap")
        self._replayed = Replayed()
        self.visual: PromptedTower | None = None
        if isinstance(model.visual, VisionTower):
            self.visual = PromptedTower(
                model.visual, config.blocks, config.prompt_length, self._replayed
            )
            layers = len(model.visual.blocks)
            if config.blocks[-1] >= layers:
                raise UserError(f"scap.blocks {config.blocks}: {model.id} has {layers} blocks")
        self.classifier = model.classifier(prompts)
        self.text = None
        if config.learns_text and not fixed_text:
            self.text = PromptedText(model, prompts, config.text_mix)
        tower = None if self.visual is None else self.visual.tower
        frozen = Frozen(tower, self.text, self.classifier, model.scale)
        rows = 1 if self.visual is None else self.visual.rows
        self.learner = Learner(frozen, config, rows, self._replayed)
        if config.modalities == "text" and not self.learner.learns_text:
            raise UserError(
                f"nothing to learn: template {prompts.templates[0]!r} has no words before the "
                "class name; put another first, or set scap.modalities=image"
            )
        self._warn()
        self._declare()

    def _warn(self) -> None:
        """Tell of what was asked for and cannot have an effect."""
        for name in self.config.without_effect():
            warnings.warn(f"scap.{name} has no effect beside the other settings", stacklevel=2)
        if self.config.learns_text and not self.learner.learns_text:
            warnings.warn(
                f"no text prompt is learned: {self._text_prompts()}; put a template with words in "
                "front of the class name first, or set scap.modalities=image",
                stacklevel=2,
            )

    def _text_prompts(self) -> str:
        """Whether text prompts are learned, and why not."""
        if not self.config.learns_text:
            return "not asked for"
        first = self.prompts.templates[0]
        return "learned" if self.learner.learns_text else f"{first!r} has no words before the name"

    def _declare(self) -> None:
        """Declare everything that is remembered over the stream."""
        config, device = self.config, self.model.device
        real = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(self.seed)
        E, N = self.model.embed_dim, len(self.prompts)
        if self.visual is not None:
            shape = (len(config.blocks), config.prompt_length, 2, self.visual.tower.config.width)
            draw = torch.rand(shape, generator=generator, dtype=real)
            start = config.prompt_scale * (2 * draw - 1)
            self.memory.declare("start_prompt", start.to(device))
            if config.learns_visual:
                for name, size in (("keys", E), ("values", start.numel())):
                    empty = torch.zeros(N, config.capacity + 1, size, dtype=real, device=device)
                    self.memory.declare(name, empty)
        self.memory.declare(
            "count", torch.zeros(N, dtype=torch.long), Range(below=config.capacity + 1)
        )
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

    def reset(self) -> None:
        """Forget the stream: the next batch is treated like the first."""
        super().reset()
        self.learner.reset()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict` of an equally built adapter."""
        super().load_state_dict(state)
        self.learner.reset()

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        config = self.config
        hidden, plain = self._encode(batch.images)
        start_features = None
        if config.mining_features == "start-prompt":
            start_features = self._start_features(hidden, plain)
        related = self._relate(plain if start_features is None else start_features)
        tape = self._record(hidden)
        top, cliques = self._mine(related)
        learned = self._learn(cliques, hidden, plain, tape) if len(cliques) else None
        if learned is not None and config.start == "shared" and config.learns_visual:
            start_features = learned.start_features
        retained = self._retained()
        if learned is not None:
            self._retain(cliques, learned)
        if config.retention_order == "update-first":
            retained = self._retained()
        query = plain
        cache = retained.visual
        if config.query == "start" and cache is not None and int(cache.count.sum()):
            if start_features is None:
                start_features = self._start_features(hidden, plain)
            query = start_features
        composed = self._compose(cliques, top, learned, retained, query)
        if batch.views is None:
            logits = self._logits(hidden, plain, composed, top)
        else:
            views = [self._encode(view) for view in batch.views.unbind(dim=1)]
            each = torch.stack([self._logits(*view, composed, top) for view in views], dim=1)
            logits = mean_logits(each, confident_views(each, config.selection_fraction))
        self.memory["batches"] = self.memory["batches"] + 1
        evidence = self._evidence(cliques, learned, composed, top)
        if self.collect_evidence:
            evidence |= {"plain": plain, "prompts": composed.prompts, "prompt_mask": composed.mask}
            evidence["retained_prompts"] = None if cache is None else cache.values
        return Prediction(logits.float(), evidence)

    # --- the steps ------------------------------------------------------------------------------

    def _encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states at the first prompted block, and plain unit features."""
        if self.visual is None:
            return images[:0], self.model.encode_image(images, normalize=True)
        hidden, plain = self._replayed(self._run_plain, images)
        return hidden, plain

    def _run_plain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        assert self.visual is not None
        hidden = self.visual.hidden(images)
        return hidden, self.visual.plain(hidden)

    def _relate(self, features: Tensor) -> Fetched:
        """Top classes (b, k) and which images are similar (b, b), on their way to the CPU."""
        config = self.config
        top = top_classes(self.model.scale * features @ self.classifier.T, config.topk)
        return Fetched(top, similar_images(features, config.threshold))

    def _record(self, hidden: Tensor) -> VisualTape | None:
        """The pass that all cliques start from, which a GPU runs while the CPU mines."""
        shared = self.config.learns_visual and self.config.start == "shared"
        if not (shared and hidden.is_cuda):
            return None
        return self.learner.record(hidden, self.memory["start_prompt"])

    def _mine(self, related: Fetched) -> tuple[Tensor, Cliques]:
        """Top classes and cliques of the batch (step 1), on the CPU.

        This is the one synchronisation per batch: what follows is bookkeeping over small index
        tensors, which are sent to the device.
        """
        top, similar = related.wait()
        config, unique = self.config, self.config.deduplicate == "class"
        return top, mine_cliques(similar, top, full_set=config.full_set, deduplicate=unique)

    def _start_features(self, hidden: Tensor, plain: Tensor) -> Tensor:
        """Unit features under the start prompt."""
        start = self.memory["start_prompt"] if self.visual is not None else None
        return plain if start is None else self.learner.start_features(hidden, start)

    def _learn(
        self, cliques: Cliques, hidden: Tensor, plain: Tensor, tape: VisualTape | None
    ) -> Learned:
        """Prompts of the batch's distinct cliques (step 2)."""
        clique, image = (send(index, plain.device) for index in cliques.memberships())
        count = len(cliques.sets)
        self.memory["sets_learned"] = self.memory["sets_learned"] + count
        self.learner.choose_text_gradient(int(self.memory["sets_learned"]))
        task = Task(hidden, plain, clique, image, count)
        start = self.memory["start_prompt"] if self.config.learns_visual else None
        if start is not None and self.config.start == "fresh":
            generator = self.memory.generator("generator")
            draw = torch.rand((count, *start.shape), generator=generator, dtype=start.dtype)
            self.memory.keep("generator", generator)
            start = (self.config.prompt_scale * (2 * draw - 1)).to(start.device)
        return self.learner.learn(task, start, tape=tape, explain=self.collect_evidence)

    def _retain(self, cliques: Cliques, learned: Learned) -> None:
        """Text running mean and visual cache, in mining order (step 3)."""
        index = send(cliques.set_of, self.model.device)
        if learned.text is not None:
            seen = int(self.memory["text_seen"])
            times = torch.bincount(cliques.set_of, minlength=len(cliques.sets))
            times = send(times, learned.text.device).to(learned.text.dtype)
            total = torch.einsum("u,u...->...", times, learned.text)
            mean = self.memory["text_mean"]
            self.memory["text_mean"] = running_mean(mean, seen, total, len(cliques))
            self.memory["text_seen"] = torch.tensor(seen + len(cliques))
        cache = self._retained().visual
        if learned.visual is not None and cache is not None:
            values = learned.visual.flatten(1)
            keys = learned.attributes[index]
            cache = retain(cache, cliques.classes, keys, values[index], self.config, self._replayed)
            self.memory["keys"], self.memory["values"] = cache.keys, cache.values
            self.memory["count"] = cache.count

    def _retained(self) -> Retained:
        """What is retained; no text context as long as none was learned: text is plain CLIP's."""
        cache = context = None
        if self.config.retention and self.config.learns_visual:
            cache = Cache(self.memory["keys"], self.memory["values"], self.memory["count"])
        if self.learner.learns_text and int(self.memory["text_seen"]) > 0:
            context = self.memory["text_mean"]
        return Retained(cache, context)

    def _compose(
        self,
        cliques: Cliques,
        top: Tensor,
        learned: Learned | None,
        retained: Retained,
        query: Tensor,
    ) -> Composed:
        """What every pass is scored with (step 4)."""
        count = self.memory["count"] if retained.visual is None else retained.visual.count
        passes = plan_passes(cliques, top, count, self.config)
        size = self.memory["start_prompt"].numel() if "start_prompt" in self.memory else 0
        own = query.new_zeros(0, size)
        if learned is not None and learned.visual is not None:
            own = learned.visual.flatten(1)
        prompts = gather_prompts(passes, own, retained.visual, query, self.config)
        text: tuple[Tensor, Tensor | None] = self.classifier, None
        own_text = None if learned is None or self.config.text_retained_share == 1 else learned.text
        if self.text is not None and (retained.text is not None or own_text is not None):
            mean = self.memory["text_mean"] if retained.text is None else retained.text
            text = composed_text(self.text, TextPrompts(own_text, mean), cliques, top, self.config)
        return Composed(passes, *prompts, *text)

    def _logits(self, hidden: Tensor, plain: Tensor, composed: Composed, top: Tensor) -> Tensor:
        """Logits (b, N) of one view of every image (step 5)."""
        config = self.config
        if (
            self.visual is None
            or not config.learns_visual
            or (config.visual_inference == "discarded")
        ):
            features = plain[send(composed.passes.image, plain.device)]
        else:
            stand_in = None
            if config.without_prompts == "start-prompt":
                stand_in = self.memory["start_prompt"]
            features = self.visual.pass_features(hidden, plain, composed, stand_in)
        scored = composed.logits(features, self.model.scale)
        return merge_passes(scored, send(top, plain.device), config.merge)

    # --- what reports, the app and a cluster ask ------------------------------------------------

    def _evidence(
        self, cliques: Cliques, learned: Learned | None, composed: Composed, top: Tensor
    ) -> dict[str, Any]:
        """What happened, as tensors; :func:`cliquetta.methods.scap.evidence.describe` reads it."""
        return {
            "cliques": cliques,
            "learned": learned,
            "passes": composed.passes,
            "retained": composed.places,
            "top": top,
            "text_prompts": self._text_prompts(),
            "visual_prompts": self.config.visual_inference if self.config.learns_visual else "none",
            **self.learner.text_gradient(),
        }

    @torch.no_grad()
    def explain(self, batch: Batch, prediction: Prediction, *, maps: int = 0) -> Explanation:
        """The explanation of any method, with cliques, prompted features and attention maps."""
        plain = super().explain(batch, prediction)
        return explanation.explain(self, batch, prediction, plain, maps)

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """Counts of cliques and of images scored with prompts."""
        return summary(prediction)

    def prompted_passes(self, prediction: Prediction, place: int) -> PromptedPasses | None:
        """The passes over image ``place`` of a batch that were scored with prompts."""
        return explanation.prompted_passes(self, prediction, place)

    def cache_counts(self) -> dict[str, CacheCount]:
        """Retained prompts of every class."""
        if self._retained().visual is None:
            return {}
        held = tuple(self.memory["count"].tolist())
        return {"retained prompts": CacheCount(held, self.config.capacity)}

    def split_work(self) -> bool:
        """Divide the memberships of every batch among all processes."""
        if self.config.learns_visual:
            split_memberships(self.learner)
        return self.config.learns_visual
