"""The headline table: ImageNet, ImageNet-C and the shifts of the real tower, by method."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from cliquetta.evaluation.comparison import Overall
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.methods.registry import DEFAULT_METHOD
from cliquetta.report import results_pages as pages
from cliquetta.report.imagenet_page import CLEAN, corruption_columns, on_all_images, own_rows

COSTS = "speed-h200-methods_speed.json"
"""Time of methods beside encoding, each alone on the machine (``benchmarks.methods_speed``)."""
RIVALS = 4
SHOWN = ("scap",)
"""Methods that the table has wherever they stand."""


def headline_table(
    imagenet: Sequence[Record], real: Sequence[pages.Setting], costs: Mapping[str, float]
) -> str:
    """Write the table: zero-shot, the default, the best rivals on ImageNet-C, and SCAP."""
    table, columns = on_all_images(imagenet)
    shifts = corruption_columns(columns)
    clean = columns[CLEAN]
    setting = real[0] if real else None
    lines = []
    for row in chosen_rows([table.overall(name, shifts) for name in own_rows(table)]):
        method = pages.method_of(row.row)
        on_clean = table.overall(row.row, [clean])
        other = _on_real(setting, method)
        worst = [one.worst[0] for one in (row, other) if one is not None and one.worst is not None]
        cost = 1.0 if method == BASELINE else costs.get(method)
        lines.append(
            (
                f"`{method}`",
                _accuracy(on_clean),
                _accuracy(row),
                pages.BLANK if other is None else _accuracy(other),
                pages.shown(min(worst, default=None), "+.1f"),
                pages.BLANK if cost is None else f"{cost:.1f} ×",
            )
        )
    count = 0 if setting is None else len(setting.columns(pages.REPORT))
    shifts_of_tower = f"{count} shifts of the same tower"
    head = ("method", "ImageNet", "ImageNet-C, mean", shifts_of_tower, "worst", "cost alone")
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def chosen_rows(rows: Sequence[Overall]) -> list[Overall]:
    """Choose the rows of the table, by their mean."""
    complete = [row for row in rows if row.complete]
    by_method = {pages.method_of(row.row): row for row in complete}
    ranked = sorted(by_method, key=lambda name: -(by_method[name].mean or 0.0))
    fixed = (BASELINE, DEFAULT_METHOD, *SHOWN)
    best = [name for name in ranked if name not in fixed][:RIVALS]
    wanted = {*fixed, *best}
    ordered = [name for name in ranked if name in wanted and name != BASELINE]
    return [by_method[name] for name in (BASELINE, *ordered) if name in by_method]


def read_costs(results: Path) -> dict[str, float]:
    """Read how much longer a batch takes than encoding it, by method."""
    rows = json.loads((results / COSTS).read_text(encoding="utf-8"))["rows"]
    return {str(row["method"]): float(row["x encoding"]) for row in rows}


def _on_real(setting: pages.Setting | None, method: str) -> Overall | None:
    """A method over the shifts of the real tower's grid on which nothing was chosen."""
    if setting is None:
        return None
    labels = [row for row in setting.table.rows if pages.method_of(row) == method]
    return setting.table.overall(labels[0], setting.columns(pages.REPORT)) if labels else None


def _accuracy(row: Overall) -> str:
    """Accuracy, with its gain over zero-shot."""
    text = pages.shown(row.mean, ".1f")
    return text if row.gain is None else f"{text} ({row.gain:+.1f})"
