"""Grid files that come with the package, found without importing torch."""

from importlib.resources import files
from pathlib import Path

from cliquetta.errors import UnknownNameError


def packaged_grid(name: str) -> Path:
    """Return the path of a grid file of the package, whether or not there is one of that name."""
    return Path(str(files("cliquetta.evaluation").joinpath(f"data/grids/{name}.json")))


def find_grid(grid: Path) -> Path:
    """Return the file of a grid.

    Args:
        grid: A path, or the name of a grid that comes with the package.

    Raises:
        UnknownNameError: It is neither.

    """
    if grid.exists():
        return grid
    packaged = packaged_grid(grid.name)
    if not packaged.exists():
        names = [path.stem for path in packaged.parent.glob("*.json")]
        raise UnknownNameError("grid, and no file", str(grid), names)
    return packaged
