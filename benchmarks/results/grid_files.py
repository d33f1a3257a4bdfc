"""Which grids the pages of results are written from, and where their files are."""

from pathlib import Path

from cliquetta.evaluation.grid_files import packaged_grid

GRIDS = {
    "headline": ("leaderboard-imagenet", "leaderboard-real"),
    "methods": ("bundled", "methods", "real", "streams", "streams-real"),
    "ablation": ("ablation", "ablation-real"),
    "leaderboard": ("leaderboard", "leaderboard-real", "leaderboard-imagenet"),
    "published": ("published-imagenet",),
}
"""Pages of our own results, and the grids whose records they are written from."""
OWN_GRIDS = Path(__file__).parent / "grids"


def grid_file(name: str) -> Path:
    """Return the path of a grid file: ours beside this module, else the package's."""
    path = OWN_GRIDS / f"{name}.json"
    return path if path.exists() else packaged_grid(name)
