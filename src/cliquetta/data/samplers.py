"""Samplers: which images a stream shows, and when. Pure functions of labels and a generator.

:data:`SAMPLERS` is the one table of orders. A further one is a function from the
datasets of a stream to :class:`Positions` and one entry there: stream, record and
command line follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cliquetta.errors import UserError

Indices = npt.NDArray[np.int64]
Rng = np.random.Generator


class LabelledSet(NamedTuple):
    """Id and labels of one dataset of a stream: all that a sampler knows."""

    id: str
    labels: Indices  # (n,), -1 where unknown


class Positions(NamedTuple):
    """Dataset, image and round at every position of a stream."""

    domain: Indices
    image: Indices
    # how often the dataset was repeated before; its noise is drawn anew each time
    round: Indices


@dataclass(frozen=True)
class SamplerOptions:
    """Settings of samplers; each reads those that its entry in :data:`SAMPLERS` names."""

    gamma: float = 0.1
    """concentration of the Dirichlet distribution: near 0, one burst per class"""
    present: tuple[int, int] = (3, 3)  # how many classes occur, at least and at most
    imbalance: float = 10.0  # images of the most frequent class for each of the rarest
    length: int = 10_000  # images of the stream
    limit: int | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        """Validate fields."""
        if not self.gamma > 0:
            raise UserError(f"gamma must be above 0, got {self.gamma}")
        if not 1 <= self.present[0] <= self.present[1]:
            raise UserError(
                f"present is a number or a range such as 1-4, got {self.present}"
            )
        if not self.imbalance >= 1:
            raise UserError(f"imbalance must be at least 1, got {self.imbalance}")
        for name in ("length", "limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")


Order = Callable[[LabelledSet, SamplerOptions, Rng], Indices]


def sequential(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """All images as the dataset lists them."""
    return np.arange(len(domain.labels), dtype=np.int64)


def shuffled(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """All images in random order."""
    return rng.permutation(len(domain.labels))


def correlated(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """All images, those of one class in bursts.

    As is usual for streams that are not i.i.d.: time has as many slots as there are
    classes, each class spreads its images over the slots by a draw from a symmetric
    Dirichlet distribution, and inside a slot classes follow one another. The larger
    ``gamma``, the more even the slots.
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


def uneven(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """The images of a few classes in random order; the class list is that of the dataset."""
    order = shuffled(domain, options, rng)
    classes = rng.permutation(np.unique(domain.labels))
    low, high = options.present
    if high > len(classes):
        raise UserError(
            f"{domain.id} has images of {len(classes)} classes, not of {high}"
        )
    chosen = classes[: low if low == high else rng.integers(low, high + 1)]
    return order[np.isin(domain.labels[order], chosen)]


def separate(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """All images, one class after the other; the order of classes and within them is random."""
    order = shuffled(domain, options, rng)
    turn = rng.permutation(
        int(domain.labels.max(initial=0)) + 2
    )  # the last is for label -1
    return order[np.argsort(turn[domain.labels[order]], kind="stable")]


def keff(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Batches of few effective classes (K_eff of StatA and MOON), each image shown at most once.

    A batch draws its number of classes from ``present``, the classes by the images that
    they have left, and takes at least one image of each. Where they hold too few for a
    batch, further classes join up to the maximum; where that does not help either, the
    stream ends.
    """
    size, (low, high) = options.batch_size, options.present
    labels = domain.labels
    members = [
        rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)
    ]
    if high > len(members):
        raise UserError(
            f"{domain.id} has images of {len(members)} classes, not of {high}"
        )
    batches: list[Indices] = []
    for _ in range((options.limit or len(labels)) // size):
        left = np.array([len(images) for images in members])
        most = min(high, int(np.count_nonzero(left)))
        if most < low:
            break
        drawn = rng.choice(len(left), most, replace=False, p=left / left.sum())
        if left[drawn].sum() < size:
            drawn = np.argsort(-left)[:most]
        needed = 1 + int(np.searchsorted(np.cumsum(left[drawn]), size))
        if needed > most:
            break
        chosen = drawn[: min(size, max(needed, int(rng.integers(low, most + 1))))]
        rest = rng.permutation(np.concatenate([members[c][1:] for c in chosen]))
        firsts = [
            members[c][0] for c in chosen
        ]  # so that none of the classes is missed
        batches.append(rng.permutation(np.append(firsts, rest[: size - len(chosen)])))
        for c in chosen:
            members[c] = members[c][~np.isin(members[c], batches[-1])]
    if not batches:
        remedy = "take smaller batches or more classes"
        raise UserError(
            f"{high} classes of {domain.id} hold fewer than {size} images: {remedy}"
        )
    return np.concatenate(batches)


def long_tail(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Images in random order, their classes thinned out exponentially (Cui et al., 2019).

    Of C classes in random rank, class r keeps a share of ``imbalance ** (-r / (C -
    1))`` of the first one's images; as many are shown as the smallest class allows at
    that ratio.
    """
    order = shuffled(domain, options, rng)
    classes, counts = np.unique(domain.labels, return_counts=True)
    rank = rng.permutation(len(classes))
    shares = options.imbalance ** (-rank / max(1, len(classes) - 1))
    sizes = np.maximum(1, np.floor((counts / shares).min() * shares + 1e-9)).astype(
        np.int64
    )
    chosen = [
        order[domain.labels[order] == c][:n]
        for c, n in zip(classes, sizes, strict=True)
    ]
    return order[np.isin(order, np.concatenate(chosen))]


def in_turn(order: Order) -> "Draw":
    """Datasets one after the other, each in an order of its own."""

    def draw(
        domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
    ) -> Positions:
        return _concatenate(
            [order(domain, options, rng)[: options.limit] for domain in domains]
        )

    return draw


def mixed(
    domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
) -> Positions:
    """Images of several datasets interleaved at random."""
    orders = [shuffled(domain, options, rng)[: options.limit] for domain in domains]
    lengths = [len(order) for order in orders]
    turns = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    queues = [iter(order) for order in orders]
    index = np.array([next(queues[turn]) for turn in turns], dtype=np.int64)
    return Positions(turns, index, np.zeros_like(turns))


def recurring(
    domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
) -> Positions:
    """``a>b>a``: the images of a dataset shared out over its turns, none shown twice."""
    ids = [domain.id for domain in domains]
    shares: dict[str, list[Indices]] = {}
    for domain in domains:
        if domain.id not in shares:
            order = shuffled(domain, options, rng)[: options.limit]
            shares[domain.id] = np.array_split(order, ids.count(domain.id))
    return _concatenate([shares[id].pop(0) for id in ids])


def long(
    domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
) -> Positions:
    """The datasets again and again in random order, their noise drawn anew each round."""
    rounds: list[Positions] = []
    while sum(len(positions.image) for positions in rounds) < options.length:
        once = in_turn(shuffled)(domains, options, rng)
        rounds.append(once._replace(round=np.full_like(once.image, len(rounds))))
    joined = (
        np.concatenate(column)[: options.length] for column in zip(*rounds, strict=True)
    )
    return Positions(*joined)


def interleave(
    positions: Positions, domain: LabelledSet, number: int, rng: Rng
) -> Positions:
    """Interleave ``positions``, in order, with at most as many images of dataset ``number``."""
    size = len(positions.image)
    extra = rng.permutation(len(domain.labels))[:size]
    others = Positions(np.full_like(extra, number), extra, np.zeros_like(extra))

    # Which places of the new order are of the other dataset.
    both = np.repeat([False, True], [size, len(extra)])
    is_extra = rng.permutation(both)
    order = np.empty(len(both), dtype=np.int64)
    order[~is_extra] = np.arange(size)
    order[is_extra] = np.arange(size, len(both))

    columns = []
    for first, second in zip(positions, others, strict=True):
        joined = np.concatenate([first, second])
        columns.append(joined[order])
    return Positions(*columns)


def _concatenate(orders: Sequence[Indices]) -> Positions:
    turns = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    return Positions(turns, np.concatenate(orders), np.zeros_like(turns))


Draw = Callable[[Sequence[LabelledSet], SamplerOptions, Rng], Positions]


@dataclass(frozen=True)
class Sampler:
    """One order of a stream."""

    summary: str
    draw: Draw
    reads: tuple[
        str, ...
    ] = ()  # options, beside `limit`, on which the positions depend
    needs_labels: bool = False
    interleaves: bool = False
    """whether datasets are mixed (`a+b`) rather than in sequence (`a>b`)"""


SAMPLERS: dict[str, Sampler] = {
    "shuffled": Sampler(
        "random order; several datasets follow one another", in_turn(shuffled)
    ),
    "sequential": Sampler("as the dataset lists its images", in_turn(sequential)),
    "correlated": Sampler(
        "classes in bursts (Dirichlet, --gamma)", in_turn(correlated), ("gamma",), True
    ),
    "separate": Sampler(
        "one class after the other, in random order", in_turn(separate), (), True
    ),
    "keff": Sampler(
        "every batch of images of --present classes",
        in_turn(keff),
        ("present", "batch_size"),
        True,
    ),
    "long-tail": Sampler(
        "classes thinned out exponentially (--imbalance)",
        in_turn(long_tail),
        ("imbalance",),
        True,
    ),
    "uneven": Sampler(
        "images of --present classes only; the class list is that of the dataset",
        in_turn(uneven),
        ("present",),
        True,
    ),
    "recurring": Sampler(
        "a>b>a: domains come back, with images not seen before", recurring
    ),
    "long": Sampler(
        "--length images: the dataset again and again, its noise drawn anew",
        long,
        ("length",),
    ),
    "mixed": Sampler(
        "a+b: images of several datasets interleaved", mixed, interleaves=True
    ),
}


def parse_present(given: str) -> tuple[int, int]:
    """The numbers of ``3`` or ``1-4``."""
    low, dash, high = given.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError:
        raise UserError(
            f"--present takes a number or a range such as 1-4, got {given!r}"
        ) from None
