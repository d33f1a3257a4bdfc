"""Options of a prediction run: one object that the command line, Python and Ray share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from cliquetta.data.images import Decode
from cliquetta.data.inputs import ChannelOrder
from cliquetta.data.listing import STDIN
from cliquetta.data.remote import is_url
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.inference.tables import WriteTable, pick_format

if TYPE_CHECKING:
    from cliquetta.inference.ray_driver import RayCluster

Order = Literal["auto", "listed", "shuffled"]
Labels = str | Sequence[str | int]


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of :func:`cliquetta.predict`, which documents them; validated when built.

    >>> PredictOptions(top_k=3, shard=(2, 8)).target is None
    True
    """

    batch_size: int = 64
    seed: int = 0
    order: Order = "auto"
    labels: Labels | None = None
    zero_shot: bool = False
    top_k: int = 1
    all_probabilities: bool = False
    multi_label: float | None = None
    reject: float | None = None
    calibrate: bool = False
    channel_order: ChannelOrder = "rgb"
    workers: int | None = None
    decode: Decode = "exact"
    state: Path | str | None = None
    out: Path | str | None = None
    file_format: str | None = None
    shard: tuple[int, int] = (1, 1)
    overwrite: bool = False
    keep_rows: bool = False
    group_by: str | None = None
    cluster: "RayCluster | None" = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be used, alone or together."""
        self._check_choices()
        self._check_numbers()
        self._check_combinations()
        pick_format(Path(self.out or STDIN), self.file_format)

    def _check_choices(self) -> None:
        if self.decode not in get_args(Decode):
            raise UnknownNameError("way to decode", self.decode, get_args(Decode))
        if self.order not in get_args(Order):
            raise UnknownNameError("order", self.order, get_args(Order))
        if self.channel_order not in get_args(ChannelOrder):
            known = get_args(ChannelOrder)
            raise UnknownNameError("channel order", self.channel_order, known)

    def _check_numbers(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"a batch holds at least one image, got {self.batch_size}")
        if self.seed < 0:
            raise UserError(f"seeds are 0 or more, got {self.seed}")
        if self.top_k < 1:
            raise UserError(f"top_k is at least 1, got {self.top_k}")
        if self.workers is not None and self.workers < 0:
            raise UserError(f"workers is 0 or more, got {self.workers}")
        number, count = self.shard
        if not 1 <= number <= count:
            raise UserError(
                f"a shard is i/n with i from 1 to n, such as 2/8, got {number}/{count}"
            )

    def _check_combinations(self) -> None:
        if self.multi_label is not None and (self.reject is not None or self.calibrate):
            raise UserError(
                "several labels per image have sigmoid probabilities, which --reject and "
                "--calibrate do not read: leave out --multi-label or those"
            )
        if self.multi_label is not None and self.labels is not None:
            raise UserError(
                "--labels has one class per image, --multi-label predicts several: leave out one"
            )
        if self.group_by is not None and self.shard[1] > 1:
            raise UserError(
                "a shard would cut groups apart: leave out --shard or --group-by"
            )
        if self.decode == "gpu" and self.cluster is not None:
            raise UserError(
                "Ray's tasks decode on CPUs: leave out --ray, or --decode gpu"
            )
        needs_file = self.group_by is not None or self.cluster is not None
        if needs_file and not self.writes_file:
            raise UserError(
                "groups and clusters write a file: give an output file (--out)"
            )

    @property
    def writes_file(self) -> bool:
        """Whether rows go to a file or URL, and a run that is stopped can continue."""
        return self.out is not None and str(self.out) != STDIN

    @property
    def target(self) -> Path | str | None:
        """The output file of this shard; ``None`` if rows go to no file."""
        if not self.writes_file:
            return None
        assert self.out is not None
        return shard_path(self.out, self.shard)

    @property
    def state_path(self) -> Path | None:
        """The state as a path."""
        return None if self.state is None else Path(self.state)

    @property
    def calibration(self) -> bool:
        """Whether probabilities are calibrated; those of several labels never are."""
        return self.calibrate and self.multi_label is None

    @property
    def label_source(self) -> str | None:
        """``folder`` or the column that states labels; ``None`` if they are given by themselves."""
        return self.labels if isinstance(self.labels, str) else None

    @property
    def write_table(self) -> WriteTable:
        """The writer of the output's format."""
        return pick_format(Path(self.out or STDIN), self.file_format)


def shard_path(out: Path | str, shard: tuple[int, int]) -> Path | str:
    """Return the output file of one shard, ``predictions.2-of-8.csv``; a URL stays one."""
    number, count = shard
    if count == 1:
        return out if is_url(out) else Path(out)
    folder = ""
    name = str(out)
    if is_url(out):
        folder, slash, name = name.rpartition("/")
        folder += slash
    path = Path(name)
    path = path.with_name(f"{path.stem}.{number}-of-{count}{path.suffix}")
    return f"{folder}{path}" if is_url(out) else path
