"""SCAP with a domain prompt: one attribute prompt for the stream, kept and moved batch by batch.

The paper's clique prompts start anew with every batch and move by half a percent; what they learn
is too weak to change predictions. Here the attribute that all images of a stream share, their
domain, has the prompt: key/value prefixes in every visual block, started small, moved by one
large Adam step a batch and retained as a whole. Cliques keep two of their roles: they are the
neighbourhoods whose members vote on an answer, and only the certain half of a batch teaches.

Diversity must not assume that all classes are equally frequent. A batch's marginal is pulled to
its own zero-shot marginal, corrected by how biased zero-shot CLIP has been over the stream; how
far the bias is corrected depends on how many of the classes the stream seems to hold.

Settings were chosen on the development shifts only; docs/research/domain-prompt.md has the log.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.contract import Adapter, Batch, Prediction, Treatment
from cliquetta.methods.registry import register
from cliquetta.methods.scap.losses import entropy
from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP, precise, unit
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import VisualTape
from cliquetta.prompts.classes import ClassPrompts


@dataclass(frozen=True)
class DomainSCAPConfig:
    """Settings of the domain prompt."""

    prompt_length: int = 8
    """Tokens of the prompt in every visual block."""
    prompt_scale: float = 0.1
    """The prompt starts at U(-scale, scale)."""
    learning_rate: float = 0.1
    """Of Adam, for a batch of ``full_batch`` images; smaller batches take smaller steps."""
    full_batch: int = 64
    """Batch size from which a step is taken whole; below, it shrinks in proportion."""
    steps: int = 1
    """Adam steps per batch."""
    teachers: float = 0.5
    """Share of the batch, the most certain images, whose entropy is minimised; 1 is all."""
    diversity: float = 1.0
    """Weight of the pull of the batch's marginal to its target; 0 leaves it free."""
    few_classes: float = 0.35
    """At or below this share of effectively present classes, the zero-shot marginal is kept."""
    many_classes: float = 0.5
    """At or above this share, all classes are taken to be equally frequent; linear between."""
    few_when_sure: float = 0.55
    """``few_classes`` of a stream that zero-shot CLIP is sure about."""
    many_when_sure: float = 0.7
    """``many_classes`` of a stream that zero-shot CLIP is sure about."""
    doubt: float = 0.7
    """Mean confidence of the stream at or below which CLIP is not sure at all."""
    sure: float = 0.85
    """Mean confidence at or above which it is; linear between."""
    vote: float = 0.3
    """Share of its neighbours in an image's answer; 0 is none."""
    neighbours: int = 5
    """Most similar images of the batch that vote."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot mean anything."""
        for name in ("prompt_length", "steps", "neighbours", "full_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"scap_domain.{name} must be at least 1")
        if not 0 < self.teachers <= 1:
            raise ValueError(f"scap_domain.teachers is a share in (0, 1], got {self.teachers}")
        if not 0 <= self.vote <= 1:
            raise ValueError(f"scap_domain.vote is a share in [0, 1], got {self.vote}")
        for low, high in (
            ("few_classes", "many_classes"),
            ("few_when_sure", "many_when_sure"),
            ("doubt", "sure"),
        ):
            if not 0 <= getattr(self, low) < getattr(self, high):
                raise ValueError(f"scap_domain.{low} must be below {high}")
        if self.learning_rate < 0 or self.prompt_scale < 0 or self.diversity < 0:
            raise ValueError(
                "scap_domain.learning_rate, prompt_scale and diversity cannot be negative"
            )


def effective_classes(marginal: Tensor) -> Tensor:
    """Share of the classes that a marginal (N,) effectively uses: exp(entropy) / N."""
    return entropy(marginal.clamp_min(1e-8).log()).exp() / len(marginal)


def bias_power(marginal: Tensor, confidence: Tensor, config: DomainSCAPConfig) -> Tensor:
    """How much of the zero-shot marginal (N,) is believed: 1 with few classes present, 0 with many.

    Doubtful answers spread over classes that are not there, and bunch on some that are: only a
    very uneven marginal is believed then. With sure answers a less uneven one is enough.
    """
    present = effective_classes(marginal)
    doubtful = (config.many_classes - present) / (config.many_classes - config.few_classes)
    uneven = (config.many_when_sure - present) / (config.many_when_sure - config.few_when_sure)
    sure = ((confidence - config.doubt) / (config.sure - config.doubt)).clamp(0, 1)
    return torch.maximum(doubtful.clamp(0, 1), sure * uneven.clamp(0, 1))


def target_marginal(batch: Tensor, stream: Tensor, power: Tensor) -> Tensor:
    """The batch's zero-shot marginal (N,), freed from the stream's bias.

    If zero-shot CLIP predicted class n with share m_n over the stream and the classes had shares
    m_n^power, then it over-predicts n by m_n^(1 - power). A batch that truly holds few classes (a
    correlated stream) keeps them: only the bias is divided out.
    """
    stream = stream.clamp_min(1e-8)
    corrected = batch * stream**power / stream
    return corrected / corrected.sum()


def domain_loss(logits: Tensor, target: Tensor, config: DomainSCAPConfig) -> Tensor:
    """Mean entropy of the certain images, and KL(marginal || target), from logits (b, N)."""
    log_p = logits.log_softmax(dim=-1)
    teachers = max(1, int(config.teachers * len(logits)))
    certainty = entropy(log_p).sort().values[:teachers].mean()
    marginal = log_p.exp().mean(dim=0)
    log_ratio = marginal.clamp_min(1e-8).log() - target.clamp_min(1e-8).log()
    return certainty + config.diversity * (marginal * log_ratio).sum()


def clique_vote(logits: Tensor, features: Tensor, neighbours: int, share: float) -> Tensor:
    """Log-probabilities (b, N) with ``share`` of them from each image's most similar images."""
    p = logits.softmax(dim=-1)
    k = min(neighbours, len(features) - 1)
    if k < 1 or share == 0:
        return p.clamp_min(1e-12).log()
    similar = (features @ features.T).fill_diagonal_(-2.0)
    nearest = similar.topk(k, dim=1).indices
    return ((1 - share) * p + share * p[nearest].mean(dim=1)).clamp_min(1e-12).log()


@register(
    "scap_domain",
    config=DomainSCAPConfig,
    summary="a visual attribute prompt of the whole stream, kept, with voting cliques",
    paper="ours, after Zhang et al., CVPR 2025",
)
class DomainSCAP(Adapter):
    """One retained prompt for the domain; text stays fixed."""

    treatment = Treatment.JOINT
    needs = frozenset({"visual-prefix"})
    config: DomainSCAPConfig

    def __init__(
        self, model: CLIP, prompts: ClassPrompts, config: DomainSCAPConfig, *, seed: int = 0
    ) -> None:
        super().__init__(model, prompts, config, seed=seed)
        self.tower: VisionTower = model.require_vit()
        self.classifier = model.classifier(prompts)
        device, real = model.device, self.classifier.dtype
        shape = (len(self.tower.blocks), config.prompt_length, 2, self.tower.config.width)
        draw = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=real)
        self.memory.declare("prompt", (config.prompt_scale * (2 * draw - 1)).to(device))
        self.memory.declare("first_moment", torch.zeros(shape, dtype=real, device=device))
        self.memory.declare("second_moment", torch.zeros(shape, dtype=real, device=device))
        self.memory.declare("steps", torch.tensor(0))
        self.memory.declare("class_mass", torch.zeros(len(prompts), dtype=real, device=device))
        self.memory.declare("confidence", torch.zeros((), dtype=real, device=device))

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        config, scale = self.config, self.model.scale
        hidden = self.tower.embed(batch.images)
        plain = unit(self.tower.pool(self.tower.run(hidden)))
        zero_shot = (scale * plain @ self.classifier.T).softmax(dim=-1)
        self.memory["class_mass"] = self.memory["class_mass"] + zero_shot.sum(dim=0)
        self.memory["confidence"] = self.memory["confidence"] + zero_shot.amax(dim=1).sum()
        images = self.memory["class_mass"].sum()
        stream = self.memory["class_mass"] / images
        power = bias_power(stream, self.memory["confidence"] / images, config)
        target = target_marginal(zero_shot.mean(dim=0), stream, power)
        for _ in range(config.steps):
            self._step(hidden, target)
        features = unit(self.tower.pool(self.tower.run(hidden, prefix=self._prefix())))
        logits = clique_vote(
            scale * features @ self.classifier.T, plain, config.neighbours, config.vote
        )
        return Prediction(logits.float(), {"prior_power": power})

    def _prefix(self) -> dict[int, Prefix]:
        """The domain prompt, block by block."""
        return {block: Prefix(prompt[None]) for block, prompt in enumerate(self.memory["prompt"])}

    def _step(self, hidden: Tensor, target: Tensor) -> None:
        """One step of Adam on the domain prompt, its moments kept over the stream."""
        tape = VisualTape(self.tower, hidden, 0, self._prefix())
        with torch.enable_grad():
            rows = precise(tape.features).detach().requires_grad_()
            logits = self.model.scale * unit(rows) @ self.classifier.T
            loss = domain_loss(logits, target, self.config)
        cotangents = torch.autograd.grad(loss, rows)[0]
        found = tape.pull(cotangents, torch.arange(len(hidden), device=hidden.device))
        gradient = torch.stack([found[block].sum(dim=0) for block in sorted(found)])

        memory, config = self.memory, self.config
        count = int(memory["steps"]) + 1
        first = 0.9 * memory["first_moment"] + 0.1 * gradient
        second = 0.999 * memory["second_moment"] + 0.001 * gradient.square()
        size = (second / (1 - 0.999**count)).sqrt() + 1e-8
        rate = config.learning_rate * min(1.0, len(hidden) / config.full_batch)
        memory["prompt"] = memory["prompt"] - rate * (first / (1 - 0.9**count)) / size
        memory["first_moment"], memory["second_moment"] = first, second
        memory["steps"] = torch.tensor(count)
