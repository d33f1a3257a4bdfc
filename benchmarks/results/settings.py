"""Records grouped by all that must be equal in one table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cliquetta.evaluation.comparison import Comparison, Overall, compare, grouped
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record, Run

# Roles of datasets, as grid files have them.
REPORT = "report"
DEVELOPMENT = "dev"
CLEAN = "clean"


@dataclass(frozen=True)
class Setting:
    """Runs that differ in dataset, method and seed only."""

    title: str
    runs: tuple[Run, ...]
    roles: Mapping[str, str]
    """``dev``, ``clean`` or ``report`` by dataset; the last by default"""

    @cached_property
    def table(self) -> Comparison:
        """Methods by datasets."""
        return compare(self.runs)

    def columns(self, *roles: str) -> list[str]:
        """Return the datasets that have one of some roles."""
        return [c for c in self.table.columns if self.roles.get(c, REPORT) in roles]

    @property
    def shifted(self) -> list[str]:
        """All datasets but the clean ones; all if there are no others."""
        return self.columns(REPORT, DEVELOPMENT) or list(self.table.columns)

    @cached_property
    def rows(self) -> list[Overall]:
        """Every method over the shifted datasets: zero-shot first, then by gain."""
        rows = [self.table.overall(row, self.shifted) for row in self.table.rows]
        return sorted(rows, key=rank)


def rank(row: Overall) -> tuple[bool, bool, float]:
    """Order zero-shot first, then by gain; behind them rows that lack datasets."""
    return row.row != BASELINE, not row.complete, -(row.gain or 0.0)


def read_settings(records: Iterable[Record], roles: Mapping[str, str]) -> list[Setting]:
    """Group records by all that must be equal in one table, most datasets first."""
    groups = grouped([Run(record, None) for record in records], _title)
    settings = [Setting(title, tuple(runs), roles) for title, runs in groups.items()]

    def size(setting: Setting) -> tuple[int, int]:
        return len(setting.table.columns), len(setting.table.rows)

    return sorted(settings, key=size, reverse=True)


def _title(run: Run) -> str:
    """Name the model, the order with what belongs to it, the batch size and the limit."""
    stream = run.record.settings["stream"]
    model = run.record.settings["model"]
    facts = []
    for name, value in run.own_order.items():
        if name != "batch_size":
            facts.append(f"{name} {value}")
    if stream["dirichlet"] is not None:
        facts.append(f"gamma {stream['dirichlet']}")
    order = run.order
    if facts:
        order += f" ({', '.join(facts)})"

    title = f"{model['id']}, {model['dtype']}, {order}, batch {stream['batch_size']}"
    if stream["limit"]:
        title += f", {stream['limit']} images per dataset"
    if "unknown" in stream:
        title += ", open set"
    return title
