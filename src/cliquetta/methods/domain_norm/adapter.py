"""The adapter: LayerNorms per domain, learned from the recent images of that domain and kept.

The paper's clique prompts start anew with every batch and move by half a percent; what they learn
is too weak to change predictions. Here the attribute that images share is their domain, and what is
learned of it are the gains and biases of the LayerNorms of the visual blocks: large Adam steps,
one every 64 images, kept, so that a domain that comes back finds its own again. Learning does not
depend on the batch size: recent images are remembered, and steps fall due by images, not by
batches. Cliques keep their role as neighbourhoods: the most similar recent images vote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods._shared.adam import Adam, AdamState, adam_step
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import GROUP, DomainKeys
from cliquetta.methods.domain_norm.frozen import FrozenDomain
from cliquetta.methods.domain_norm.health import health, verdict
from cliquetta.methods.domain_norm.known_domains import KnownDomains
from cliquetta.methods.domain_norm.learning import rate_decay, ring
from cliquetta.methods.domain_norm.merging import merge_domains
from cliquetta.methods.domain_norm.passes import Encoded, Passes
from cliquetta.methods.domain_norm.statistics import (
    Counted,
    Counts,
    Recent,
    Statistics,
    class_statistics,
    count_batch,
    information,
    step_size,
    watch_answers,
)
from cliquetta.methods.domain_norm.voters import Voters
from cliquetta.methods.registry import register
from cliquetta.model.clip import CLIP
from cliquetta.model.cuda_graph import Replayed
from cliquetta.model.frozen import FrozenModel
from cliquetta.model.transfer import Fetched, send
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class Glance:
    """A whole batch as images of the domain in use, which it mostly is.

    All that the host must know before the next kernel is computed along with plain CLIP, so that
    it waits for the device once per batch.
    """

    domain: int
    finite: bool
    key: DomainKeys
    """Of the domain after the batch."""
    counted: Counted
    read: tuple[Statistics, bool]
    """``counted`` as the host reads it."""
    figures: list[float]
    """Those of :func:`batch_figures`; none of a small batch."""
    learned: tuple[Tensor, ...] | None
    """What the step will use, which a GPU computes while the host reads all this."""


@register(
    "domain_norm",
    paper="ours, after Zhang et al., CVPR 2025",
)
class DomainNorm(Adapter):
    """Visual LayerNorms per domain of the stream, learned and kept; recent images vote.

    Text stays fixed.
    """

    batch_dependence = BatchDependence.JOINT
    in_place = True
    needs = frozenset({"visual-blocks"})
    class_free = frozenset(
        {
            *("norms", "first_moment", "second_moment", "steps", "due", "restarts", "abstained"),
            *("key_count", "key_mean", "key_scatter", "images", "last_met", "domain"),
            *("window_hidden", "window_features", "window_domain", "window_next"),
            *("group", "group_next"),
        }
    )
    config: DomainNormConfig

    def __init__(
        self, model: CLIP, prompts: ClassPrompts, config: DomainNormConfig, *, seed: int = 0
    ) -> None:
        super().__init__(model, prompts, config, seed=seed)
        tower, self.classifier = model.require_vit(), model.classifier(prompts)
        self.passes = Passes(tower, self.classifier, model.scale, config)
        self._declare("norms", self.passes.late.start.expand(config.domains, -1))
        self._declare_domains(len(prompts), 2 * tower.config.width)
        self.voters = Voters(self.memory, self.classifier, config)
        self._fresh = {name: value[0] for name, value in self.memory.state_dict().items()}
        self._declare_recent()
        self.known = KnownDomains(self.memory, self._fresh, config)
        self._replayed = Replayed()

    def _declare_domains(self, N: int, F: int) -> None:
        """What is remembered per domain; counters that steer are kept on the CPU."""
        K, like = self.config.domains, self.memory["norms"]
        for name in ("first_moment", "second_moment"):
            self._declare(name, torch.zeros_like(like))
        for name, size in (
            *(("key_count", ()), ("key_mean", (F,)), ("key_scatter", (F,))),
            *(("counted", ()), ("confidence", ()), ("agreement", ()), ("entropy", ())),
            *(("answers", (N,)), ("class_mass", (N,)), ("freed_mass", (N,))),
            ("recent_mass", (N,)),
            *(("background_weight", (N,)), ("background_total", (N,))),
            *(("recent_plain", (N,)), ("recent_adapted", (N,))),
        ):
            self._declare(name, torch.zeros(K, *size, dtype=like.dtype))
        for name in ("images", "due", "steps", "last_met", "restarts", "abstained"):
            self.memory.declare(name, torch.zeros(K, dtype=torch.long))

    def _declare_recent(self) -> None:
        """Recent images: those that are learned from, and those that tell the domain."""
        config, tower, like = self.config, self.passes.tower.config, self.classifier
        hidden = (config.step_every, tower.class_tokens + tower.patches, tower.width)
        self._declare("window_hidden", torch.zeros(hidden, dtype=self.model.dtype))
        self._declare("window_features", like.new_zeros(config.step_every, like.shape[1]))
        nowhere = torch.full((config.step_every,), -1)
        self.memory.declare("window_domain", nowhere, below=config.domains)
        self._declare("group", like.new_zeros(GROUP, 2 * tower.width))
        for name in ("window_next", "group_next"):
            self.memory.declare(name, torch.tensor(0))
        self.memory.declare("domain", torch.tensor(0), below=config.domains)

    def _declare(self, name: str, value: Tensor) -> None:
        self.memory.declare(name, value.to(self.model.device))

    def summarize(self, prediction: Prediction) -> dict[str, int | float | str]:
        """The health figures of a batch."""
        return {"images": len(prediction.logits), **health(prediction.evidence)}

    def _merge(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """One state from several, with the domains that are the same joined."""
        config = self.config
        return merge_domains(states, self._fresh, config)

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        encoded, glance = self._encode(batch.images)
        if glance.finite:
            return self._answer(encoded, glance)
        # Images without a finite feature are answered by "every class alike" and never remembered.
        logits = torch.full_like(encoded.zero_shot, -math.log(len(self.prompts))).float()
        evidence: dict[str, Any] = {}
        rows = encoded.features.isfinite().all(dim=1).nonzero()[:, 0]
        if len(rows) > 0:
            found = self._answer(encoded.take(rows), None)
            logits[rows], evidence = found.logits, dict(found.evidence)
        return Prediction(logits, {**evidence, "non_finite": len(batch) - len(rows)})

    def _encode(self, images: Tensor) -> tuple[Encoded, Glance]:
        memory, domain = self.memory, int(self.memory["domain"])
        state = (*self.known.keys(), *self.known.keys(domain))
        counted = (*Counts.load(memory, domain), *Recent.load(memory, domain))
        found = iter(self._replayed(self.passes.plain, images, *state, *counted))
        encoded = Encoded(*(next(found) for _ in fields(Encoded)))
        key = DomainKeys(*(next(found) for _ in DomainKeys._fields))
        after = Counted(Counts(*(next(found) for _ in Counts._fields)), *found)
        fetched = Fetched(after.figures)
        learned = None
        if images.is_cuda and len(images) == self.config.step_every and not memory["due"][domain]:
            window = encoded.hidden[encoded.order], encoded.features[encoded.order]
            learned = self._learn(domain, *window, after.marginal, after.prior, after.belief)
        finite, *figures = fetched.wait()[0].tolist()
        read = after.read(figures[:5], self.config)
        return encoded, Glance(domain, finite == 1, key, after, read, figures[5:], learned)

    def _answer(self, encoded: Encoded, glance: Glance | None) -> Prediction:
        """Adapt to each domain of the batch, then let recent images vote."""
        memory, voted = self.memory, torch.empty_like(encoded.zero_shot)
        told = self.known.tell_apart(encoded.signatures, None if glance is None else glance.figures)
        if glance is not None and [domain for domain, _ in told] != [glance.domain]:
            glance = None
        parts = self.known.enter(encoded.signatures, told, None if glance is None else glance.key)
        found: dict[int, Statistics] = {}
        for domain, rows in parts:
            part = encoded if len(parts) == 1 else encoded.take(rows)
            stats, collapsed = self._count(domain, part, glance)
            found[domain] = stats
            if collapsed:
                self._restart(domain)
                glance = None
            p, features = self._adapt(domain, part, stats, glance)
            answers = self.voters.vote(domain, part, p, features) * stats.weights
            if stats.abstain:
                # It goes on to learn, so that nothing is lost if it turns out to be a beginning.
                answers = part.zero_shot
                memory["abstained"][domain] += len(rows)
            voted[rows] = answers
        domain = int(memory["domain"])
        restarts, abstained = (int(memory[name].sum()) for name in ("restarts", "abstained"))
        stats, plain = found[domain], encoded.zero_shot.argmax(dim=1)
        evidence = {
            "domain": domain,
            "domains_in_batch": len(parts),
            "belief": stats.trust,
            "confidence": stats.confidence,
            "step_size": stats.step_size,
            "changed": (voted.argmax(dim=1) != plain).float().mean(),
            "agreement": stats.agreement,
            "distance": self._distance(domain),
            "information": stats.information,
            "restarts": restarts,
            "abstained": abstained,
            "verdict": verdict(
                stats.confidence, stats.trust, stats.agreement, restarts, abstain=stats.abstain
            ),
        }
        logits = (voted / voted.sum(dim=1, keepdim=True)).clamp_min(1e-12).log()
        return Prediction(logits.float(), evidence)

    def _count(self, domain: int, part: Encoded, glance: Glance | None) -> tuple[Statistics, bool]:
        """Count zero-shot answers into a domain; whether adapted ones collapsed before them."""
        if glance is None:
            memory = self.memory
            counts, recent = Counts.load(memory, domain), Recent.load(memory, domain)
            counted = count_batch(counts, recent, part.zero_shot, self.config)
            read = counted.read(counted.figures.tolist(), self.config)
        else:
            counted, read = glance.counted, glance.read
        counted.counts.store(self.memory, domain)
        return read

    @torch.no_grad()
    def frozen_model(self) -> FrozenModel:
        """What a single image of the domain in use is answered by, without learning.

        The domain's LayerNorms, its share of the zero-shot answer, its class weights and the votes
        of the remembered images are built in. Telling domains apart and the votes of other images
        of a batch need more than one image and are left out.
        """
        memory, config, domain = self.memory, self.config, int(self.memory["domain"])
        counts = Counts.load(memory, domain)
        found = class_statistics(counts, replace(config, recent_images=0.0))
        voters, votes, _ = self.voters.of(domain)
        abstain = bool(information(counts) < config.abstain_below)
        learned = memory["steps"][domain] > 0 and not abstain
        return FrozenDomain(
            self.model,
            self.classifier,
            start=self.passes.start,
            norms=self.passes.late.named(memory["norms"][domain]) if learned else {},
            zero_shot_share=config.zero_shot_share
            * (1 - step_size(float(found.confidence), config)),
            weight=torch.ones_like(found.weights) if abstain else found.weights,
            voters=voters,
            votes=votes,
            vote=(0.0 if abstain else config.vote_share, config.neighbours),
        )

    def _restart(self, domain: int) -> None:
        """Forget what a domain has learned, and count that."""
        for name in ("norms", "first_moment", "second_moment", "steps", "due"):
            self.memory[name][domain] = self._fresh[name]
        for name in ("recent_plain", "recent_adapted"):
            self.memory[name][domain] = 0
        self.memory["restarts"][domain] += 1

    def _adapt(
        self, domain: int, part: Encoded, stats: Statistics, glance: Glance | None
    ) -> tuple[Tensor, Tensor]:
        """Probabilities (b, N) and features (b, E) of images of a domain, which are learned."""
        memory, config = self.memory, self.config
        young = int(memory["images"][domain]) < config.warmup_images
        features = torch.empty_like(part.features)
        waiting: list[Tensor] = []
        for rows in torch.split(part.order, config.step_every):
            slots = self._remember(domain, part.hidden[rows], part.features[rows])
            memory["images"][domain] += len(rows)
            memory["due"][domain] += len(rows)
            learned = None
            if memory["due"][domain] >= config.step_every:
                memory["due"][domain] -= config.step_every
                ahead = None if glance is None else glance.learned
                learned = self._step(domain, slots, stats, ahead)
            if learned is None or young:
                waiting.append(rows)
            else:
                features[rows] = learned
        if waiting and memory["steps"][domain] == 0:
            return part.zero_shot, part.features
        if waiting:
            rows = torch.cat(waiting)
            hidden, norms = part.hidden[rows], memory["norms"][domain]
            features[rows] = self._replayed(self.passes.adapted, hidden, norms)[0]
        p = self.passes.probabilities(features)
        watch_answers(memory, domain, p, part.zero_shot)
        plain_share = config.zero_shot_share * (1 - stats.step_size)
        return p.lerp(part.zero_shot, plain_share), features

    def _remember(self, domain: int, hidden: Tensor, features: Tensor) -> Tensor:
        """Write images over the oldest of the window; their places in it, on the CPU."""
        memory, size = self.memory, self.config.step_every
        slots, memory["window_next"] = ring(memory["window_next"], len(hidden), size)
        memory["window_domain"][slots] = domain
        places = send(slots, hidden.device)
        memory["window_hidden"].index_copy_(0, places, hidden.to(memory["window_hidden"].dtype))
        memory["window_features"].index_copy_(0, places, features)
        return slots

    def _distance(self, domain: int) -> Tensor:
        """Root mean square distance of a domain's LayerNorms from the loaded ones."""
        return (self.memory["norms"][domain] - self._fresh["norms"]).square().mean().sqrt()

    def _learn(self, domain: int, *window: Tensor) -> tuple[Tensor, ...]:
        """Features of images, and the gradient of a domain's LayerNorms.

        ``window`` are hidden states and plain features, then marginal, prior and belief.
        """
        hidden, *others = window
        return self._replayed(self.passes.learning, hidden, self.memory["norms"][domain], *others)

    def _step(
        self, domain: int, slots: Tensor, stats: Statistics, ahead: tuple[Tensor, ...] | None
    ) -> Tensor:
        """One step of Adam on a domain's LayerNorms; features of the images at ``slots`` before it.

        It learns from all remembered images of the domain. Where these are just the images at
        ``slots``, their features and the gradient may have been computed ``ahead``.
        """
        memory, config = self.memory, self.config
        members = (memory["window_domain"] == domain).nonzero()[:, 0]
        if ahead is None:
            hidden, plain = memory["window_hidden"], memory["window_features"]
            if len(members) < len(hidden):
                rows = send(members, hidden.device)
                hidden, plain = hidden[rows], plain[rows]
            found = self._learn(domain, hidden, plain, stats.marginal, stats.prior, stats.belief)
            features, gradient = found
            features = features[send(torch.searchsorted(members, slots), features.device)]
        else:
            features, gradient = ahead
        names = ("norms", "first_moment", "second_moment")
        before = AdamState(*(memory[name][domain] for name in (*names, "steps")))
        rate = config.lr * rate_decay(int(before.steps) + 1, config.lr_floor) * stats.step_size
        rate *= min(1.0, len(members) / config.step_every)
        after = adam_step(before, gradient, Adam(rate))
        finite = gradient.isfinite().all()
        for name, old, new in zip(names, before, after, strict=False):
            memory[name][domain] = torch.where(finite, new, old)
        memory["steps"][domain] = after.steps
        return features
