"""``cliquetta report``: one HTML page about recorded runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cliquetta.cli.checks import check_runs
from cliquetta.cli.command import Common, Root
from cliquetta.cli.console import count
from cliquetta.errors import UnknownNameError

ATTENTION: tuple[Literal["class", "rollout"], ...] = ("class", "rollout")
MAPS: tuple[Literal["auto", "pca", "tsne"], ...] = ("auto", "pca", "tsne")
EXAMPLES = """
cliquetta report runs --out report.html
cliquetta report runs/RUN-A runs/RUN-B --out two.html --figures figures
cliquetta evaluate --dataset bundled@fog:3 --method scap --evidence && cliquetta report runs
"""


def report(
    common: Common,
    runs: Annotated[
        list[Path],
        typer.Argument(help="Directories of runs, of one run, or record.json files."),
    ],
    out: Annotated[Path, "Output file."] = Path("report.html"),
    title: Annotated[str, "Title of the page."] = "",
    figures: Annotated[
        Path | None, "Also save the figures to this directory, as PNG and PDF."
    ] = None,
    attention: Annotated[
        str, "Attention maps: class (of the class token) or rollout."
    ] = "class",
    map: Annotated[
        str, "Embedding: pca, tsne, or auto (tsne where installed)."
    ] = "auto",
    root: Root = None,
) -> None:
    """Make one HTML page about recorded runs.

    It holds tables, figures, galleries, and the commands that repeat the runs. Cliques,
    attention and features are shown for runs made with `evaluate --evidence`.
    """
    check_runs(runs)
    if attention not in ATTENTION:
        raise UnknownNameError("kind of attention", attention, ATTENTION)
    if map not in MAPS:
        raise UnknownNameError("map", map, MAPS)

    from cliquetta.report.page import Choices, build_page, write_figures, write_page
    from cliquetta.report.runs import load_runs

    finished, unfinished = load_runs(runs, root)
    if unfinished:
        common.terminal.warn(f"{count(len(unfinished), 'unfinished run')} left out")
    choices = Choices(title=title, attention=attention, map=map)
    page = build_page(finished, unfinished, choices)
    size = write_page(page, out)
    names = [] if figures is None else write_figures(page, figures)
    common.terminal.say(
        f"{count(len(finished), 'run')} on one page of {size / 1e6:.1f} MB: {out}"
    )
    if figures is not None:
        common.terminal.say(f"{count(len(names), 'figure file')} in {figures}")
    common.terminal.document(
        {
            "page": str(out),
            "bytes": size,
            "runs": [run.id for run in finished],
            "unfinished": [run.record.id for run in unfinished],
            "figures": [str(name) for name in names],
        }
    )
