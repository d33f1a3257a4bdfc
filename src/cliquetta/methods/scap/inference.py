"""Inference: text and image features under the composed prompts (Eq. 18-19)."""

from __future__ import annotations

import torch
from torch import Tensor

from cliquetta.methods.scap.cliques import Cliques
from cliquetta.methods.scap.composition import Passes
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.losses import clique_sum
from cliquetta.methods.scap.text import PromptedText
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize
from cliquetta.model.vision import VisionTower
from cliquetta.model.vjp import chunks

TEXTS = 4096
"""Texts that are encoded at once when classes have contexts of their own."""


def composed_text(
    text: PromptedText,
    cliques: Cliques,
    own: Tensor | None,
    mean: Tensor,
    top: Tensor,
    config: SCAPConfig,
) -> tuple[Tensor, Tensor | None]:
    """Text features of the passes: (N, E) for all, or (C, N, E) and which one each pass takes.

    Eq. 18: the retained context ``mean``, and with alpha_r < 1 also the mean of the contexts
    ``own`` (U, ...) of the class's cliques.
    """
    share = config.text_retained_share
    if share == 1 or own is None:
        return text.features(mean), None
    device = mean.device
    labels, owner = torch.unique(cliques.classes, return_inverse=True)
    total = clique_sum(own[cliques.set_of.to(device)], owner.to(device), len(labels))
    times = torch.bincount(owner, minlength=len(labels)).to(device)
    by_class = total / times.view(-1, *[1] * (total.ndim - 1))
    contexts = torch.cat([share * mean + (1 - share) * by_class, mean[None]])
    lookup = torch.full((text.classes,), len(labels))
    lookup[labels] = torch.arange(len(labels))
    which = lookup[top]
    if config.merge == "union":
        contexts = contexts[which.to(device)].mean(dim=1)
        which = torch.arange(len(top))
    elif config.merge == "top-1":
        which = which[:, 0]
    parts = chunks(len(contexts), max(1, TEXTS // text.classes))
    words = torch.cat([text.features_of_each(contexts[part]) for part in parts])
    return words, which.reshape(-1).to(device)


def prompted_features(
    tower: VisionTower,
    hidden: Tensor,
    plain: Tensor,
    passes: Passes,
    prompts: Tensor,
    mask: Tensor,
    start: Tensor,
    config: SCAPConfig,
    *,
    rows: int,
) -> Tensor:
    """Unit features (R, E) of all passes: prompted where there is a prompt, else ``plain`` (R, E).

    ``hidden`` (b, T, D) are the states at the first prompted block, ``prompts`` (R, S, V) and
    ``mask`` the composed prompts; at most ``rows`` passes are in the tower at once. ``start`` (B,
    P, 2, D) stands in for a missing prompt if the config says so.
    """
    features = plain.clone()
    chosen = passes.prompted.nonzero()[:, 0]
    if config.without_prompts == "start-prompt":
        chosen = torch.arange(len(plain))
        alone = ~mask.any(dim=1, keepdim=True)
        stand_in = start.flatten().expand(len(plain), 1, -1)
        prompts = torch.cat([prompts, stand_in.to(prompts.dtype)], dim=1)
        mask = torch.cat([mask, alone], dim=1)
    image, chosen = passes.image.to(plain.device), chosen.to(plain.device)
    for part in chunks(len(chosen), rows):
        own = chosen[part]
        features[own] = encode_prompted(
            tower, hidden[image[own]], prompts[own], mask[own], start, config
        )
    return features


def encode_prompted(
    tower: VisionTower,
    hidden: Tensor,
    prompts: Tensor,
    mask: Tensor,
    start: Tensor,
    config: SCAPConfig,
) -> Tensor:
    """Unit features of rows under their composed prompts (R, S, V); every row has at least one."""
    B, P, _, D = start.shape
    R, S, _ = prompts.shape
    tokens = prompts.view(R, S, B, P, 2, D)
    seen = None if S == 1 else mask.repeat_interleave(P, dim=1)
    prefix = {
        block: Prefix(tokens[:, :, at].reshape(R, S * P, 2, D), seen)
        for at, block in enumerate(config.blocks)
    }
    return l2_normalize(tower.pool(tower.run(hidden, config.blocks[0], prefix=prefix)))
