"""Runs side by side: a row per method, a column per dataset, nothing unlike in one column."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.predictions import paired_test
from cliquetta.evaluation.record import Run
from cliquetta.methods.registry import get_method, method_config
from cliquetta.methods.state import plain_config
from cliquetta.significance import (
    PairedTest,
    mean_half_width,
    share_half_width,
    sign_flip_p,
)

Item = TypeVar("Item")
Key = TypeVar("Key")
# datasets from which on gains are tested: seeds share images, so are not independent
ENOUGH = 6
METRICS = ("top1", "top5", "mean_class", "macro_f1", "ece", "nll", "auroc", "fpr95")
LOWER_IS_BETTER = frozenset({"ece", "nll", "fpr95"})
DRAWS = 10  # seeds from which on the mean over the worst tenth of them is shown
TUNED_BY_AUTHORS = "*"
SEVERAL_SETTINGS = "‡"
MARKS = {
    TUNED_BY_AUTHORS: "constants that the method's authors set for this dataset",
    SEVERAL_SETTINGS: (
        "one of several settings of its method scored on these labels: to quote the best of them "
        "is to tune on test labels"
    ),
}


class IncomparableError(UserError):
    """Runs that do not belong in one column; the message says which and why."""


@dataclass(frozen=True)
class Cell:
    """One method on one dataset, over its seeds."""

    column: str
    row: str
    runs: tuple[Run, ...]
    metric: str
    mean: float | None  # ``None`` where no image has a label
    sd: float | None  # over seeds; ``None`` for one
    tail: (
        float | None
    )  # mean over the worst tenth of the seeds; ``None`` below :data:`DRAWS`
    gains: Mapping[
        int, float
    ]  # of the metric over the baseline, by every seed that both have
    test: (
        PairedTest | None
    )  # of predictions against the baseline's; ``None`` for itself
    marks: str
    cost: float | None  # time per image as a multiple of zero-shot's in the same column

    @property
    def gain(self) -> float | None:
        """Mean of the gains."""
        return average(self.gains.values())

    @property
    def half_width(self) -> float | None:
        """Half-width of the 95 % interval of the gain, in points; ``None`` where it is unknown.

        Of predictions, or of what the record of a single run says of them.
        """
        if self.test is not None:
            return self.test.half_width
        metrics = self.runs[0].record.metrics
        if self.metric != "top1" or len(self.runs) > 1 or "repaired" not in metrics:
            return None
        images = self.runs[0].record.images
        return share_half_width(metrics["repaired"], metrics["broken"], images)

    @property
    def ece(self) -> float | None:
        """Calibration error in percent, over seeds."""
        return average(run.record.metrics.get("ece") for run in self.runs)

    @property
    def better(self) -> str:
        """▲ or ▼ where predictions differ from the baseline's beyond chance (p < 0.05)."""
        if self.test is None or self.test.p >= 0.05:
            return ""
        return "▲" if self.test.repaired > self.test.broken else "▼"


@dataclass(frozen=True)
class Overall:
    """One method over all datasets of a comparison that it was run on; each counts once."""

    row: str
    columns: tuple[str, ...]
    # columns that were asked for; a row that lacks some is not ranked among others
    asked: int
    mean: float | None
    sd: float | None  # of the mean over datasets, from seed to seed
    tail: float | None  # mean over datasets of :attr:`Cell.tail`
    gain: float | None
    gain_sd: float | None  # from dataset to dataset
    half_width: (
        float | None
    )  # of the gain's 95 % interval over datasets; ``None`` as ``p``
    worst: tuple[float, str] | None  # the least favourable gain, and on which dataset
    p: (
        float | None
    )  # of the gains, paired by dataset; ``None`` below :data:`ENOUGH` of them
    ece: float | None
    cost: float | None  # median over datasets
    images: int  # per dataset, on average

    @property
    def complete(self) -> bool:
        """Whether the row has all datasets, so that its means may be ranked among others."""
        return len(self.columns) == self.asked

    @property
    def datasets(self) -> str:
        """On how many datasets the row's means are."""
        return (
            str(self.asked) if self.complete else f"{len(self.columns)} of {self.asked}"
        )


@dataclass(frozen=True)
class Comparison:
    """A table of cells: the baseline first, then rows by name; columns as they were given."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]  # by row and column
    metric: str
    baseline: str

    def overall(self, row: str, columns: Sequence[str] | None = None) -> Overall:
        """A row over all columns, or some, as far as it has them."""
        wanted = self.columns if columns is None else columns
        cells = [
            self.cells[row, column] for column in wanted if (row, column) in self.cells
        ]
        gains = {cell.column: cell.gain for cell in cells if cell.gain is not None}
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        worst = min(gains, key=lambda column: sign * gains[column], default=None)
        records = [run.record for cell in cells for run in cell.runs]
        scored = [
            (r.seed, r.metrics[self.metric])
            for r in records
            if self.metric in r.metrics
        ]
        by_seed = grouped(scored, lambda pair: pair[0]).values()
        seeds = [
            statistics.mean(v for _, v in own)
            for own in by_seed
            if len(own) == len(cells)
        ]
        enough = len(gains) >= ENOUGH
        return Overall(
            row=row,
            columns=tuple(cell.column for cell in cells),
            asked=len(wanted),
            mean=average(cell.mean for cell in cells),
            sd=statistics.stdev(seeds) if len(seeds) > 1 else None,
            tail=average(cell.tail for cell in cells),
            gain=average(gains.values()),
            gain_sd=statistics.stdev(gains.values()) if len(gains) > 1 else None,
            half_width=mean_half_width(list(gains.values())) if enough else None,
            worst=None if worst is None else (gains[worst], worst),
            p=sign_flip_p(list(gains.values())) if enough else None,
            ece=average(cell.ece for cell in cells),
            cost=average((cell.cost for cell in cells), statistics.median),
            images=round(average(record.images for record in records) or 0),
        )

    def best(self, column: str) -> str | None:
        """Return the row with the best mean of a column; ``None`` where there is no choice."""
        means = {
            row: cell.mean for (row, of), cell in self.cells.items() if of == column
        }
        known = {row: mean for row, mean in means.items() if mean is not None}
        if len(known) < 2:
            return None
        return (min if self.metric in LOWER_IS_BETTER else max)(
            known, key=lambda row: known[row]
        )

    @property
    def marks(self) -> str:
        """The marks in use."""
        return "".join(
            m for m in MARKS if any(m in cell.marks for cell in self.cells.values())
        )


def compare(
    runs: Sequence[Run],
    *,
    baseline: str = "zero_shot",
    metric: str = "top1",
    split: bool = False,
) -> Comparison:
    """Put runs into a table; runs of one dataset under unlike conditions raise.

    What must be equal in a column: preprocessing, class names, templates and the
    images. ``split`` gives every such group a column of its own instead. ``baseline``
    is a method (with its preset) that the others are tested against, seed by seed, on
    the same model.
    """
    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    columns = _columns(runs, split=split)
    labels = _row_labels(runs)
    # The baseline leads; the others keep the order in which they were given.
    ordered = sorted(labels, key=lambda key: labels[key].split()[0] != baseline)
    cells: dict[tuple[str, str], Cell] = {}
    for column, members in columns.items():
        by_row = grouped(members, lambda run: run.row)
        for key in (key for key in ordered if key in by_row):
            cell = _cell(
                column, labels[key], tuple(by_row[key]), members, baseline, metric
            )
            cells[labels[key], column] = cell
    names = tuple(labels[key] for key in ordered)
    return Comparison(names, tuple(columns), cells, metric, baseline)


def _columns(runs: Sequence[Run], *, split: bool) -> dict[str, list[Run]]:
    """Runs by dataset; groups that cannot be compared apart, or refused."""
    columns: dict[str, list[Run]] = {}
    for dataset, all_runs in grouped(runs, lambda run: run.record.dataset).items():
        alike = grouped(all_runs, lambda run: json.dumps(run.protocol, sort_keys=True))
        if len(alike) > 1 and not split:
            raise IncomparableError(
                _why(dataset, [members[0] for members in alike.values()])
            )
        for number, members in enumerate(alike.values(), start=1):
            columns[dataset if len(alike) == 1 else f"{dataset} #{number}"] = members
    return columns


def _why(dataset: str, firsts: Sequence[Run]) -> str:
    """In one sentence what keeps runs apart, with an example of each side."""
    first, other = firsts[0].protocol, firsts[1].protocol
    aspects = [
        aspect for aspect in first if len({run.protocol[aspect] for run in firsts}) > 1
    ]
    one, another = firsts[0].record.id, firsts[1].record.id
    details = "; ".join(
        f"{aspect}: {first[aspect]} in {one}, {other[aspect]} in {another}"
        for aspect in [a for a in aspects if first[a] != other[a]] or aspects
    )
    return (
        f"runs on {dataset} with different {' and '.join(aspects)} do not belong in one column "
        f"({details}): run them alike, compare them apart, or give each its own column with --split"
    )


def _row_labels(runs: Sequence[Run]) -> dict[str, str]:
    """A label for every row: method and preset, options that differ from it, unlike conditions."""
    first = {key: alike[0] for key, alike in grouped(runs, lambda run: run.row).items()}
    conditions = varying([run.conditions for run in first.values()])
    if "model" in conditions or "weights" not in conditions:
        conditions = [name for name in conditions if name != "weights"]
    labels = {}
    for key, run in first.items():
        kin = [other.setting for other in first.values() if other.name == run.name]
        usual = _usual(run)
        values = {n: v for n, v in run.setting.items() if n in usual and v != usual[n]}
        values |= {n: run.setting.get(n) for n in varying(kin) if n not in usual}
        values |= {
            name: run.conditions[name] for name in conditions if name in run.conditions
        }
        shown = [f"{name}={value_text(value, '+')}" for name, value in values.items()]
        labels[key] = " ".join([run.name, *shown])
    return labels


def _usual(run: Run) -> dict[str, Any]:
    """The config of a run's preset, or nothing where the method or preset is not known here."""
    try:
        config = method_config(run.record.method, run.record.preset)
    except UnknownNameError:
        return {}
    return dict(json.loads(json.dumps(plain_config(config))))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Lists of the items with equal keys, in the order of their first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names under which settings hold more than one value."""
    names = dict.fromkeys(name for setting in settings for name in setting)
    return [
        n
        for n in names
        if len({json.dumps(s.get(n), default=str) for s in settings}) > 1
    ]


def value_text(value: Any, joint: str = ",") -> str:
    """A value of a setting as it is shown."""
    if isinstance(value, float):
        return f"{value:g}"
    return (
        joint.join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    )


def _pairs(
    own: Sequence[Run], column: Sequence[Run], baseline: str
) -> list[tuple[Run, Run]]:
    """``(baseline run, run)`` for every seed that both have, on the same weights."""
    plain = [other for other in column if other.name == baseline]
    pairs = []
    for run in own:
        wanted = (run.record.seed, run.record.settings["model"])
        partners = [
            p for p in plain if (p.record.seed, p.record.settings["model"]) == wanted
        ]
        if partners:  # batch size and order may differ: use the closest conditions
            alike = [
                partner for partner in partners if partner.conditions == run.conditions
            ]
            pairs.append(((alike or partners)[0], run))
    return pairs


def _marks(run: Run, column: Sequence[Run]) -> str:
    marks = ""
    with suppress(UnknownNameError):  # of a plug-in that is not installed here
        if run.record.preset in get_method(run.record.method).tuned_by_authors:
            marks += TUNED_BY_AUTHORS
    own = [
        other.setting for other in column if other.record.method == run.record.method
    ]
    return marks + (SEVERAL_SETTINGS if varying(own) else "")


def _cell(
    column: str,
    row: str,
    own: tuple[Run, ...],
    members: Sequence[Run],
    baseline: str,
    metric: str,
) -> Cell:
    """The cell of the runs ``own`` among the ``members`` of their column."""
    pairs = [] if own[0].name == baseline else _pairs(own, members, baseline)
    values = [run.record.metrics[metric] for run in own if metric in run.record.metrics]
    gains = {
        run.record.seed: run.record.metrics[metric] - before.record.metrics[metric]
        for before, run in pairs
        if metric in run.record.metrics and metric in before.record.metrics
    }
    test = None
    if gains and all(run.folder is not None for pair in pairs for run in pair):
        test = paired_test(
            [(before.predictions, run.predictions) for before, run in pairs]
        )
    return Cell(
        column,
        row,
        own,
        metric,
        mean=average(values),
        sd=statistics.stdev(values) if len(values) > 1 else None,
        tail=worst_tenth(values, lowest=metric not in LOWER_IS_BETTER),
        gains=gains,
        test=test,
        marks=_marks(own[0], members),
        cost=_cost(_pairs(own, members, BASELINE)),
    )


def worst_tenth(values: Sequence[float], *, lowest: bool = True) -> float | None:
    """Mean over the worst tenth, rounded up, of :data:`DRAWS` values or more."""
    if len(values) < DRAWS:
        return None
    return statistics.mean(sorted(values, reverse=not lowest)[: -(-len(values) // 10)])


def _cost(pairs: Sequence[tuple[Run, Run]]) -> float | None:
    """Median over ``(zero-shot, run)`` of how much longer an image took on the same device.

    Runs from features that were encoded earlier tell nothing of what an image costs.
    """
    rates = []
    for pair in pairs:
        about = [run.record.environment for run in pair]
        alike = about[0].get("device_name") == about[1].get("device_name")
        if alike and all(one.get("features") != "kept" for one in about):
            rates.append([run.record.throughput["images_per_second"] for run in pair])
    return average(
        (plain / own for plain, own in rates if plain and own), statistics.median
    )


def average(
    values: Iterable[float | None],
    how: Callable[[list[float]], float] = statistics.mean,
) -> float | None:
    """Mean, or another average, of the values that are known."""
    known = [value for value in values if value is not None]
    return how(known) if known else None
