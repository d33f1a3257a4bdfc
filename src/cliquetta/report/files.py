"""A report on disk."""

from __future__ import annotations

from pathlib import Path

from cliquetta.atomic import write_atomically
from cliquetta.report.page import Page
from cliquetta.report.style import to_file

FORMATS = ("png", "pdf")


def write_page(page: Page, path: Path | str) -> int:
    """Write the page and return its size in bytes."""
    data = page.html.encode()
    write_atomically(Path(path), data)
    Path(path).chmod(0o644)  # to be shared: temporary files are private
    return len(data)


def write_figures(page: Page, folder: Path | str) -> list[Path]:
    """Write every figure of the page as PNG and PDF; returns the files."""
    written = []
    for name, figure in page.figures.items():
        for kind in FORMATS:
            path = Path(folder) / f"{name}.{kind}"
            write_atomically(path, to_file(figure, kind))
            path.chmod(0o644)
            written.append(path)
    return written
