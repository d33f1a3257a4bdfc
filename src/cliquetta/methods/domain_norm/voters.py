"""Similar recent images of the same domain vote on an answer: cliques as neighbourhoods."""

from __future__ import annotations

import torch
from torch import Tensor

from cliquetta.methods._shared.memory import Memory
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.learning import ring
from cliquetta.methods.domain_norm.passes import Encoded
from cliquetta.model.transfer import send


def nearest_images(features: Tensor, others: Tensor, neighbours: int) -> Tensor:
    """Rows (b, k) of ``cat([features, others])`` that are most similar to each image but itself."""
    b = len(features)
    similarity = features @ torch.cat([features, others]).T
    similarity[:, :b].fill_diagonal_(-2.0)
    return similarity.topk(min(neighbours, b + len(others) - 1), dim=1).indices


def vote(p: Tensor, others: Tensor, nearest: Tensor, share: float) -> Tensor:
    """Probabilities (b, N), ``share`` of them the mean answer of each image's nearest images.

    ``nearest`` counts the batch's own answers ``p`` first, then those of the others (m, N).
    """
    if nearest.shape[1] == 0 or share == 0:
        return p
    return (1 - share) * p + share * torch.cat([p, others])[nearest].mean(dim=1)


class Voters:
    """The last images of each domain, in the adapter's memory."""

    def __init__(self, memory: Memory, classifier: Tensor, config: DomainNormConfig) -> None:
        self.memory, self.config = memory, config
        K, V, (N, E) = config.domains, config.vote_memory, classifier.shape
        memory.declare("voters", classifier.new_zeros(K, V, E))
        memory.declare("votes", classifier.new_zeros(K, V, N))
        plain = torch.zeros(K, V, dtype=torch.long, device=classifier.device)
        memory.declare("plain_votes", plain, below=N)
        memory.declare("voters_next", torch.zeros(K, dtype=torch.long))

    def of(self, domain: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features (V, E), answers (V, N) and zero-shot classes (V,) of a domain's voters."""
        kept = min(int(self.memory["voters_next"][domain]), self.config.vote_memory)
        voters, votes, plain = (
            self.memory[name][domain, :kept] for name in ("voters", "votes", "plain_votes")
        )
        return voters, votes, plain

    def vote(self, domain: int, part: Encoded, p: Tensor, features: Tensor) -> Tensor:
        """Answers (b, N) after the votes of recent images of the domain, which these join."""
        memory, config = self.memory, self.config
        voters, votes, plain_votes = self.of(domain)
        nearest = nearest_images(features, voters, config.neighbours)
        voted = vote(p, votes, nearest, config.vote_share)
        plain = part.zero_shot.argmax(dim=1)
        same = torch.cat([plain, plain_votes])[nearest] == plain[:, None]
        memory["agreement"][domain] += same.sum() / max(1, nearest.shape[1])
        rows, position = part.order[: config.vote_memory], memory["voters_next"]
        places, position[domain] = ring(position[domain], len(rows), config.vote_memory)
        places = send(places, p.device)
        for name, value in (("voters", features), ("votes", p), ("plain_votes", plain)):
            memory[name][domain].index_copy_(0, places, value[rows])
        return voted
