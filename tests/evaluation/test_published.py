"""Every published number against a transcription of where it was printed; a wrong digit fails."""

from pathlib import Path

import pytest

from cliquetta.evaluation.grid import RunSpec, packaged_grid, read_grid
from cliquetta.methods.registry import method_config
from cliquetta.prompts.catalogue import template_choice, templates

PAGE = (Path(__file__).parents[2] / "docs/results/published.md").read_text(encoding="utf-8")

OOD = ("imagenet-a", "imagenet-r", "imagenet-sketch", "imagenet-v2")
SMALL = ("cars", "sun397", "aircraft", "eurosat", "food101", "pets")
TEN = (*SMALL, "flowers102", "caltech101", "dtd", "ucf101")
DATASETS = {*OOD, *TEN}

# The SCAP paper (CVPR 2025): table 1 and the last table of the supplement, columns in its order,
# the average last.
PAPER_OOD = """
CLIP         47.87 73.98 46.09 61.88 57.46
CoOp         49.71 75.21 47.99 64.20 59.28
CoCoOp       50.63 76.18 48.75 64.07 59.91
Tip-Adapter  51.04 77.76 48.88 63.41 60.27
TPT          54.77 77.06 47.94 63.45 60.81
C-TPT        52.90 78.00 48.50 63.40 60.70
DART         60.56 79.56 49.76 64.03 63.48
MTA          58.06 78.33 49.61 64.24 62.56
TDA          60.11 80.24 50.54 64.67 63.89
Zero         61.35 77.28 48.29 64.13 62.76
SCAP         64.52 81.68 51.65 64.65 65.63
"""
PAPER_TEN = """
TDA   67.28 67.62 23.91 58.00 86.14 88.63 71.42 94.24 47.40 70.66 67.53
SCAP  69.25 66.41 25.44 58.62 86.58 90.27 71.65 94.42 47.79 68.36 67.88
"""
# Its tables of components and of combination approaches, and the default of both figures.
PAPER_COMPONENTS = """
none               60.98
text               62.57
image              63.14
image + retention  63.82
all                64.52
"""
PAPER_COMBINATION = """
mean, mean      61.82
mean, concat    62.11
concat, mean    64.35
concat, concat  64.52
"""
# Rows of other publications, as our fact sheet of 2026-11-15 has them. They were not printed in
# the paper; this copy notices a digit that changes, not one that was wrong from the start.
OTHER_OOD = """
CLIP, one template  47.87 73.98 46.09 60.86
CLIP, ensemble      49.89 77.65 48.24 61.88
MaPLe               50.90 76.98 49.15 64.07
Zero, own page      59.61 77.22 48.40 64.16
Zero, ensemble      62.75 80.75 50.59 65.23
DMN-ZS              58.28 78.55 52.98 65.27
"""
OTHER_TEN = """
CLIP, one template      65.48 62.59 23.67 42.01 83.65 88.25 67.44 93.35 44.27 65.13 63.58
CLIP, ensemble          66.16 66.26 23.22 50.42 84.04 88.28 67.07 93.91 45.09 67.51 65.20
CoOp                    64.51 64.15 18.47 46.39 85.30 89.14 68.71 93.70 41.92 66.55 63.88
CoCoOp                  65.32 67.36 22.94 45.37 86.06 90.14 71.88 94.43 45.73 68.21 65.74
MaPLe                   65.57 67.01 24.74 48.06 86.20 90.49 72.23 93.53 46.49 68.69 66.30
TPT                     66.87 65.50 24.78 42.44 84.67 87.79 68.98 94.16 47.75 68.04 65.10
TPT, run again by Zero  66.68 65.39 23.13 42.86 84.67 87.23 68.75 93.93 47.04 68.16 64.78
C-TPT                   65.80 64.80 24.00 43.20 83.70 88.20 69.80 93.60 46.00 65.70 64.50
MTA                     68.05 64.98 25.32 38.71 84.95 88.22 68.26 94.13 45.59 68.11 64.63
MTA, ensemble           68.47 66.67 25.20 45.36 85.00 88.24 68.06 94.21 45.90 68.69 65.58
Zero                    68.04 65.03 25.21 34.33 86.53 87.75 67.68 93.66 46.12 67.77 64.21
Zero, ensemble          68.97 67.63 25.21 42.17 86.77 87.83 67.17 94.41 45.86 69.18 65.52
DMN-ZS                  67.77 70.00 29.85 57.37 85.06 91.88 74.79 95.09 54.61 72.43 69.88
"""


def transcribed(text: str, columns: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Rows of a table; a last number beyond the columns is their printed average."""
    result = {}
    for line in text.strip().splitlines():
        words = line.split()
        count = sum(word.replace(".", "").isdigit() for word in words)
        numbers = [float(word) for word in words[-count:]]
        names = (*columns, "average")[:count]
        result[" ".join(words[:-count])] = dict(zip(names, numbers, strict=True))
    return result


def recorded(table: str, *, printed: bool) -> dict[str, dict[str, float]]:
    """Rows of docs/results/published.md that the paper prints, or those from elsewhere."""
    section = PAGE.split(f"(`{table}`)")[1].split("\n## ")[0]
    head, _, *rows = (
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    )
    named = [dict(zip(head, row, strict=True)) for row in rows]
    return {
        row["row"].removesuffix("†"): {d: float(row[d]) for d in head if d in DATASETS}
        for row in named
        if (row["source"] == "P") == printed
    }


@pytest.mark.parametrize(
    ("table", "text", "columns", "printed"),
    [
        ("ood", PAPER_OOD, OOD, True),
        ("cross-domain", PAPER_TEN, TEN, True),
        ("components", PAPER_COMPONENTS, ("imagenet-a",), True),
        ("combination", PAPER_COMBINATION, ("imagenet-a",), True),
        ("ood", OTHER_OOD, OOD, False),
        ("cross-domain", OTHER_TEN, TEN, False),
    ],
)
def test_every_number_is_the_printed_one(
    table: str, text: str, columns: tuple[str, ...], printed: bool
) -> None:
    rows = transcribed(text, columns)
    for values in rows.values():
        average = values.pop("average", None)  # a check of the transcription itself
        assert average is None or abs(sum(values.values()) / len(values) - average) < 0.021
    assert recorded(table, printed=printed) == rows


SCAP_RUNS = [
    spec
    for name in ("ood", "cross-domain", "components", "combination")
    for spec in read_grid(packaged_grid(name))
    if spec.method == "scap"
]


@pytest.mark.parametrize("spec", SCAP_RUNS, ids=lambda spec: str(spec)[:60])
def test_scap_is_run_as_the_paper_says(spec: RunSpec) -> None:
    assert spec.batch_size == 64  # "for all experiments"
    # "an ensemble of multiple templates for the OOD benchmark, whereas dataset-specific templates
    # are used for the cross-domain benchmark, following TDA"
    out_of_distribution = spec.dataset in OOD
    source = "scap" if out_of_distribution else "tda"
    assert spec.templates == templates(template_choice(source, spec.dataset))
    # Their figures are those of 64 views; no views of one kind are printed for cross-domain sets.
    assert spec.preset == ("paper-views" if out_of_distribution else "paper-crops")
    options = dict(spec.options)
    config = method_config("scap", spec.preset, options)
    assert config.views == 64
    # "the default values of alpha_r, sigma, L and K set to 1, 0.3, 6, and 3", "k = 3 in the
    # initial top-k predictions", "Adam with a learning rate of 0.003"
    # (another alpha_r than 1 is no setting)
    assert [config.bandwidth, config.capacity, config.neighbours] == [0.3, 6, 3]
    assert config.topk == 3 and config.lr == 0.003
    # The paper prints no threshold; its ablations are on ImageNet-A, with one for all rows.
    if spec.dataset == "imagenet-a":
        assert options["threshold"] in (0.65, 2.0)  # no cosine reaches 2: nothing is learned


def test_rivals_of_the_tables_are_run_with_the_printed_views() -> None:
    for name in ("ood", "cross-domain"):
        for spec in read_grid(packaged_grid(name)):
            if spec.method in ("tpt", "ctpt", "dart", "mta", "zero"):
                config = method_config(spec.method, spec.preset, dict(spec.options))
                assert config.views == 64, spec


@pytest.mark.parametrize(("preset", "views"), [("paper", 1), ("paper-views", 64)])
def test_the_defaults_are_the_stated_ones(preset: str, views: int) -> None:
    """From the paper's implementation details; what it leaves open is the fact sheet's choice."""
    stated = {"topk": 3, "lr": 3e-3, "bandwidth": 0.3, "capacity": 6, "neighbours": 3}
    chosen = {"threshold": 0.8, "text_mix": 0.5, "selection_fraction": 0.1, "steps": 1}
    chosen |= {"propagation": 0.3, "prompt_length": 1, "views": views}
    config = vars(method_config("scap", preset))
    assert config.items() >= {**stated, **chosen, "concentration": 1.0}.items()
    assert config["blocks"] == (1,)
