"""Compare our methods with their authors' code and print a table.

    python -m benchmarks.authors DIR [--methods tda,mta] [--out docs/results/authors.md]

DIR holds a work tree of each repository as ``owner+name`` (``git clone
https://github.com/owner/name DIR/owner+name``); the table names the commits that were
compared. Authors' files are imported or executed in parts, patched to run in float32 on
the CPU, and nothing of them is stored. What they import beside torch: ``pip install -e
.[authors]``.
"""

import argparse
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.authors import features, few_shot, layernorms, prompts, streams
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
    "cocoop": (
        few_shot.cocoop,
        ("KaiyangZhou/CoOp", OPENAI, "KaiyangZhou/Dassl.pytorch"),
    ),
    "maple": (
        few_shot.maple,
        ("muzairkhattak/multimodal-prompt-learning", "KaiyangZhou/Dassl.pytorch"),
    ),
    "sar": (layernorms.sar, ("mr-eggplant/SAR", OPENAI)),
    "deyo": (layernorms.deyo, ("Jhyun17/DeYO", OPENAI)),
    "onzeta": (streams.onzeta, ("idstcv/OnZeta",)),
    "dpe": (streams.dpe, ("zhangce01/DPE-CLIP",)),
    "tps": (streams.tps, ("elaine-sui/TPS",)),
    "ecalp": (streams.ecalp, ("Yushu-Li/ECALP",)),
    "oga": (streams.oga, ("cfuchs2023/OGA",)),
    "stata": (streams.stata, ("MaxZanella/StatA",)),
    "dota": (streams.dota, ("skylineeeeen/DOTA",)),
    "mint": (layernorms.mint, ("baowenxuan/Mint", OPENAI)),
    "cliptta": (layernorms.cliptta, ("MarcLafon/cliptta", OPENAI)),
    "panda": (layernorms.panda, ("ruxideng/Panda", OPENAI)),
    "ramen": (layernorms.ramen, ("baowenxuan/Ramen", OPENAI)),
    "subtta": (layernorms.subtta, ("zhichenz98/SubTTA_EMNLP26", OPENAI)),
}
"""Comparison of each method, and the repositories that it reads: the authors' own first."""
BEGIN = "<!-- table: python -m benchmarks.authors -->"
END = "<!-- end of table -->"
"""Between these lines of a page stands the table, and nothing else of it is rewritten."""
HEAD = (
    "| method | authors' repository (commit), date | compared | largest difference (allowed) | "
    "equal | why not |",
    "|---|---|---|---|---|---|",
)


def run(name: str, folder: Path) -> tuple[list[Row], str, str]:
    """Rows, commit and, where it did not run to its end, why."""
    comparison, names = COMPARISONS[name]
    trees = [Repository(folder / known.replace("/", "+")) for known in names]
    missing = [
        known
        for known, tree in zip(names, trees, strict=True)
        if not tree.folder.is_dir()
    ]
    if missing:
        clone = "; ".join(
            f"git clone https://github.com/{known} {folder / known.replace('/', '+')}"
            for known in missing
        )
        print(f"{name}: no work tree of {', '.join(missing)}: {clone}", file=sys.stderr)
        return [], "–", f"no work tree of {', '.join(missing)}"
    rows: list[Row] = []
    try:
        for row in comparison(*trees):
            rows.append(row)
            numbers = f"{row.difference:9.2g} of {row.bound:<9.2g} {row.agreement:8.2%}"
            print(f"{name:12} {row.case:44} {numbers}", flush=True)
    except Exception as error:
        traceback.print_exc()
        return rows, trees[0].commit, f"{type(error).__name__}: {error}"
    return rows, trees[0].commit, ""


def table_lines(name: str, rows: Sequence[Row], commit: str, problem: str) -> list[str]:
    """The lines of a method."""
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    title = f"| `{name}` | {COMPARISONS[name][1][0]} ({commit}), {today} "
    lines = []
    for row in rows:
        gap = f"{row.difference:.2g} ({row.bound:.2g})"
        reason = "" if row.equal else row.reason or "**not known**"
        lines.append(
            f"{title}| {row.case}; {row.count:,} | {gap} | {row.agreement:.2%} | {reason} |"
        )
        title = "| | "
    return lines + (
        [f"{title}| not run to its end | – | – | {problem} |"] if problem else []
    )


def recorded(page: str) -> dict[str, list[str]]:
    """The lines of every method in the table of a page."""
    groups: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in page[page.index(BEGIN) : page.index(END)].splitlines():
        if line.startswith("| `"):
            lines = groups.setdefault(line.split("`")[1], [])
        if line.startswith(("| `", "| |")):
            lines.append(line)
    return groups


def write_table(page: str, new: Mapping[str, Sequence[str]]) -> str:
    """The page with these methods' lines replaced; its prose and other methods stay."""
    lines = {**recorded(page), **new}
    table = [line for name in COMPARISONS for line in lines.get(name, ())]
    begin = page.index(BEGIN)
    end = page.index(END)
    return page[:begin] + "\n".join([BEGIN, "", *HEAD, *table, "", page[end:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; exit 1 unless all is equal, or differs for a known reason."""
    parser = argparse.ArgumentParser(
        description="Our methods beside their authors' code."
    )
    parser.add_argument(
        "folder", type=Path, help="directory of work trees named owner+name"
    )
    parser.add_argument(
        "--methods", default=",".join(COMPARISONS), help="comma-separated names"
    )
    parser.add_argument(
        "--out", type=Path, help="replace these methods in the table of this page"
    )
    options = parser.parse_args(arguments)
    names = options.methods.split(",")
    if unknown := sorted(set(names) - COMPARISONS.keys()):
        parser.error(
            f"no comparison of {', '.join(unknown)}; there are {', '.join(COMPARISONS)}"
        )
    if not options.folder.is_dir():
        parser.error(
            f"{options.folder} is no directory: clone authors' repositories into it"
        )
    page = (
        options.out.read_text(encoding="utf-8") if options.out else f"{BEGIN}\n{END}\n"
    )
    if BEGIN not in page or END not in page:
        parser.error(
            f"{options.out} has no lines {BEGIN!r} and {END!r} to write a table between"
        )
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    complete = True
    lines = {}
    for name in names:
        rows, commit, problem = run(name, options.folder)
        complete &= not problem and all(row.equal or row.reason for row in rows)
        lines[name] = table_lines(name, rows, commit, problem)
    if options.out is None:
        print(write_table(page, lines))
        print(f"{platform.machine()} CPU, torch {torch.__version__}, float32")
    else:
        page = options.out.read_text(encoding="utf-8")  # may have been edited meanwhile
        options.out.write_text(write_table(page, lines), encoding="utf-8")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
