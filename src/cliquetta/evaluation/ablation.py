"""Ablations: one field of a config varied, everything else equal, and its curve."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.comparison import average
from cliquetta.evaluation.grid import RunSpec, with_options, zero_shot
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.sweep import RunResult
from cliquetta.methods.building.registry import get_method, method_config

# the one field of a run, not of a method's config, that can be varied
BATCH_SIZE = "batch_size"


@dataclass(frozen=True)
class Ablation:
    """The runs of a curve: for every value of the field one spec per seed, and zero-shot."""

    field: str
    default: Any  # what the method takes if the field is left alone
    cells: tuple[tuple[Any, tuple[RunSpec, ...]], ...]
    baselines: tuple[RunSpec, ...]

    @property
    def specs(self) -> list[RunSpec]:
        """All runs."""
        return [*self.baselines, *(spec for _, specs in self.cells for spec in specs)]


def ablation(
    base: RunSpec, field: str, values: Sequence[Any], seeds: Sequence[int] = (0,)
) -> Ablation:
    """Vary ``batch_size`` or a field of the config of ``base``, strings converted."""
    fields = [f.name for f in dataclasses.fields(get_method(base.method).config)]
    if field not in fields and field != BATCH_SIZE:
        raise UnknownNameError(f"option of {base.method}", field, [*fields, BATCH_SIZE])
    if not values:
        raise UserError(f"no values of {field} given")
    cells: dict[Any, RunSpec] = {}
    for value in values:
        if field != BATCH_SIZE:
            spec = with_options(base, {**dict(base.options), field: value})
        elif str(value).strip().isdecimal() and int(value) > 0:
            spec = replace(base, batch_size=int(value))
        else:
            raise UserError(
                f"batch_size is a whole number of at least 1, got {value!r}"
            )
        cells[_value(spec, field)] = spec

    by_value = []
    for value, spec in cells.items():
        by_value.append((value, tuple(replace(spec, seed=seed) for seed in seeds)))
    return Ablation(
        field=field,
        default=_value(base, field),
        cells=tuple(by_value),
        baselines=tuple(replace(zero_shot(base), seed=seed) for seed in seeds),
    )


def _value(spec: RunSpec, field: str) -> Any:
    """Return what a cell has for the field that is varied."""
    if field == BATCH_SIZE:
        return spec.batch_size
    config = method_config(spec.method, spec.preset, dict(spec.options))
    return getattr(config, field)


@dataclass(frozen=True)
class Point:
    """The runs at one value of a setting, one per seed; none where every run failed."""

    value: Any
    records: tuple[Record, ...]
    gain: float | None = None  # over zero-shot with the same seeds, in points
    clique_size: float | None = None
    """mean over batches of the largest, where counts were logged"""

    @property
    def top1(self) -> list[float]:
        """Top-1 in percent of each run."""
        return [record.metrics["top1"] for record in self.records]

    @property
    def mean(self) -> float | None:
        """Mean of :attr:`top1`."""
        return average(self.top1)

    @property
    def sd(self) -> float | None:
        """Standard deviation of :attr:`top1` where there are several."""
        return statistics.stdev(self.top1) if len(self.records) > 1 else None

    @property
    def nll(self) -> float | None:
        """Negative log-likelihood over seeds: moves where no prediction changes."""
        return average(record.metrics["nll"] for record in self.records)


@dataclass(frozen=True)
class Curve:
    """Accuracy by the value of a setting, everything else equal."""

    field: str
    default: Any
    points: tuple[Point, ...]
    baseline: float | None  # top-1 of zero-shot on the same images

    def plain(self) -> dict[str, Any]:
        """Return the curve as JSON types."""
        points = []
        for point in self.points:
            plain = {
                "value": point.value,
                "top1": point.mean,
                "sd": point.sd,
                "gain": point.gain,
                "nll": point.nll,
                "seeds": [record.seed for record in point.records],
                "records": [record.id for record in point.records],
            }
            points.append(plain)
        return {
            "field": self.field,
            "default": self.default,
            "zero_shot": self.baseline,
            "points": points,
        }


def curve(ablation: Ablation, results: Sequence[RunResult]) -> Curve:
    """Make the curve from the results of an ablation's runs."""
    # A run that failed, or that has no labels, has no accuracy.
    scored = {}
    for result in results:
        if result.record and "top1" in result.record.metrics:
            scored[result.spec] = result.record
    zero_shot_top1 = {}
    for spec in ablation.baselines:
        if spec in scored:
            zero_shot_top1[spec.seed] = scored[spec].metrics["top1"]

    points = []
    for value, specs in ablation.cells:
        records = tuple(scored[spec] for spec in specs if spec in scored)
        gains = []
        for record in records:
            if record.seed in zero_shot_top1:
                gains.append(record.metrics["top1"] - zero_shot_top1[record.seed])
        points.append(Point(value, records, gain=average(gains)))
    return Curve(
        field=ablation.field,
        default=ablation.default,
        points=tuple(points),
        baseline=average(zero_shot_top1.values()),
    )
