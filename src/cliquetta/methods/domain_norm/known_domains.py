"""The domains of a stream as they are remembered: told apart, entered, and given room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cliquetta.methods._shared.memory import Memory
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import (
    GROUP,
    KEYS,
    DomainKeys,
    absorb,
    batch_figures,
    domain_distance,
    nearest_domain,
    split_domains,
)
from cliquetta.methods.domain_norm.learning import arrange, ring
from cliquetta.model.transfer import send

YOUNG = 32
"""Images that a domain must have seen before others are told apart from it."""


class KnownDomains:
    """Which domain images are of, in the adapter's memory.

    ``fresh`` is what the memory of a domain starts from.
    """

    def __init__(
        self, memory: Memory, fresh: Mapping[str, Tensor], config: DomainNormConfig
    ) -> None:
        self.memory, self.fresh, self.config = memory, fresh, config

    def keys(self, domain: int | None = None) -> DomainKeys:
        """The keys of all domains, or of one."""
        one = slice(None) if domain is None else slice(domain, domain + 1)
        return DomainKeys(*(self.memory[name][one] for name in KEYS))

    def tell_apart(
        self, signatures: Tensor, figures: list[float] | None
    ) -> list[tuple[int | None, Tensor]]:
        """Domain and rows of each part of a batch; ``None`` for one that is new.

        ``figures`` are those of ``batch_figures``, if they are known.
        """
        memory, config = self.memory, self.config
        current = int(memory["domain"])
        rows = torch.arange(len(signatures), device=signatures.device)
        group = self._remember_group(signatures)
        if config.domains == 1 or memory["images"][current] < YOUNG:
            return [(current, rows)]
        keys, threshold = self.keys(), config.domain_threshold
        if len(rows) < GROUP:
            distance = domain_distance(group, keys).tolist()
            return [(nearest_domain(distance, len(group), threshold), rows)]
        if figures is None:
            figures = batch_figures(signatures, keys).tolist()
        return split_domains(signatures, keys, threshold, figures)

    def enter(
        self,
        signatures: Tensor,
        told: Sequence[tuple[int | None, Tensor]],
        key: DomainKeys | None,
    ) -> list[tuple[int, Tensor]]:
        """The parts with a place for each domain, whose key takes their images up.

        ``key`` is that of the only domain after the batch, if it is known.
        """
        memory, parts = self.memory, []
        for domain, rows in told:
            place = self._open() if domain is None else domain
            after = absorb(signatures[rows], self.keys(place)) if key is None else key
            for name, value in zip(KEYS, after, strict=True):
                memory[name][place : place + 1] = value
            memory["last_met"][place] = memory["last_met"].max() + 1
            parts.append((place, rows))
        memory["domain"] = torch.tensor(max(parts, key=lambda part: len(part[1]))[0])
        return parts

    def _remember_group(self, signatures: Tensor) -> Tensor:
        """The signatures of the last ``GROUP`` images, with these written over the oldest."""
        memory = self.memory
        rows = arrange(signatures[:, 0])[:GROUP]
        places, memory["group_next"] = ring(memory["group_next"], len(rows), GROUP)
        memory["group"].index_copy_(0, send(places, rows.device), signatures[rows])
        return memory["group"][: min(int(memory["group_next"]), GROUP)]

    def _open(self) -> int:
        """A place for a new domain: that of the least recently used one."""
        place = int(self.memory["last_met"].argmin())
        for name, value in self.fresh.items():
            self.memory[name][place] = value
        self.memory["window_domain"][self.memory["window_domain"] == place] = -1
        return place
