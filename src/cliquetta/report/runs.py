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
        """Return A score, in percent where it is a share."""
        value = self.record.metrics.get(name)
        return None if value is None else float(value)

    def class_name(self, label: int) -> str:
        """Return A class in words."""
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
            # Runs of one label are told apart by the settings in which they differ.
            settings = {run.id: flat_settings(run) for run in members}
            keys = varying(list(settings.values()))
            for id, setting in settings.items():
                extra = ", ".join(f"{key} {setting.get(key)}" for key in keys)
                labels[id] = f"{name} ({extra})" if extra else name
        return labels


def load_runs(
    paths: Sequence[Path | str], root: Path | str | None = None
) -> tuple[list[ReportedRun], list[Run]]:
    """Load the finished and the unfinished runs of run folders, folders of runs or record files.

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
    class_lists = {}
    for evidence in evidences:
        if evidence is not None:
            class_lists[digest(list(evidence.names))] = evidence.names
    reported = []
    for run, evidence in zip(finished, evidences, strict=True):
        names = _class_names(run.record, root, class_lists)
        reported.append(ReportedRun(run.record, run.folder, evidence, names))
    return reported, unfinished


def _class_names(
    record: Record, root: Path | str | None, class_lists: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Look up the class names of a run, once per class list."""
    prompts = record.settings["prompts"]
    wanted = str(prompts["names"])
    if wanted not in class_lists:
        dataset = record.settings["stream"]["datasets"][0]["id"]
        try:
            names = get_dataset(dataset, root).names
        except (ValueError, KeyError, OSError, ImportError):  # it cannot be opened here
            names = ()
        # The dataset of this machine may have other classes than that of the run.
        if digest(list(names)) != wanted:
            names = tuple(f"class {label}" for label in range(prompts["classes"]))
        class_lists[wanted] = names
    return class_lists[wanted]


def group_runs(runs: Sequence[ReportedRun]) -> list[RunGroup]:
    """Group runs by dataset and by the images they saw, in the order given."""
    # Predictions name their images in the order of the stream.
    groups = grouped(runs, lambda run: (run.record.dataset, run.predictions.keys))
    found = []
    for (dataset, _), members in groups.items():
        zero_shot_first = sorted(members, key=lambda run: not run.plain)
        found.append(RunGroup(dataset, tuple(zero_shot_first)))
    return found


def shown_groups(runs: Sequence[ReportedRun]) -> list[RunGroup]:
    """Choose one group per dataset, with one run per method: what figures can show.

    Of several seeds the first; of several settings of a method the one that is closest
    to what most of its runs have.
    """
    # Of several streams over a dataset the one that most methods saw.
    by_dataset: dict[str, RunGroup] = {}
    for group in group_runs(runs):
        best = by_dataset.setdefault(group.dataset, group)
        if _methods(group) > _methods(best):
            by_dataset[group.dataset] = group
    groups = by_dataset.values()
    return [RunGroup(group.dataset, _one_per_method(group.runs)) for group in groups]


def _methods(group: RunGroup) -> int:
    return len({run.name for run in group.runs})


def _one_per_method(runs: Sequence[ReportedRun]) -> tuple[ReportedRun, ...]:
    """Choose of each method the run whose settings are the usual ones."""
    chosen = []
    for members in grouped(runs, lambda run: run.name).values():
        settings = [flat_settings(run) for run in members]
        keys = [key for key in varying(settings) if key != "seed"]

        # The run that agrees with the others in most settings stands for its method.
        usual = {key: most_common([each.get(key) for each in settings]) for key in keys}
        agreement = []
        for setting in settings:
            usual_keys = [key for key in keys if setting.get(key) == usual[key]]
            agreement.append(len(usual_keys))
        chosen.append(members[agreement.index(max(agreement))])
    return tuple(chosen[:_SHOWN])


def most_common(values: Sequence[Any]) -> Any:
    """Return the value that most have; of equally many the first."""
    ((most_frequent, _),) = Counter(map(repr, values)).most_common(1)
    return next(value for value in values if repr(value) == most_frequent)


def flat_settings(run: Run) -> dict[str, Any]:
    """Return settings in which runs of one method may differ: config, conditions and seed."""
    return {**run.setting, **run.conditions, "seed": run.record.seed}
