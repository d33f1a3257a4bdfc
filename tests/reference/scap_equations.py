"""The steps of SCAP as small functions, slow and literal; equation numbers are the paper's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts

Clique = tuple[int, frozenset[int]]
"""The class of a candidate set and the batch indices of the members."""
Entry = tuple[Tensor, Tensor]  # Key (E,) and value (B, P, 2, D) of the retention cache.


@dataclass(frozen=True)
class ReferenceSettings:
    """The decision table of the specification; defaults are the preset ``paper``."""

    topk: int = 3
    threshold: float = 0.8
    blocks: tuple[int, ...] = (1,)
    prompt_length: int = 1
    modalities: Literal["both", "image", "text"] = "both"
    concentration: float = 1.0  # lambda, the weight of the concentration loss.
    lr: float = 3e-3
    steps: int = 1
    text_mix: float = 0.5
    """rho, the share of the fixed templates. One template alone: always 0."""
    capacity: int = 6  # L, pairs kept per class.
    neighbours: int = 3  # K of the retention graph.
    bandwidth: float = 0.3  # sigma of the Gaussian kernel.
    propagation: float = 0.3  # alpha of the propagation.
    retention: bool = True
    clique_combination: Literal["concat", "mean"] = "concat"
    retained_combination: Literal["concat", "mean"] = "concat"

    # --- the released code's readings
    full_sets: bool = False
    repeated_cliques: bool = False
    prompted_mining: bool = False
    member_entropy: bool = False
    mean_concentration: bool = False
    """Over the members of a clique; the squared distance itself is always a sum."""
    weight_decay: float = 0.0  # Of AdamW.
    text_per_class: bool = False
    raw_keys: bool = False
    best_class_only: bool = False


class Losses(NamedTuple):
    """Eq. 9, Eq. 10 and their weighted sum, Eq. 14, of one clique."""

    entropy: Tensor
    concentration: Tensor
    total: Tensor


class Learned(NamedTuple):
    """The prompts of one clique, ``None`` for a modality that is not learned, and its losses."""

    visual: Tensor | None  # (B, P, 2, D)
    text: Tensor | None  # (M, Dt), or (N, M, Dt)
    key: Tensor
    before: Losses
    after: Losses


# --- features -----------------------------------------------------------------------------------


def working_dtype(model: CLIP) -> torch.dtype:
    """The dtype of all arithmetic outside the model."""
    return torch.float64 if model.dtype == torch.float64 else torch.float32


def l2_normalize(x: Tensor) -> Tensor:
    """Rows of length one."""
    return F.normalize(x, dim=-1)


def image_features(
    model: CLIP, images: Tensor, prompt: Tensor | None, blocks: tuple[int, ...] = (1,)
) -> Tensor:
    """Eq. 4: unit features of images, all with the same prompt (B, P, 2, D) or without any."""
    # The towers themselves, because encode_image and encode_text round to float32.
    if prompt is None:
        features = model.visual(images)
    else:
        prefix = {
            block: Prefix(own[None]) for block, own in zip(blocks, prompt, strict=True)
        }
        features = model.require_vit()(images, prefix=prefix)
    return l2_normalize(features.to(working_dtype(model)))


def template_features(
    model: CLIP, prompts: ClassPrompts, template: str, context: Tensor | None = None
) -> Tensor:
    """Eq. 6: unit features of all classes in one template."""
    ids = model.tokenizer(prompts.texts(template)).to(model.device)
    return l2_normalize(
        model.require_text()(ids, context=context).to(working_dtype(model))
    )


def plain_classifier(model: CLIP, prompts: ClassPrompts) -> Tensor:
    """W^0: the unit mean of the unit features of all templates."""
    features = [
        template_features(model, prompts, template) for template in prompts.templates
    ]
    return l2_normalize(torch.stack(features).mean(dim=0))


def fixed_features(model: CLIP, prompts: ClassPrompts) -> Tensor | None:
    """u_fix: the unit mean of the unit features of all templates but the first, if any."""
    features = [
        template_features(model, prompts, template)
        for template in prompts.templates[1:]
    ]
    return l2_normalize(torch.stack(features).mean(dim=0)) if features else None


def text_features(
    model: CLIP,
    prompts: ClassPrompts,
    context: Tensor,
    u_fix: Tensor | None,
    text_mix: float,
) -> Tensor:
    """Unit text features (N, E) with ``context`` in the first template, mixed with ``u_fix``."""
    u_learn = template_features(model, prompts, prompts.templates[0], context)
    if u_fix is None:
        return u_learn
    return l2_normalize((1 - text_mix) * u_learn + text_mix * u_fix)


# --- step 1: mine -------------------------------------------------------------------------------


def top_classes(logits: Tensor, k: int) -> list[list[int]]:
    """The k best classes of every row, best first, ties to the lower class."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return [row[:k].tolist() for row in order]


def mine(
    features: Tensor,
    top: Sequence[Sequence[int]],
    threshold: float,
    *,
    full_sets: bool = False,
    repeats: bool = False,
) -> list[Clique]:
    """Eq. 1-3: the cliques of a batch from unit features (b, E) and each image's classes."""
    cliques: list[Clique] = []
    for i in sorted({c for classes in top for c in classes}):
        # Eq. 1: images that have the class among theirs
        S = [j for j in range(len(top)) if i in top[j]]
        actual: list[frozenset[int]] = []
        if full_sets:
            actual.append(frozenset(S))

        # Eq. 2 and 3: those that are like each of them
        M = features[S] @ features[S].T
        for row in threshold < M:
            C = frozenset(j for j, similar in zip(S, row, strict=True) if similar)
            if len(C) < 2:
                continue
            if C in actual and not repeats:
                continue
            if full_sets and frozenset(S) == C:
                continue
            actual.append(C)
        cliques += [(i, C) for C in actual]
    return cliques


# --- step 2: learn ------------------------------------------------------------------------------


def entropy(log_p: Tensor) -> Tensor:
    """Eq. 9: entropy of distributions given as log-probabilities (..., N)."""
    return -(log_p.exp() * log_p).sum(dim=-1)


def clique_loss(
    features: Tensor, text: Tensor, scale: float, settings: ReferenceSettings
) -> Losses:
    """Eq. 5-10 of one clique: unit member features (n, E), unit text features (N, E)."""
    a = features.mean(dim=0)
    if settings.member_entropy:
        logits = scale * features @ text.T
        loss = entropy(logits.log_softmax(dim=-1)).mean()
    else:
        logits = scale * l2_normalize(a) @ text.T
        loss = entropy(logits.log_softmax(dim=-1))

    con = features.new_zeros(())
    for f in features:
        con = con + ((f - a) ** 2).sum()
    if settings.mean_concentration:
        con = con / len(features)
    return Losses(loss, con, loss + settings.concentration * con)


def learn(
    model: CLIP,
    images: Tensor,
    start_visual: Tensor | None,
    start_text: Tensor | None,
    text_of: Callable[[Tensor | None], Tensor],
    settings: ReferenceSettings,
) -> Learned:
    """Eq. 4-10, 14: prompts of one clique from its images (n, 3, S, S).

    ``text_of`` maps a context to text features. No ``start_visual``: images are encoded
    plainly.
    """
    visual = None if start_visual is None else start_visual.clone().requires_grad_()
    text = None if start_text is None else start_text.clone().requires_grad_()
    parameters = [p for p in (visual, text) if p is not None]
    kind = torch.optim.AdamW if settings.weight_decay else torch.optim.Adam
    optimiser = kind(parameters, lr=settings.lr, weight_decay=settings.weight_decay)

    def evaluate() -> tuple[Tensor, Losses]:
        """The clique's mean feature, and its losses."""
        f = image_features(model, images, visual, settings.blocks)
        losses = clique_loss(f, text_of(text), model.scale, settings)
        return f.mean(dim=0), losses

    with torch.no_grad():
        a_start, before = evaluate()

    with torch.enable_grad():
        for _ in range(settings.steps):
            optimiser.zero_grad()
            _, losses = evaluate()
            losses.total.backward()
            optimiser.step()

    with torch.no_grad():
        _, after = evaluate()

    return Learned(
        visual=None if visual is None else visual.detach(),
        text=None if text is None else text.detach(),
        key=a_start,
        before=before,
        after=after,
    )


# --- step 3: retain -----------------------------------------------------------------------------


def running_mean(mean: Tensor | None, new: Tensor, tau: int) -> Tensor:
    """Eq. 11: alpha P~ + (1 - alpha) P with alpha = tau / (1 + tau)."""
    if mean is None:
        assert tau == 0
        return new
    alpha = tau / (1 + tau)
    return alpha * mean + (1 - alpha) * new


def retention_graph(keys: Tensor, s: ReferenceSettings) -> Tensor:
    """Eq. 12: Gaussian weights (n, n), K largest of each row, made symmetric.

    The diagonal is zero and does not count among the K.
    """
    n = len(keys)
    W = torch.zeros(n, n, dtype=keys.dtype)

    for k in range(n):
        for m in range(n):
            if k == m:
                continue
            difference = keys[k] - keys[m]
            squared = (difference**2).sum()
            W[k, m] = torch.exp(-squared / (2 * s.bandwidth**2))

    edges = torch.zeros_like(W)
    for k in range(n):
        row = W[k].tolist()
        others = [m for m in range(n) if m != k]
        # of equals the lower first
        others.sort(key=lambda m: -row[m])
        for m in others[: s.neighbours]:
            edges[k, m] = W[k, m]
    return torch.maximum(edges, edges.T)


def propagate(keys: Tensor, s: ReferenceSettings) -> Tensor:
    """Zhou et al. 2003: (1 - alpha) (I - alpha S)^-1 A."""
    device = keys.device
    keys = keys.cpu()
    W = retention_graph(keys, s)
    n = len(keys)
    root = W.sum(dim=1).sqrt()
    S = torch.zeros_like(W)

    for k in range(n):
        for m in range(n):
            if W[k, m] > 0:
                S[k, m] = W[k, m] / (root[k] * root[m])

    alpha = s.propagation
    identity = torch.eye(n, dtype=keys.dtype)
    solved = torch.linalg.solve(identity - alpha * S, keys)
    moved = (1 - alpha) * solved
    return moved.to(device)


def closest_pair(keys: Tensor) -> tuple[int, int]:
    """Indices k < m of the two keys at the smallest Euclidean distance, lowest pair on ties."""
    least = math.inf
    closest = (0, 1)
    for k in range(len(keys)):
        for m in range(k + 1, len(keys)):
            distance = (keys[k] - keys[m]).norm().item()
            if distance < least:
                least = distance
                closest = (k, m)
    return closest


def retain(
    entries: Sequence[Entry], key: Tensor, value: Tensor, s: ReferenceSettings
) -> list[Entry]:
    """Eq. 12-13: R_i with one more pair, and two of its pairs fused when there are more than L."""
    entries = [*entries, (key, value)]
    if len(entries) <= s.capacity:
        return entries

    raw = torch.stack([key for key, _ in entries])
    moved = propagate(raw, s)
    k, m = closest_pair(moved)

    # the lower index takes the mean of both
    keys = list(raw if s.raw_keys else moved)
    keys[k] = (keys[k] + keys[m]) / 2
    del keys[m]
    values = [value for _, value in entries]
    values[k] = (values[k] + values[m]) / 2
    del values[m]
    return list(zip(keys, values, strict=True))


# --- step 4: infer ------------------------------------------------------------------------------


def best_match(query: Tensor, keys: Sequence[Tensor]) -> int:
    """Eq. 16: the key of the largest inner product with the query, the first on ties."""
    scores = [float(query @ key) for key in keys]
    return scores.index(max(scores))


def compose(
    cliques: Sequence[Tensor], retained: Sequence[Tensor], s: ReferenceSettings
) -> Tensor | None:
    """Eq. 15, 17: the prompt (B, sum of lengths, 2, D) of one pass, or ``None`` for no prompt.

    Tokens are concatenated along their own axis: keys stay keys (index 0), values stay
        values.
    """
    parts = list(cliques)
    extra = list(retained)
    if s.clique_combination == "mean" and parts:
        parts = [torch.stack(parts).mean(dim=0)]

    if s.retained_combination == "mean" and extra:
        mean = torch.stack(extra).mean(dim=0)
        extra = [mean]
        # each clique's prompt is averaged with it; without cliques it stands alone
        if parts:
            parts = [(part + mean) / 2 for part in parts]
            extra = []

    tokens = parts + extra
    if not tokens:
        return None
    return torch.cat(tokens, dim=-3)


def merge_passes(passes: Tensor) -> Tensor:
    """One row of logits (N,) from those of an image's sets (passes, N): log mean probability."""
    if len(passes) == 1:
        return passes[0]
    log_sum = passes.log_softmax(dim=-1).logsumexp(dim=0)
    return log_sum - math.log(len(passes))
