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
from cliquetta.methods.registry import get_method, method_config

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
    """``base`` with every value of ``batch_size`` or a field of its config, strings converted."""
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
    return Ablation(
        field,
        _value(base, field),
        tuple(
            (v, tuple(replace(spec, seed=s) for s in seeds))
            for v, spec in cells.items()
        ),
        tuple(replace(zero_shot(base), seed=seed) for seed in seeds),
    )


def _value(spec: RunSpec, field: str) -> Any:
    if field == BATCH_SIZE:
        return spec.batch_size
    return getattr(method_config(spec.method, spec.preset, dict(spec.options)), field)


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
        """The curve as JSON types."""
        points = []
        for point in self.points:
            scores = {
                "top1": point.mean,
                "sd": point.sd,
                "gain": point.gain,
                "nll": point.nll,
            }
            seeds, ids = [r.seed for r in point.records], [r.id for r in point.records]
            points.append(
                {"value": point.value, **scores, "seeds": seeds, "records": ids}
            )
        about = {
            "field": self.field,
            "default": self.default,
            "zero_shot": self.baseline,
        }
        return about | {"points": points}


def curve(ablation: Ablation, results: Sequence[RunResult]) -> Curve:
    """Make the curve from the results of an ablation's runs."""
    records = {
        r.spec: r.record for r in results if r.record and "top1" in r.record.metrics
    }
    plain = {spec.seed: records[spec] for spec in ablation.baselines if spec in records}
    points = []
    for value, specs in ablation.cells:
        own = [records[spec] for spec in specs if spec in records]
        gains = [
            r.metrics["top1"] - plain[r.seed].metrics["top1"]
            for r in own
            if r.seed in plain
        ]
        points.append(Point(value, tuple(own), average(gains)))
    baseline = average(record.metrics["top1"] for record in plain.values())
    return Curve(ablation.field, ablation.default, tuple(points), baseline)
