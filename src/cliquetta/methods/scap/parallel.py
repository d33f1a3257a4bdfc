"""One SCAP batch on several processes: each pulls back its part of the memberships.

All processes see the same batch, mine the same cliques and keep the same memory. What takes the
time, one pull through the image tower for every membership, is divided between them, and the
gradients are added up before any process takes a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cliquetta.methods.scap.learning import Learner


def split_memberships(learner: Learner, group: dist.ProcessGroup | None = None) -> None:
    """Let ``learner`` work as one of ``group`` (by default: of all processes).

    Every process of the group must do so, and must predict the same batches in the same order.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def share(total: int) -> slice:
        """Equal parts in order of rank, to within one."""
        return slice(total * rank // size, total * (rank + 1) // size)

    def add_up(part: Tensor) -> Tensor:
        """The sum over all processes, in order of rank: the same bits on every one of them."""
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous(), group=group)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    learner.share, learner.reduce = share, add_up
