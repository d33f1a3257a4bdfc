"""Samplers: which images a stream shows, and when. Pure functions of labels and a generator.

:data:`SAMPLERS` is the one table of orders. A further one is a function from the datasets of a
stream to :class:`Places` and one entry there: the stream, its record and the command line follow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cliquetta.errors import UnknownNameError, UserError

Indices = npt.NDArray[np.int64]
Rng = np.random.Generator


class Domain(NamedTuple):
    """What a sampler knows of one dataset of a stream."""

    id: str
    labels: Indices
    """(n,), -1 where unknown."""


class Places(NamedTuple):
    """What stands at every place of a stream."""

    domain: Indices
    """Number of the dataset."""
    image: Indices
    """Image of that dataset."""
    round: Indices
    """How often the dataset was repeated before; the noise of its shift is drawn anew each time."""


@dataclass(frozen=True)
class SamplerOptions:
    """Settings of samplers; each reads those that its entry in :data:`SAMPLERS` names."""

    gamma: float = 0.1
    """Concentration of the Dirichlet distribution: near 0 every class comes in one burst."""
    present: tuple[int, int] = (3, 3)
    """How many classes occur, at least and at most."""
    length: int = 10_000
    """Images of the whole stream."""
    limit: int | None = None
    """Images per dataset, at most."""
    batch_size: int = 64

    def __post_init__(self) -> None:
        """Validate fields."""
        if not self.gamma > 0:
            raise UserError(f"gamma must be above 0, got {self.gamma}")
        if not 1 <= self.present[0] <= self.present[1]:
            raise UserError(f"present is a number or a range such as 1-4, got {self.present}")
        for name in ("length", "limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")


Order = Callable[[Domain, SamplerOptions, Rng], Indices]


def sequential(domain: Domain, options: SamplerOptions, rng: Rng) -> Indices:
    """All images as the dataset lists them."""
    del options, rng
    return np.arange(len(domain.labels), dtype=np.int64)


def shuffled(domain: Domain, options: SamplerOptions, rng: Rng) -> Indices:
    """All images in random order."""
    del options
    return rng.permutation(len(domain.labels))


def correlated(domain: Domain, options: SamplerOptions, rng: Rng) -> Indices:
    """All images, those of one class in bursts.

    As is usual for streams that are not i.i.d.: time has as many slots as there are classes, each
    class spreads its images over the slots by a draw from a symmetric Dirichlet distribution, and
    inside a slot classes follow one another. The larger ``gamma``, the more even the slots.
    """
    classes = np.unique(domain.labels)
    slots: list[list[Indices]] = [[] for _ in classes]
    for label in classes:
        members = rng.permutation(np.flatnonzero(domain.labels == label))
        shares = rng.dirichlet(np.full(len(classes), options.gamma))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for slot, piece in zip(slots, np.split(members, cuts), strict=True):
            slot.append(piece)
    ordered = [[slot[i] for i in rng.permutation(len(slot))] for slot in slots]
    return np.concatenate([piece for slot in ordered for piece in slot])


def uneven(domain: Domain, options: SamplerOptions, rng: Rng) -> Indices:
    """The images of a few classes in random order; the class list stays whole."""
    order = shuffled(domain, options, rng)
    classes = rng.permutation(np.unique(domain.labels))
    low, high = options.present
    if high > len(classes):
        raise UserError(f"{domain.id} has images of {len(classes)} classes, not of {high}")
    chosen = classes[: low if low == high else rng.integers(low, high + 1)]
    return order[np.isin(domain.labels[order], chosen)]


def in_turn(order: Order) -> Draw:
    """Datasets one after the other, each in an order of its own."""

    def draw(domains: Sequence[Domain], options: SamplerOptions, rng: Rng) -> Places:
        return _concatenate([order(domain, options, rng)[: options.limit] for domain in domains])

    return draw


def mixed(domains: Sequence[Domain], options: SamplerOptions, rng: Rng) -> Places:
    """Images of several datasets interleaved at random."""
    orders = [shuffled(domain, options, rng)[: options.limit] for domain in domains]
    lengths = [len(order) for order in orders]
    turns = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    queues = [iter(order) for order in orders]
    index = np.array([next(queues[turn]) for turn in turns], dtype=np.int64)
    return Places(turns, index, np.zeros_like(turns))


def recurring(domains: Sequence[Domain], options: SamplerOptions, rng: Rng) -> Places:
    """``a>b>a``: the images of a dataset shared out over its turns, none shown twice."""
    ids = [domain.id for domain in domains]
    shares: dict[str, list[Indices]] = {}
    for domain in domains:
        if domain.id not in shares:
            order = shuffled(domain, options, rng)[: options.limit]
            shares[domain.id] = np.array_split(order, ids.count(domain.id))
    return _concatenate([shares[id].pop(0) for id in ids])


def long(domains: Sequence[Domain], options: SamplerOptions, rng: Rng) -> Places:
    """The datasets again and again in random order, their noise drawn anew each round."""
    rounds: list[Places] = []
    while sum(len(places.image) for places in rounds) < options.length:
        once = in_turn(shuffled)(domains, options, rng)
        rounds.append(once._replace(round=np.full_like(once.image, len(rounds))))
    joined = (np.concatenate(column)[: options.length] for column in zip(*rounds, strict=True))
    return Places(*joined)


def _concatenate(orders: Sequence[Indices]) -> Places:
    turns = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    return Places(turns, np.concatenate(orders), np.zeros_like(turns))


Draw = Callable[[Sequence[Domain], SamplerOptions, Rng], Places]


@dataclass(frozen=True)
class Sampler:
    """One order of a stream."""

    summary: str
    draw: Draw
    reads: tuple[str, ...] = ()
    """Fields of :class:`SamplerOptions`, beside ``limit``, on which the places depend."""
    needs_labels: bool = False
    interleaves: bool = False
    """Whether datasets are mixed (``a+b``) rather than in sequence (``a>b``)."""


SAMPLERS: dict[str, Sampler] = {
    "shuffled": Sampler("random order; several datasets follow one another", in_turn(shuffled)),
    "sequential": Sampler("as the dataset lists its images", in_turn(sequential)),
    "correlated": Sampler(
        "classes in bursts (Dirichlet, --gamma)", in_turn(correlated), ("gamma",), True
    ),
    "uneven": Sampler(
        "images of --present classes only; the class list stays whole",
        in_turn(uneven),
        ("present",),
        True,
    ),
    "recurring": Sampler("a>b>a: domains come back, with images not seen before", recurring),
    "long": Sampler(
        "--length images: the dataset again and again, its noise drawn anew", long, ("length",)
    ),
    "mixed": Sampler("a+b: images of several datasets interleaved", mixed, interleaves=True),
}
RENAMED = {"given": "sequential"}
"""Old names of orders, as scripts and records may have them."""


def get_sampler(name: str) -> tuple[str, Sampler]:
    """The sampler of a name, with its name of today.

    Raises:
        UnknownNameError: If there is no such order.

    """
    if name in RENAMED:
        warnings.warn(f"order {name!r} is now called {RENAMED[name]!r}", stacklevel=2)
        name = RENAMED[name]
    if name not in SAMPLERS:
        raise UnknownNameError("order", name, SAMPLERS)
    return name, SAMPLERS[name]


def parse_present(given: str) -> tuple[int, int]:
    """The numbers of ``3`` or ``1-4``."""
    low, dash, high = given.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError:
        raise UserError(f"--present takes a number or a range such as 1-4, got {given!r}") from None
