"""Compare our methods with their authors' code and print a table.

    python -m benchmarks.authors DIR [--methods tda,mta] [--out docs/results/authors.md]

DIR holds a work tree of each repository as ``owner+name`` (``git clone
https://github.com/owner/name DIR/owner+name``); the table names the commits that were compared.
Authors' files are imported or executed in parts, patched to run in float32 on the CPU, and nothing
of them is stored. Methods whose repository is missing are listed as not run.
"""

from __future__ import annotations

import argparse
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.authors import features, few_shot, layernorms, prompts
from benchmarks.authors.support import Repository, Row

OPENAI = "azshue/TPT"
"""Has an unchanged copy of OpenAI's model file, for authors who import the package."""
COMPARISONS: dict[str, tuple[Callable[..., Iterator[Row]], tuple[str, ...]]] = {
    "tda": (features.tda, ("kdiAAA/TDA",)),
    "dmn": (features.dmn, ("YBZh/DMN",)),
    "mta": (features.mta, ("MaxZanella/MTA",)),
    "zero": (features.zero, ("FarinaMatteo/zero",)),
    "transclip": (features.transclip, ("MaxZanella/transduction-for-vlms",)),
    "tpt": (prompts.tpt, ("azshue/TPT",)),
    "ctpt": (prompts.ctpt, ("hee-suk-yoon/C-TPT",)),
    "dart": (prompts.dart, ("zhoujiahuan1991/AAAI2024-DART", OPENAI)),
    "clipartt": (layernorms.clipartt, ("dosowiechi/CLIPArTT",)),
    "watt": (layernorms.watt, ("Mehrdad-Noori/WATT",)),
    "batclip": (layernorms.batclip, ("sarthaxxxxx/BATCLIP", OPENAI)),
    "tent": (layernorms.tent, ("DequanWang/tent", "sarthaxxxxx/BATCLIP", OPENAI)),
    "tip_adapter": (few_shot.tip_adapter, ("gaopengcuhk/Tip-Adapter",)),
    "coop": (few_shot.coop, ("KaiyangZhou/CoOp", OPENAI, "KaiyangZhou/Dassl.pytorch")),
    "cocoop": (few_shot.cocoop, ("KaiyangZhou/CoOp", OPENAI, "KaiyangZhou/Dassl.pytorch")),
    "maple": (
        few_shot.maple,
        ("muzairkhattak/multimodal-prompt-learning", "KaiyangZhou/Dassl.pytorch"),
    ),
}
"""What compares each method, and the repositories that it reads: the authors' own first."""


def run(name: str, folder: Path) -> tuple[str, list[Row], str]:
    """Commit, rows and, where it did not run to its end, why."""
    comparison, names = COMPARISONS[name]
    found = [Repository(folder / known.replace("/", "+")) for known in names]
    missing = [known for known, tree in zip(names, found, strict=True) if not tree.folder.is_dir()]
    if missing:
        return "–", [], f"no work tree of {', '.join(missing)}"
    rows: list[Row] = []
    try:
        for row in comparison(*found):
            rows.append(row)
            print(f"{name:12} {row.case:44} {row.difference:9.2g} {row.agreement:8.2%}", flush=True)
    except Exception as error:
        traceback.print_exc()
        return found[0].commit, rows, f"{type(error).__name__}: {error}"
    return found[0].commit, rows, ""


def main() -> int:
    """Run what was asked for; exit 1 if an answer differs or a comparison did not run."""
    parser = argparse.ArgumentParser(description="Our methods beside their authors' code.")
    parser.add_argument("folder", type=Path, help="directory of work trees named owner+name")
    parser.add_argument("--methods", default=",".join(COMPARISONS), help="comma-separated names")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    lines = [
        "| method | authors' repository (commit) | compared | largest difference (of) | equal |",
        "|---|---|---|---|---|",
    ]
    complete = True
    for name in options.methods.split(","):
        commit, rows, problem = run(name, options.folder)
        title = f"| `{name}` | {COMPARISONS[name][1][0]} ({commit}) "
        complete &= not problem and all(row.agreement == 1 for row in rows)
        for row in rows:
            gap = f"{row.difference:.2g} ({row.scale:.3g})"
            lines.append(f"{title}| {row.case}, {row.count:,} | {gap} | {row.agreement:.2%} |")
            title = "| | "
        if problem:
            lines.append(f"{title}| not run to its end: {problem} | – | – |")
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    source = "`python -m benchmarks.authors DIR`"
    about = f"{today}, {platform.machine()} CPU, torch {torch.__version__}, float32: {source}."
    text = "\n".join(["# Methods beside their authors' code", "", about, "", *lines, ""])
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
