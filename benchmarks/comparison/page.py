"""The text of the comparison page: every registered method beside what was recorded of it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cliquetta.methods.registry import MethodEntry, list_methods
from comparison.settings import BASELINE, BLANK, Setting, is_default, kind_of, method_of, needs_of
from comparison.tables import grid, three_digits

SETS_A_TABLE = 8
"""Columns of a table shift by shift, beside the method's name."""
NEAR = 0.5
"""Points below zero-shot that the choice calls close to it."""
KINDS = {
    "independent": "*Images come alone and nothing may be kept* (independent).",
    "sequential": "*One stream, remembered image by image, batches of any size* (sequential).",
    "joint": "*Batches of many images, which inform each other* (joint).",
    "few shots": "*A few labelled images of each class* (few shots).",
}


@dataclass(frozen=True)
class Records:
    """Everything the page is written from; ``more`` are further settings, in short tables."""

    bundled: Setting
    real: Setting | None
    more: Sequence[Setting]
    speed: Mapping[str, Any] | None
    pages: Mapping[str, str]
    """Links to the methods' pages."""

    def cost(self, label: str) -> str:
        """Time as a multiple of plain encoding, from the row of the label or of its method."""
        rows = {} if self.speed is None else {row["method"]: row for row in self.speed["rows"]}
        row = rows.get(label) or (rows.get(method_of(label)) if is_default(label) else None)
        if row is None:
            return BLANK
        views = f" × {row['views']} views" if row["views"] > 1 else ""
        return f"{three_digits(row['x encoding'])}{views}"


def write_page(records: Records, sources: Sequence[str], command: str) -> str:
    """The whole page as Markdown."""
    bundled, real = records.bundled, records.real
    parts = [
        "# The methods compared",
        _paragraph(
            "Written by `benchmarks/comparison_page.py` from recorded results: do not edit it, run "
            "the command at its foot. The list of names with their papers is in the "
            "[README](../../README.md#methods); each name below leads to the method's own page."
        ),
        "## How to read and choose",
        *_how_to_read(records),
        "## Every method on the bundled set",
        _paragraph(f"Setting: {bundled.title}."),
        _every_method(records),
        "## The real ViT-B/16 tower",
        *_real_tower(records),
        "## Shift by shift",
        "Accuracy in percent, and the gain over zero-shot on the same images.",
        "### Bundled set",
        *_by_set(bundled),
    ]
    if real is not None:
        parts += ["### Real tower", *_by_set(real)]
    if records.more:
        parts.append("## Other settings")
    for other in records.more:
        parts += [f"### {other.title}", _short_table(other, records.pages)]
    parts += ["## What was not run", "\n".join(_not_run(records)), "## Sources", *sources]
    parts += ["This page is written by", f"```console\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return textwrap.fill(
        f"- {text}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _how_to_read(records: Records) -> list[str]:
    """What columns mean, and which methods a situation leaves, by recorded gain."""
    setting = records.bundled
    reading = [
        "Read the *gain* first: points over zero-shot on exactly the same images, ± sd over sets. "
        "*p* is a paired two-sided sign-flip test over sets; with fewer than six sets none is "
        "given, since runs on the same pictures are not independent. Settings of methods may be "
        "chosen on sets marked *dev*; *gain, not dev* leaves them out.",
        "*Accuracy* is the mean over shifted sets ± its sd from seed to seed (0 where a method "
        "treats each image alone: order and seed cannot matter). In italics: on fewer images or "
        "fewer sets than zero-shot, so that only the gain may be compared.",
        "*Worst set* is the lowest gain and where it was: what a choice may cost. *ECE*: "
        "calibration error in percent.",
        "*Cost* is time as a multiple of plain encoding of the same pixels; `× 64 views`: of "
        "encoding 64 views of each image, which is itself about 64 times what zero-shot takes"
        f"{_cost_source(records)}.",
    ]
    choosing = [f"{text} {_ranking(setting, kind)}" for kind, text in KINDS.items()]
    for name, where in (("bundled set", setting), ("real tower", records.real)):
        if where is not None:
            found = [
                f"`{r['method']}`"
                for r in where.rows
                if where.complete(r) and r["worst"] >= -NEAR and r["method"] != BASELINE
            ]
            choosing.append(
                f"Complete on the {name} and never more than {NEAR} points below zero-shot: "
                f"{', '.join(found) or 'none'}."
            )
    return [
        "\n".join(map(_item, reading)),
        "What your images allow decides first; within that, by mean gain on the bundled set:",
        "\n".join(map(_item, choosing)),
        _paragraph(
            "The bundled model is small and its shifts are corruptions: look at the real tower, "
            "too, and then run two or three candidates on images of your own with `cliquetta "
            "evaluate` and `cliquetta compare`."
        ),
    ]


def _cost_source(records: Records) -> str:
    return "" if records.speed is None else f" ({records.speed['about'].partition(', `')[0]})"


def _ranking(setting: Setting, kind: str) -> str:
    """The methods of a kind with their gains; those that are not complete by name only."""
    names = {e.name for e in list_methods() if kind_of(e) == kind and e.name != BASELINE}
    rows = [row for row in setting.rows if method_of(row["method"]) in names]
    whole = [f"`{r['method']}` {r['gain']:+.2f}" for r in rows if setting.complete(r)]
    part = [f"`{r['method']}`" for r in rows if not setting.complete(r)]
    missing = sorted(names - {method_of(row["method"]) for row in rows})
    texts = [f"{', '.join(whole)}."] if whole else []
    texts += [f"Not on all sets: {', '.join(part)}."] if part else []
    texts += [f"Not recorded: {', '.join(f'`{n}`' for n in missing)}."] if missing else []
    return " ".join(texts)


def _every_method(records: Records) -> str:
    """The first table: a row per registered method, or more where presets were run, too."""
    setting = records.bundled
    entries = {entry.name: entry for entry in list_methods()}
    head = ["method", "what it does", "images of a batch", "needs", "accuracy", "gain"]
    head += ["worst set", "ECE", "cost", "sets × images"]
    rows: list[list[str]] = []
    for row in setting.rows:
        label = row["method"]
        entry = entries[method_of(label)]
        rows.append(
            [
                _link(label, records.pages),
                entry.summary,
                kind_of(entry),
                needs_of(entry, setting.config(label)),
                *_scores(setting, row),
                records.cost(label),
                _extent(setting, row),
            ]
        )
    for name, entry in entries.items():
        if not setting.of(name):
            about = [_link(name, records.pages), entry.summary, kind_of(entry)]
            about.append(needs_of(entry, vars(entry.config())))
            rows.append([*about, "not recorded", *[BLANK] * 3, records.cost(name), BLANK])
    return "\n".join(grid(head, rows))


def _real_tower(records: Records) -> list[str]:
    if records.real is None:
        return ["Nothing is recorded."]
    text = f"Setting: {records.real.title}. Images/s: pixels and views already on the device."
    return [_paragraph(text), _short_table(records.real, records.pages)]


def _short_table(setting: Setting, pages: Mapping[str, str]) -> str:
    """A table of the recorded methods only."""
    head = ["method", "accuracy", "gain", "gain, not dev", "worst set", "ECE", "images/s"]
    head.append("sets × images")
    rows = []
    for row in setting.rows:
        accuracy, gain, worst, ece = _scores(setting, row)
        report = BLANK if row["gain_report"] is None else f"{row['gain_report']:+.2f}"
        rate = three_digits(row["images_per_s"])
        name = _link(row["method"], pages)
        rows.append([name, accuracy, gain, report, worst, ece, rate, _extent(setting, row)])
    return "\n".join(grid(head, rows))


def _link(label: str, pages: Mapping[str, str]) -> str:
    page = pages.get(method_of(label))
    return f"`{label}`" if page is None else f"[`{label}`]({page})"


def _scores(setting: Setting, row: Mapping[str, Any]) -> list[str]:
    """Accuracy, gain, worst set and ECE of a row."""
    accuracy = f"{row['mean']:.2f} ± {row['sd']:.2f}"
    if row["method"] in setting.fewer or not setting.complete(row):
        accuracy = f"*{accuracy}*"
    if row["method"] == BASELINE:
        return [accuracy, BLANK, BLANK, f"{row['ece']:.1f}"]
    gain = f"{row['gain']:+.2f} ± {row['gain_sd_over_sets']:.2f}"
    gain += f" (p {row['p']:.2g})" if row["paired"].endswith("sets") else ""
    return [accuracy, gain, f"{row['worst']:+.2f} ({row['worst_set']})", f"{row['ece']:.1f}"]


def _extent(setting: Setting, row: Mapping[str, Any]) -> str:
    """Sets and images of each, and how many runs are there if not all."""
    sets = str(len(row["sets"]))
    if setting.complete(row):
        return f"{sets} × {row['images']:,}"
    runs = f"{row['runs']} of {setting.runs} runs"
    return f"{sets} of {len(setting.kinds)} × {row['images']:,}, {runs}"


def _by_set(setting: Setting) -> list[str]:
    """Methods by sets, in tables of a few sets each."""
    tables, names = [], list(setting.kinds)
    count = -(-len(names) // SETS_A_TABLE)
    size = -(-len(names) // count)
    for start in range(0, len(names), size):
        sets = names[start : start + size]
        mark = {"report": "", "dev": " (dev)", "clean": " (clean)"}
        head = ["method", *(name + mark[setting.kinds[name]] for name in sets)]
        rows = [
            [f"`{row['method']}`", *(_set_cell(row, name) for name in sets)]
            for row in setting.rows
            if any(name in row["sets"] for name in sets)
        ]
        tables.append("\n".join(grid(head, rows)))
    return tables


def _set_cell(row: Mapping[str, Any], name: str) -> str:
    entry = row["sets"].get(name)
    if entry is None:
        return BLANK
    gain = "" if row["method"] == BASELINE else f" ({entry['gain']:+.1f})"
    return f"{entry['top1']:.1f}{gain}"


def _not_run(records: Records) -> list[str]:
    """Methods without a row, and those whose row is not complete, with what is known of why."""
    lines = []
    for where, setting in (("Bundled set", records.bundled), ("Real tower", records.real)):
        if setting is None:
            continue
        reasons: dict[str, list[str]] = {}
        for entry in list_methods():
            if not setting.of(entry.name):
                reason = _reason(entry, setting, fixed_text=setting is records.real)
                reasons.setdefault(reason, []).append(f"`{entry.name}`")
        for row in setting.rows:
            if not setting.complete(row):
                left = f"`{row['method']}` ({row['runs']} of {setting.runs} runs)"
                reasons.setdefault("the recording stopped before their end", []).append(left)
        if setting.missing_sets:
            reasons["sets that the recording did not come to"] = setting.missing_sets
        for what in sorted(key for key in setting.not_run if " on " in key):
            reasons.setdefault(setting.not_run[what], []).append(what)
        lines += [_item(f"{where}: {', '.join(who)}: {reason}.") for reason, who in reasons.items()]
    return lines or ["Nothing: every method has every set and seed."]


def _reason(entry: MethodEntry, setting: Setting, *, fixed_text: bool) -> str:
    """Why a method has no row: as recorded, else as far as the registry can tell."""
    if entry.name in setting.not_run:
        return setting.not_run[entry.name]
    if fixed_text and entry.adapter.needs & {"text", "text-prompts"}:
        return "learn through the text tower, where only fixed text is at hand"
    if fixed_text and entry.fit is not None:
        return "are fitted on labelled images, of which there are none"
    return "not among the methods of the recorded commands"
