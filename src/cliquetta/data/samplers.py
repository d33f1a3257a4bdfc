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

    # Concentration of the Dirichlet distribution: near 0, one burst per class.
    gamma: float = 0.1
    # How many classes occur, at least and at most.
    present: tuple[int, int] = (3, 3)
    # Images of the most frequent class for each of the rarest.
    imbalance: float = 10.0
    # Images of the stream.
    length: int = 10_000
    # Images per dataset, at most.
    limit: int | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        """Validate fields."""
        if not self.gamma > 0:
            raise UserError(f"gamma must be above 0, got {self.gamma}")
        low, high = self.present
        if not 1 <= low <= high:
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
    """Order all images as the dataset lists them."""
    return np.arange(len(domain.labels), dtype=np.int64)


def shuffled(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Order all images at random."""
    return rng.permutation(len(domain.labels))


def correlated(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Order all images so that those of one class come in bursts.

    As is usual for streams that are not i.i.d.: time has as many slots as there are
    classes, each class spreads its images over the slots by a draw from a symmetric
    Dirichlet distribution, and inside a slot classes follow one another. The larger
    ``gamma``, the more even the slots.
    """
    classes = np.unique(domain.labels)

    # A list of bursts for each slot of time.
    slots: list[list[Indices]] = [[] for _ in classes]
    for label in classes:
        members = rng.permutation(np.flatnonzero(domain.labels == label))
        shares = rng.dirichlet(np.full(len(classes), options.gamma))

        # The class's images are cut at the borders of its shares.
        borders = np.cumsum(shares)[:-1] * len(members)
        pieces = np.split(members, np.rint(borders).astype(np.int64))
        for slot, piece in zip(slots, pieces, strict=True):
            slot.append(piece)

    # The bursts of a slot follow one another at random.
    bursts: list[Indices] = []
    for slot in slots:
        turns = rng.permutation(len(slot))
        bursts.extend(slot[turn] for turn in turns)
    return np.concatenate(bursts)


def uneven(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Order the images of a few classes at random; the class list is that of the dataset."""
    order = shuffled(domain, options, rng)
    classes = rng.permutation(np.unique(domain.labels))

    low, high = options.present
    _check_classes(domain, classes=len(classes), needed=high)

    # A single number needs no draw.
    count = low if low == high else rng.integers(low, high + 1)
    chosen = classes[:count]
    return order[np.isin(domain.labels[order], chosen)]


def _check_classes(domain: LabelledSet, *, classes: int, needed: int) -> None:
    """Refuse to show more classes than a dataset has."""
    if needed > classes:
        raise UserError(f"{domain.id} has images of {classes} classes, not of {needed}")


def separate(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Order all images one class after the other; classes, and images within them, at random."""
    order = shuffled(domain, options, rng)

    # One turn for each label, the last for label -1.
    highest = int(domain.labels.max(initial=0))
    turn = rng.permutation(highest + 2)
    turns = turn[domain.labels[order]]
    return order[np.argsort(turns, kind="stable")]


def keff(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Order batches of few effective classes (K_eff of StatA and MOON), no image twice.

    A batch draws its number of classes from ``present``, the classes by the images that
    they have left, and takes at least one image of each. Where they hold too few for a
    batch, further classes join up to the maximum; where that does not help either, the
    stream ends.
    """
    size = options.batch_size
    _, high = options.present

    # Images of each class in random order, which batches use up.
    labels = domain.labels
    classes = np.unique(labels)
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in classes]
    _check_classes(domain, classes=len(members), needed=high)

    batches = []
    images = options.limit or len(labels)
    for _ in range(images // size):
        left = np.array([len(unseen) for unseen in members])
        chosen = _draw_classes(left, options, rng)
        if chosen is None:
            break
        batch = _draw_batch([members[c] for c in chosen], size, rng)
        batches.append(batch)
        for c in chosen:
            members[c] = members[c][~np.isin(members[c], batch)]

    if not batches:
        raise UserError(
            f"{high} classes of {domain.id} hold fewer than {size} images: "
            "take smaller batches or more classes"
        )
    return np.concatenate(batches)


def _draw_classes(left: Indices, options: SamplerOptions, rng: Rng) -> Indices | None:
    """Draw the classes of a batch by the images ``left`` of each; none if they cannot fill it."""
    size = options.batch_size
    low, high = options.present
    most = min(high, int(np.count_nonzero(left)))
    if most < low:
        return None

    # Classes that hold too few images together give way to the largest ones.
    drawn = rng.choice(len(left), most, replace=False, p=left / left.sum())
    if left[drawn].sum() < size:
        drawn = np.argsort(-left)[:most]
    filled = np.cumsum(left[drawn])

    needed = 1 + int(np.searchsorted(filled, size))
    if needed > most:
        return None

    # As many classes as are drawn, but enough of them to fill the batch.
    count = max(needed, int(rng.integers(low, most + 1)))
    return drawn[: min(size, count)]


def _draw_batch(members: list[Indices], size: int, rng: Rng) -> Indices:
    """Draw ``size`` of the images that some classes have left, at least one of each."""
    firsts = [unseen[0] for unseen in members]
    others = np.concatenate([unseen[1:] for unseen in members])
    rest = rng.permutation(others)[: size - len(members)]
    return rng.permutation(np.append(firsts, rest))


def long_tail(domain: LabelledSet, options: SamplerOptions, rng: Rng) -> Indices:
    """Order images at random, their classes thinned out exponentially (Cui et al., 2019).

    Of C classes in random rank, class r keeps a share of ``imbalance ** (-r / (C -
    1))`` of the first one's images; as many are shown as the smallest class allows at
    that ratio.
    """
    order = shuffled(domain, options, rng)
    classes, counts = np.unique(domain.labels, return_counts=True)

    rank = rng.permutation(len(classes))
    last_rank = max(1, len(classes) - 1)

    # Rank 0 keeps all, the last rank one in `imbalance`.
    shares = options.imbalance ** (-rank / last_rank)

    # The class that has the fewest images for its share limits all of them.
    largest = (counts / shares).min()
    sizes = np.floor(largest * shares + 1e-9).astype(np.int64)
    pieces = []
    for label, size in zip(classes, np.maximum(1, sizes), strict=True):
        members = order[domain.labels[order] == label]
        pieces.append(members[:size])
    return order[np.isin(order, np.concatenate(pieces))]


def in_turn(order: Order) -> "Draw":
    """Return a sampler that shows datasets one after the other, each in its own ``order``."""

    def draw(
        domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
    ) -> Positions:
        orders = [order(domain, options, rng)[: options.limit] for domain in domains]
        return _concatenate(orders)

    return draw


def mixed(
    domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
) -> Positions:
    """Interleave images of several datasets at random."""
    orders = [shuffled(domain, options, rng)[: options.limit] for domain in domains]
    in_sequence = _concatenate(orders)
    turns = rng.permutation(in_sequence.domain)

    # The n-th turn of a dataset shows the n-th image of its order.
    image = np.empty_like(turns)
    for number, order in enumerate(orders):
        image[turns == number] = order
    return Positions(turns, image, round=np.zeros_like(turns))


def recurring(
    domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
) -> Positions:
    """Share out the images of a dataset over its turns (``a>b>a``), none shown twice."""
    ids = [domain.id for domain in domains]
    shares: dict[str, list[Indices]] = {}
    for domain in domains:
        if domain.id in shares:
            continue

        # Drawn once, however often the dataset comes back.
        order = shuffled(domain, options, rng)[: options.limit]

        turns = ids.count(domain.id)
        shares[domain.id] = np.array_split(order, turns)
    return _concatenate([shares[id].pop(0) for id in ids])


def long(
    domains: Sequence[LabelledSet], options: SamplerOptions, rng: Rng
) -> Positions:
    """Show the datasets again and again in random order, their noise drawn anew each round."""
    draw = in_turn(shuffled)
    rounds: list[Positions] = []
    images = 0
    while images < options.length:
        positions = draw(domains, options, rng)
        round = np.full_like(positions.image, len(rounds))
        rounds.append(positions._replace(round=round))
        images += len(round)

    # Column by column: datasets, images and rounds, cut where the stream ends.
    columns = zip(*rounds, strict=True)
    return Positions._make(
        np.concatenate(column)[: options.length] for column in columns
    )


def interleave(
    positions: Positions, domain: LabelledSet, number: int, rng: Rng
) -> Positions:
    """Interleave ``positions``, in order, with at most as many images of dataset ``number``."""
    size = len(positions.image)
    extra = rng.permutation(len(domain.labels))[:size]

    # Which places of the new order are of the other dataset.
    both = np.repeat([False, True], [size, len(extra)])
    is_extra = rng.permutation(both)

    # Every column of the first positions, filled up by that of the others.
    columns = []
    others = Positions(
        domain=np.full_like(extra, number),
        image=extra,
        round=np.zeros_like(extra),
    )
    for first, second in zip(positions, others, strict=True):
        column = np.empty(len(both), dtype=np.int64)
        column[~is_extra] = first
        column[is_extra] = second
        columns.append(column)
    return Positions._make(columns)


def _concatenate(orders: Sequence[Indices]) -> Positions:
    """Show datasets one after the other, each in its order."""
    lengths = [len(order) for order in orders]
    domain = np.repeat(np.arange(len(orders)), lengths)
    return Positions(domain, image=np.concatenate(orders), round=np.zeros_like(domain))


Draw = Callable[[Sequence[LabelledSet], SamplerOptions, Rng], Positions]


@dataclass(frozen=True)
class Sampler:
    """Order of a stream."""

    summary: str
    draw: Draw
    # Options, beside `limit`, on which the positions depend.
    reads: tuple[str, ...] = ()
    needs_labels: bool = False
    # Whether datasets are mixed (`a+b`) rather than in sequence (`a>b`).
    interleaves: bool = False


SAMPLERS: dict[str, Sampler] = {
    "shuffled": Sampler(
        "random order; several datasets follow one another",
        in_turn(shuffled),
    ),
    "sequential": Sampler(
        "as the dataset lists its images",
        in_turn(sequential),
    ),
    "correlated": Sampler(
        "classes in bursts (Dirichlet, --gamma)",
        in_turn(correlated),
        reads=("gamma",),
        needs_labels=True,
    ),
    "separate": Sampler(
        "one class after the other, in random order",
        in_turn(separate),
        needs_labels=True,
    ),
    "keff": Sampler(
        "every batch of images of --present classes",
        in_turn(keff),
        reads=("present", "batch_size"),
        needs_labels=True,
    ),
    "long-tail": Sampler(
        "classes thinned out exponentially (--imbalance)",
        in_turn(long_tail),
        reads=("imbalance",),
        needs_labels=True,
    ),
    "uneven": Sampler(
        "images of --present classes only; the class list is that of the dataset",
        in_turn(uneven),
        reads=("present",),
        needs_labels=True,
    ),
    "recurring": Sampler(
        "a>b>a: domains come back, with images not seen before",
        recurring,
    ),
    "long": Sampler(
        "--length images: the dataset again and again, its noise drawn anew",
        long,
        reads=("length",),
    ),
    "mixed": Sampler(
        "a+b: images of several datasets interleaved",
        mixed,
        interleaves=True,
    ),
}


def parse_present(text: str) -> tuple[int, int]:
    """Read the numbers of ``3`` or ``1-4``."""
    low, dash, high = text.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError:
        raise UserError(
            f"--present takes a number or a range such as 1-4, got {text!r}"
        ) from None
