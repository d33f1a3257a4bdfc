"""SCAP with domain prompts: one attribute prompt for each domain of the stream, kept and moved.

The paper's clique prompts start anew with every batch and move by half a percent; what they learn
is too weak to change predictions. Here the attribute that all images of a batch share, their
domain, has the prompt: key/value prefixes in every visual block, started small, moved by a large
Adam step a batch and retained under a key, so that a domain that comes back finds its prompt again.
Cliques keep two of their roles: they are the neighbourhoods whose members vote on an answer, and
only the certain half of a batch teaches.

Diversity must not assume that all classes are equally frequent. A batch's marginal is pulled to
its own zero-shot marginal, corrected by how biased zero-shot CLIP has been in the domain; whether
uneven answers are bias or truth is judged by how sure they are. The surer CLIP is, the less it is
changed.

Settings were chosen on the development shifts only; docs/research/domain-prompt.md has the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.registry import register
from cliquetta.methods.scap.domain_keys import DomainKeys, absorb, domain_distance, signature
from cliquetta.methods.scap.losses import entropy
from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP, l2_normalize, to_float32
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import VisualTape
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction

YOUNG = 32
"""Images that a domain must have seen before a batch is told apart from it."""


@dataclass(frozen=True)
class DomainSCAPConfig:
    """Settings of the domain prompts."""

    prompt_length: int = 8
    """Tokens of the prompt in every visual block."""
    prompt_scale: float = 0.1
    """The prompt starts at U(-scale, scale)."""
    learning_rate: float = 0.1
    """Of Adam, for a batch of ``full_batch`` doubtful images; see ``full_doubt``."""
    full_batch: int = 64
    """Batch size from which a step is taken whole; below, it shrinks in proportion."""
    full_doubt: float = 0.3
    """Doubt of zero-shot CLIP (1 - mean confidence) from which a step is taken whole; below, it
    shrinks in proportion. 0 takes all steps whole."""
    steps: int = 1
    """Adam steps per batch."""
    teachers: float = 0.5
    """Share of the batch, the most certain images, whose entropy is minimised; 1 is all. Where
    the zero-shot marginal is believed, all teach."""
    diversity: float = 1.0
    """Weight of the pull of the batch's marginal to its target; 0 leaves it free."""
    prior: Literal["estimated", "uniform", "zero-shot"] = "estimated"
    """Whether all classes are taken to be equally frequent, the zero-shot marginal is believed,
    or that is judged by how even and how sure the answers are."""
    least_even: float = 0.36
    """Evenness of the answers (effective share of the classes) below which they are believed to
    be truly uneven, at a mean confidence of one half or less ..."""
    most_even: float = 0.85
    """... the most that this limit may rise to ..."""
    even_slope: float = 2.4
    """... and its rise with the confidence: sure answers need to be less uneven to be believed."""
    even_band: float = 0.05
    """Width, below the limit, over which belief grows from none to full."""
    vote: float = 0.3
    """Share of its neighbours in an image's answer; 0 is none."""
    neighbours: int = 5
    """Most similar images of the batch that vote."""
    zero_shot_share: float = 0.5
    """Share of the zero-shot answer where CLIP has no doubt; none from ``full_doubt`` on."""
    domains: int = 4
    """Domains whose prompts are kept; 1 tells none apart. The one not met for longest goes."""
    new_domain: float = 0.6
    """Distance of a batch from all known domains from which it opens a new one."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot mean anything."""
        for name in ("prompt_length", "steps", "neighbours", "full_batch", "domains"):
            if getattr(self, name) < 1:
                raise UserError(f"scap_domain.{name} must be at least 1")
        if not 0 < self.teachers <= 1:
            raise UserError(f"scap_domain.teachers is a share in (0, 1], got {self.teachers}")
        for name in ("vote", "zero_shot_share"):
            if not 0 <= getattr(self, name) <= 1:
                value = getattr(self, name)
                raise UserError(f"scap_domain.{name} is a share in [0, 1], got {value}")
        if not 0 <= self.least_even <= self.most_even:
            raise UserError("scap_domain.least_even must not be above most_even")
        if self.even_band <= 0:
            raise UserError("scap_domain.even_band must be above 0")
        if self.prior not in ("estimated", "uniform", "zero-shot"):
            raise UserError(
                f"scap_domain.prior is estimated, uniform or zero-shot, got {self.prior!r}"
            )
        for name in (
            *("learning_rate", "prompt_scale", "diversity"),
            *("full_doubt", "even_slope", "new_domain"),
        ):
            if getattr(self, name) < 0:
                raise UserError(f"scap_domain.{name} cannot be negative")


def evenness(answers: Tensor) -> Tensor:
    """Effective share of the classes among counted answers (N,): exp(entropy) / N, at most 1.

    With few answers the plain entropy is too low; Miller and Madow's term is added.
    """
    total = answers.sum().clamp_min(1)
    shares = (answers / total).clamp_min(1e-8)
    found = entropy(shares.log()) + ((answers > 0).sum() - 1).clamp_min(0) / (2 * total)
    return (found.exp() / len(answers)).clamp_max(1)


def believed(answers: Tensor, confidence: Tensor, config: DomainSCAPConfig) -> Tensor:
    """How much of the zero-shot marginal is truth and not bias, 0 to 1.

    Under a shift CLIP's answers grow doubtful and bunch on some classes, though all may be there:
    the more doubt, the less even answers must be to be believed. ``answers`` (N,) counts them.
    """
    if config.prior != "estimated":
        return torch.full_like(confidence, float(config.prior == "zero-shot"))
    limit = config.least_even + config.even_slope * (confidence - 0.5).clamp_min(0)
    limit = limit.clamp_max(config.most_even)
    return ((limit - evenness(answers)) / config.even_band).clamp(0, 1)


def target_marginal(batch: Tensor, stream: Tensor, belief: Tensor) -> Tensor:
    """The batch's zero-shot marginal (N,), freed from the domain's bias.

    If zero-shot CLIP predicted class n with share m_n in the domain and the classes have shares
    m_n^belief, then it over-predicts n by m_n^(1 - belief). A batch that truly holds few classes
    (a correlated stream) keeps them: only the bias is divided out.
    """
    stream = stream.clamp_min(1e-8)
    corrected = batch * stream**belief / stream
    return corrected / corrected.sum()


def domain_loss(logits: Tensor, target: Tensor, teachers: float, diversity: float) -> Tensor:
    """Mean entropy of the certain images, and KL(marginal || target), from logits (b, N)."""
    log_p = logits.log_softmax(dim=-1)
    certain = entropy(log_p).sort().values[: max(1, int(teachers * len(logits)))]
    marginal = log_p.exp().mean(dim=0)
    log_ratio = marginal.clamp_min(1e-8).log() - target.clamp_min(1e-8).log()
    return certain.mean() + diversity * (marginal * log_ratio).sum()


def clique_vote(p: Tensor, features: Tensor, neighbours: int, share: float) -> Tensor:
    """Probabilities (b, N) with ``share`` of them from each image's most similar images."""
    k = min(neighbours, len(features) - 1)
    if k < 1 or share == 0:
        return p
    similar = (features @ features.T).fill_diagonal_(-2.0)
    nearest = similar.topk(k, dim=1).indices
    return (1 - share) * p + share * p[nearest].mean(dim=1)


@register(
    "scap_domain",
    config=DomainSCAPConfig,
    summary="visual attribute prompts of whole domains, kept under keys, with voting cliques",
    paper="ours, after Zhang et al., CVPR 2025",
)
class DomainSCAP(Adapter):
    """One retained prompt for each domain; text stays fixed."""

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"visual-prefix"})
    config: DomainSCAPConfig

    def __init__(
        self, model: CLIP, prompts: ClassPrompts, config: DomainSCAPConfig, *, seed: int = 0
    ) -> None:
        super().__init__(model, prompts, config, seed=seed)
        self.tower: VisionTower = model.require_vit()
        self.classifier = model.classifier(prompts)
        K, D = config.domains, self.tower.config.width
        shape = (len(self.tower.blocks), config.prompt_length, 2, D)
        generator = torch.Generator().manual_seed(seed)
        draw = torch.rand(shape, generator=generator, dtype=self.classifier.dtype)
        start = (config.prompt_scale * (2 * draw - 1)).expand(K, *shape)
        self._declare("prompt", start)
        for name in ("first_moment", "second_moment"):
            self._declare(name, torch.zeros_like(start))
        for name, size in (
            ("steps", ()),
            ("answers", (len(prompts),)),
            ("class_mass", (len(prompts),)),
            ("confidence", ()),
            ("key_count", ()),
            ("key_mean", (2 * D,)),
            ("key_scatter", (2 * D,)),
            ("last_met", ()),
        ):
            self._declare(name, torch.zeros(K, *size, dtype=start.dtype))
        self._fresh = {name: value[0] for name, value in self.memory.state_dict().items()}
        self.memory.declare("domain", torch.tensor(0))

    def _declare(self, name: str, value: Tensor) -> None:
        self.memory.declare(name, value.to(self.model.device))

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        config, tower = self.config, self.tower
        hidden = tower.embed(batch.images)
        early = tower.run(hidden, 0, 1)
        plain = l2_normalize(tower.pool(tower.run(early, 1)))
        zero_shot = (self.model.scale * plain @ self.classifier.T).softmax(dim=-1)
        domain = self._meet(signature(early), zero_shot)
        images = self._of("key_count", domain)
        confidence = self._of("confidence", domain) / images
        belief = believed(self._of("answers", domain), confidence, config)
        stream = self._of("class_mass", domain) / images
        target = target_marginal(zero_shot.mean(dim=0), stream, belief)
        doubt = torch.ones_like(confidence)
        if config.full_doubt > 0:
            doubt = ((1 - confidence) / config.full_doubt).clamp_max(1)
        for _ in range(config.steps):
            self._step(domain, hidden, target, belief, doubt)
        features = l2_normalize(tower.pool(tower.run(hidden, prefix=self._prefix(domain))))
        p = (self.model.scale * features @ self.classifier.T).softmax(dim=-1)
        p = p.lerp(zero_shot, config.zero_shot_share * (1 - doubt))
        p = clique_vote(p, plain, config.neighbours, config.vote)
        evidence = {"domain": domain, "believed": belief, "doubt": doubt}
        return Prediction(p.clamp_min(1e-12).log().float(), evidence)

    def _of(self, name: str, domain: int) -> Tensor:
        return self.memory[name][domain]

    def _keep(self, domain: int, **values: Tensor) -> None:
        for name, value in values.items():
            kept = self.memory[name].clone()
            kept[domain] = value
            self.memory[name] = kept

    def _meet(self, signatures: Tensor, zero_shot: Tensor) -> int:
        """The domain of a batch, known or new, with the batch counted into it."""
        domain = self._find(signatures)
        self.memory["domain"] = torch.tensor(domain)
        keys = absorb(
            signatures.to(self._of("key_mean", domain)), self._keys(slice(domain, domain + 1))
        )
        answers = zero_shot.argmax(dim=1).bincount(minlength=len(self.prompts))
        self._keep(
            domain,
            key_count=keys.count[0],
            key_mean=keys.mean[0],
            key_scatter=keys.scatter[0],
            answers=self._of("answers", domain) + answers,
            class_mass=self._of("class_mass", domain) + zero_shot.sum(dim=0),
            confidence=self._of("confidence", domain) + zero_shot.amax(dim=1).sum(),
            last_met=self.memory["last_met"].max() + 1,
        )
        return domain

    def _keys(self, domains: slice) -> DomainKeys:
        names = ("key_count", "key_mean", "key_scatter")
        return DomainKeys(*(self.memory[name][domains] for name in names))

    def _find(self, signatures: Tensor) -> int:
        """The known domain that a batch belongs to, or a place for a new one."""
        current = int(self.memory["domain"])
        if self.config.domains == 1 or self._of("key_count", current) < YOUNG:
            return current
        distance = domain_distance(signatures.to(self.memory["key_mean"]), self._keys(slice(None)))
        nearest = int(distance.argmin())
        # The mean of a small batch strays far by chance: it must lie farther off to be new.
        if distance[nearest] <= self.config.new_domain * (1 + 3 / len(signatures)):
            return nearest
        oldest = int(self.memory["last_met"].argmin())
        self._keep(oldest, **self._fresh)
        return oldest

    def _prefix(self, domain: int) -> dict[int, Prefix]:
        """The domain's prompt, block by block."""
        prompt = self._of("prompt", domain)
        return {block: Prefix(tokens[None]) for block, tokens in enumerate(prompt)}

    def _step(
        self, domain: int, hidden: Tensor, target: Tensor, belief: Tensor, doubt: Tensor
    ) -> None:
        """One step of Adam on the domain's prompt, its moments kept over the stream."""
        config = self.config
        teachers = config.teachers + (1 - config.teachers) * float(belief)
        tape = VisualTape(self.tower, hidden, 0, self._prefix(domain))
        with torch.enable_grad():
            rows = to_float32(tape.features).detach().requires_grad_()
            logits = self.model.scale * l2_normalize(rows) @ self.classifier.T
            loss = domain_loss(logits, target, teachers, config.diversity)
        cotangents = torch.autograd.grad(loss, rows)[0]
        found = tape.pull(cotangents, torch.arange(len(hidden), device=hidden.device))
        gradient = torch.stack([found[block].sum(dim=0) for block in sorted(found)])

        count = self._of("steps", domain) + 1
        first = 0.9 * self._of("first_moment", domain) + 0.1 * gradient
        second = 0.999 * self._of("second_moment", domain) + 0.001 * gradient.square()
        size = (second / (1 - 0.999**count)).sqrt() + 1e-8
        rate = config.learning_rate * doubt * min(1.0, len(hidden) / config.full_batch)
        prompt = self._of("prompt", domain) - rate * (first / (1 - 0.9**count)) / size
        self._keep(domain, prompt=prompt, first_moment=first, second_moment=second, steps=count)
