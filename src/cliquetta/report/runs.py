"""The runs that a report is made of, with what belongs together among them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cliquetta.data.catalogue import get_dataset
from cliquetta.errors import UserError
from cliquetta.evaluation.comparison import grouped, varying
from cliquetta.evaluation.evidence_log import Evidence, load_evidence
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record, Run, digest, find_runs

_SHOWN = 8  # runs of a dataset in its figures; the table has the rest


@dataclass(frozen=True, eq=False)
class ReportedRun(Run):
    """A finished run, with its evidence where it was asked for."""

    evidence: Evidence | None
    names: tuple[str, ...]  # class names; ``class 7`` where they are unknown

    @property
    def id(self) -> str:
        """The id of the record."""
        return self.record.id

    @property
    def plain(self) -> bool:
        """Whether it is zero-shot."""
        return self.record.method == BASELINE

    @property
    def labelled(self) -> bool:
        """Whether the predictions can be scored."""
        return bool((self.predictions.labels >= 0).any())

    def metric(self, name: str) -> float | None:
        """A score, in percent where it is a share."""
        value = self.record.metrics.get(name)
        return None if value is None else float(value)

    def class_name(self, label: int) -> str:
        """A class in words."""
        return self.names[label] if 0 <= label < len(self.names) else "unknown"


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs over the same images in the same order, zero-shot first."""

    dataset: str
    runs: tuple[ReportedRun, ...]

    @property
    def baseline(self) -> ReportedRun | None:
        """The zero-shot run, if there is one."""
        return next((run for run in self.runs if run.plain), None)

    @property
    def adapted(self) -> tuple[ReportedRun, ...]:
        """The runs that are not zero-shot."""
        return tuple(run for run in self.runs if not run.plain)

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """Labels by id: method and preset, and whatever else differs between runs of one label."""
        labels = {}
        for name, members in grouped(self.runs, lambda run: run.name).items():
            settings = [flat_settings(run) for run in members]
            keys = varying(settings)
            for run, own in zip(members, settings, strict=True):
                extra = ", ".join(f"{key} {own.get(key)}" for key in keys)
                labels[run.id] = f"{name} ({extra})" if extra else name
        return labels


def load_runs(
    paths: Sequence[Path | str], root: Path | str | None = None
) -> tuple[list[ReportedRun], list[Run]]:
    """The finished and the unfinished runs in run folders, folders of runs or record files.

    ``root`` is the root directory of datasets; only class names are read from them, and
    only for runs without any.
    """
    finished, unfinished = find_runs(paths)
    if not finished:
        raise UserError(
            "no finished run to report on: "
            f"{len(unfinished)} unfinished; give `cliquetta evaluate` again to continue them"
        )
    evidences = [
        None if run.folder is None else load_evidence(run.folder) for run in finished
    ]
    # One run that knows the names is enough for all with the same class list.
    known = {digest(list(e.names)): e.names for e in evidences if e is not None}
    reported = [
        ReportedRun(run.record, run.folder, evidence, _names(run.record, root, known))
        for run, evidence in zip(finished, evidences, strict=True)
    ]
    return reported, unfinished


def _names(
    record: Record, root: Path | str | None, known: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Class names of a run, looked up once per class list."""
    prompts = record.settings["prompts"]
    wanted = str(prompts["names"])
    if wanted not in known:
        try:
            names = get_dataset(
                record.settings["stream"]["datasets"][0]["id"], root
            ).names
        except (ValueError, KeyError, OSError, ImportError):  # it cannot be opened here
            names = ()
        numbered = tuple(f"class {label}" for label in range(prompts["classes"]))
        known[wanted] = names if digest(list(names)) == wanted else numbered
    return known[wanted]


def group_runs(runs: Sequence[ReportedRun]) -> list[RunGroup]:
    """Runs by dataset and by the images they saw, in the order given."""
    groups = grouped(runs, lambda run: (run.record.dataset, run.predictions.keys))
    return [
        RunGroup(dataset, tuple(sorted(members, key=lambda run: not run.plain)))
        for (dataset, _), members in groups.items()
    ]


def shown_groups(runs: Sequence[ReportedRun]) -> list[RunGroup]:
    """One group per dataset, with one run per method: what figures can show.

    Of several seeds the first; of several settings of a method the one that is closest
    to what most of its runs have.
    """
    first: dict[str, RunGroup] = {}
    for group in group_runs(runs):
        known = first.setdefault(group.dataset, group)
        if len({run.name for run in group.runs}) > len(
            {run.name for run in known.runs}
        ):
            first[group.dataset] = group
    return [
        RunGroup(group.dataset, _one_per_method(group.runs)) for group in first.values()
    ]


def _one_per_method(runs: Sequence[ReportedRun]) -> tuple[ReportedRun, ...]:
    chosen = []
    for members in grouped(runs, lambda run: run.name).values():
        settings = [flat_settings(run) for run in members]
        keys = [key for key in varying(settings) if key != "seed"]
        usual = {key: most_common([each.get(key) for each in settings]) for key in keys}
        fit = [
            sum(each.get(key) == value for key, value in usual.items())
            for each in settings
        ]
        chosen.append(members[fit.index(max(fit))])
    return tuple(chosen[:_SHOWN])


def most_common(values: Sequence[Any]) -> Any:
    """The value that most have; of equally many the first."""
    best = Counter(map(repr, values)).most_common(1)[0][0]
    return next(value for value in values if repr(value) == best)


def flat_settings(run: Run) -> dict[str, Any]:
    """Settings in which runs of one method may differ: config, conditions and seed."""
    return {**run.setting, **run.conditions, "seed": run.record.seed}
