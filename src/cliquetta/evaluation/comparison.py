"""Runs side by side: a row per method, a column per dataset, nothing unlike in one column."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.metric_table import METRICS
from cliquetta.evaluation.predictions import paired_test
from cliquetta.evaluation.record import Record, Run
from cliquetta.methods.building.registry import get_method, method_config
from cliquetta.methods.building.state import plain_config
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
    tail: float | None
    """mean over the worst tenth of the seeds; ``None`` below :data:`DRAWS`"""
    gains: Mapping[int, float]
    """of the metric over the baseline, by every seed that both have"""
    test: PairedTest | None
    """of predictions against the baseline's; ``None`` for itself"""
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
        record = self.runs[0].record
        counted = "repaired" in record.metrics
        if self.metric != "top1" or len(self.runs) > 1 or not counted:
            return None
        return share_half_width(
            record.metrics["repaired"], record.metrics["broken"], record.images
        )

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
    asked: int
    """columns that were asked for; a row that lacks some is not ranked among others"""
    mean: float | None
    sd: float | None  # of the mean over datasets, from seed to seed
    tail: float | None  # mean over datasets of :attr:`Cell.tail`
    gain: float | None
    half_width: float | None
    """of the gain's 95 % interval over datasets; ``None`` as ``p``"""
    worst: tuple[float, str] | None  # the least favourable gain, and on which dataset
    p: float | None
    """of the gains, paired by dataset; ``None`` below :data:`ENOUGH` of them"""
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
        if self.complete:
            return str(self.asked)
        return f"{len(self.columns)} of {self.asked}"


@dataclass(frozen=True)
class Comparison:
    """A table of cells: the baseline first, then rows by name; columns as they were given."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]  # by row and column
    metric: str
    baseline: str

    def overall(self, row: str, columns: Sequence[str] | None = None) -> Overall:
        """Summarise a row over all columns, or some, as far as it has them."""
        wanted = self.columns if columns is None else columns
        cells = [
            self.cells[row, column] for column in wanted if (row, column) in self.cells
        ]
        by_column = {cell.column: cell.gain for cell in cells if cell.gain is not None}
        gains = list(by_column.values())
        enough = len(gains) >= ENOUGH
        sign = -1 if METRICS[self.metric].lower_is_better else 1
        worst = min(
            by_column, key=lambda column: sign * by_column[column], default=None
        )

        records = [run.record for cell in cells for run in cell.runs]
        means = self._means_by_seed(records, len(cells))
        return Overall(
            row=row,
            columns=tuple(cell.column for cell in cells),
            asked=len(wanted),
            mean=average(cell.mean for cell in cells),
            sd=_deviation(means),
            tail=average(cell.tail for cell in cells),
            gain=average(gains),
            half_width=mean_half_width(gains) if enough else None,
            worst=None if worst is None else (by_column[worst], worst),
            p=sign_flip_p(gains) if enough else None,
            ece=average(cell.ece for cell in cells),
            cost=average((cell.cost for cell in cells), statistics.median),
            images=round(average(record.images for record in records) or 0),
        )

    def _means_by_seed(self, records: Sequence[Record], datasets: int) -> list[float]:
        """Average over datasets, for every seed that all of them were run with."""
        scored = [record for record in records if self.metric in record.metrics]
        means = []
        for of_seed in grouped(scored, lambda record: record.seed).values():
            if len(of_seed) == datasets:
                values = [record.metrics[self.metric] for record in of_seed]
                means.append(statistics.mean(values))
        return means

    def best(self, column: str) -> str | None:
        """Return the row with the best mean of a column; ``None`` where there is no choice."""
        means = {}
        for (row, of), cell in self.cells.items():
            if of == column and cell.mean is not None:
                means[row] = cell.mean
        if len(means) < 2:
            return None
        choose = min if METRICS[self.metric].lower_is_better else max
        return choose(means, key=lambda row: means[row])

    @property
    def marks(self) -> str:
        """The marks in use."""
        used = "".join(cell.marks for cell in self.cells.values())
        return "".join(mark for mark in MARKS if mark in used)


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
        raise UnknownNameError("metric", metric, list(METRICS))

    columns = _columns(runs, split=split)
    labels = _row_labels(runs)
    # The baseline leads; the others keep the order in which they were given.
    ordered = sorted(labels, key=lambda key: labels[key].split()[0] != baseline)
    cells: dict[tuple[str, str], Cell] = {}
    for column, members in columns.items():
        by_row = grouped(members, lambda run: run.row)
        for key in ordered:
            if key in by_row:
                label = labels[key]
                cells[label, column] = _cell(
                    column,
                    label,
                    tuple(by_row[key]),
                    members,
                    baseline=baseline,
                    metric=metric,
                )
    return Comparison(
        rows=tuple(labels[key] for key in ordered),
        columns=tuple(columns),
        cells=cells,
        metric=metric,
        baseline=baseline,
    )


def _columns(runs: Sequence[Run], *, split: bool) -> dict[str, list[Run]]:
    """Group runs by dataset; groups that cannot be compared apart, or refused."""
    columns: dict[str, list[Run]] = {}
    for dataset, all_runs in grouped(runs, lambda run: run.record.dataset).items():
        by_protocol = grouped(
            all_runs, lambda run: json.dumps(run.protocol, sort_keys=True)
        )
        groups = list(by_protocol.values())
        if len(groups) == 1:
            columns[dataset] = groups[0]
            continue
        if not split:
            raise IncomparableError(_why(dataset, [members[0] for members in groups]))
        for number, members in enumerate(groups, start=1):
            columns[f"{dataset} #{number}"] = members
    return columns


def _why(dataset: str, firsts: Sequence[Run]) -> str:
    """Say in one sentence why two runs cannot be compared, with an example of each side."""
    one = firsts[0]
    another = firsts[1]
    aspects = []
    differing = []
    for aspect, value in one.protocol.items():
        if len({run.protocol[aspect] for run in firsts}) > 1:
            aspects.append(aspect)
            if another.protocol[aspect] != value:
                differing.append(aspect)

    # What differs between the two that are shown, if anything does.
    examples = []
    for aspect in differing or aspects:
        here = f"{one.protocol[aspect]} in {one.record.id}"
        there = f"{another.protocol[aspect]} in {another.record.id}"
        examples.append(f"{aspect}: {here}, {there}")
    details = "; ".join(examples)
    return (
        f"runs on {dataset} with different {' and '.join(aspects)} do not belong in one column "
        f"({details}): run them alike, compare them apart, or give each its own column with --split"
    )


def _row_labels(runs: Sequence[Run]) -> dict[str, str]:
    """Label every row: method, preset, options that differ from it, unlike conditions."""
    first = {key: alike[0] for key, alike in grouped(runs, lambda run: run.row).items()}
    conditions = varying([run.conditions for run in first.values()])
    if "model" in conditions and "weights" in conditions:
        conditions.remove("weights")  # other models have other weights
    # Rows of one method are told apart by what differs, not by all that they have.
    labels = {}
    for key, run in first.items():
        kin = [other.setting for other in first.values() if other.name == run.name]
        values = _unusual_options(run, kin)
        for name in conditions:
            if name in run.conditions:
                values[name] = run.conditions[name]
        words = [f"{name}={value_text(value, '+')}" for name, value in values.items()]
        labels[key] = " ".join([run.name, *words])
    return labels


def _unusual_options(run: Run, kin: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return options that differ from the preset's, and others in which kin differ."""
    usual = _usual(run)
    values = {}
    for name, value in run.setting.items():
        if name in usual and value != usual[name]:
            values[name] = value
    for name in varying(kin):
        if name not in usual:
            values[name] = run.setting.get(name)
    return values


def _usual(run: Run) -> dict[str, Any]:
    """Return the config of a run's preset; nothing of one that is not known here."""
    try:
        config = method_config(run.record.method, run.record.preset)
    except UnknownNameError:
        return {}
    return dict(json.loads(json.dumps(plain_config(config))))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """List the items with equal keys together, in the order of their first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name what settings hold more than one value of."""
    names = dict.fromkeys(name for setting in settings for name in setting)
    found = []
    for name in names:
        values = {json.dumps(each.get(name), default=str) for each in settings}
        if len(values) > 1:
            found.append(name)
    return found


def value_text(value: Any, joint: str = ",") -> str:
    """Write a value of a setting."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return joint.join(map(str, value))
    return str(value)


def _pairs(
    runs: Sequence[Run], column: Sequence[Run], baseline: str
) -> list[tuple[Run, Run]]:
    """Pair ``(baseline run, run)`` for every seed that both have, on the same weights."""
    plain = grouped(
        [other for other in column if other.name == baseline], _seed_and_weights
    )
    pairs = []
    for run in runs:
        partners = plain.get(_seed_and_weights(run), [])
        # Batch size and order may differ: use the closest conditions.
        alike = [other for other in partners if other.conditions == run.conditions]
        for partner in (alike or partners)[:1]:
            pairs.append((partner, run))
    return pairs


def _seed_and_weights(run: Run) -> str:
    return json.dumps([run.record.seed, run.record.settings["model"]], sort_keys=True)


def _marks(run: Run, column: Sequence[Run]) -> str:
    """Return the signs of a cell: tuned by the authors, or scored with several settings."""
    marks = ""
    method = run.record.method
    with suppress(UnknownNameError):  # of a plug-in that is not installed here
        if run.record.preset in get_method(method).tuned_by_authors:
            marks += TUNED_BY_AUTHORS
    settings = [other.setting for other in column if other.record.method == method]
    if varying(settings):
        marks += SEVERAL_SETTINGS
    return marks


def _cell(
    column: str,
    row: str,
    runs: tuple[Run, ...],
    members: Sequence[Run],
    *,
    baseline: str,
    metric: str,
) -> Cell:
    """Score some runs of a row among the ``members`` of their column."""
    scores = [run.record.metrics.get(metric) for run in runs]
    values = [score for score in scores if score is not None]
    pairs = [] if runs[0].name == baseline else _pairs(runs, members, baseline)
    gains = {}
    for before, run in pairs:
        score = run.record.metrics.get(metric)
        score_before = before.record.metrics.get(metric)
        if score is not None and score_before is not None:
            gains[run.record.seed] = score - score_before

    # Packed records are without predictions, which the test compares.
    test = None
    if gains and all(run.folder is not None for pair in pairs for run in pair):
        predictions = [(before.predictions, run.predictions) for before, run in pairs]
        test = paired_test(predictions)
    return Cell(
        column=column,
        row=row,
        runs=runs,
        metric=metric,
        mean=average(values),
        sd=_deviation(values),
        tail=worst_tenth(values, lowest=not METRICS[metric].lower_is_better),
        gains=gains,
        test=test,
        marks=_marks(runs[0], members),
        cost=_cost(_pairs(runs, members, BASELINE)),
    )


def _deviation(values: Sequence[float]) -> float | None:
    """Compute the standard deviation; ``None`` of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def worst_tenth(values: Sequence[float], *, lowest: bool = True) -> float | None:
    """Average the worst tenth, rounded up, of :data:`DRAWS` values or more."""
    if len(values) < DRAWS:
        return None
    worst_first = sorted(values, reverse=not lowest)
    tenth = math.ceil(len(values) / 10)
    return statistics.mean(worst_first[:tenth])


def _cost(pairs: Sequence[tuple[Run, Run]]) -> float | None:
    """Take the median over ``(zero-shot, run)`` of how much longer an image took on one device.

    Runs from features that were encoded earlier tell nothing of what an image costs.
    """
    ratios = []
    for plain, run in pairs:
        environments = [plain.record.environment, run.record.environment]
        devices = {environment.get("device_name") for environment in environments}
        from_features = any(
            environment.get("features") == "kept" for environment in environments
        )
        if len(devices) > 1 or from_features:
            continue
        plain_rate = plain.record.throughput["images_per_second"]
        rate = run.record.throughput["images_per_second"]
        if plain_rate and rate:
            ratios.append(plain_rate / rate)
    return average(ratios, statistics.median)


def average(
    values: Iterable[float | None],
    how: Callable[[list[float]], float] = statistics.mean,
) -> float | None:
    """Average the values that are known."""
    numbers = [value for value in values if value is not None]
    return how(numbers) if numbers else None
