"""The files that the pages of our own results are written to, from records alone."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import COMMAND, printed_page
from benchmarks.results.grid_files import GRIDS, grid_file
from benchmarks.results.headline import (
    headline_picture,
    headline_table,
    read_costs,
    read_headline,
)
from benchmarks.results.imagenet_page import imagenet_page
from benchmarks.results.leaderboard import BOARDS, board_rows, leaderboard_page
from benchmarks.results.leaderboard_figure import leaderboard_figure
from benchmarks.results.methods_page import ablation_page, methods_page
from benchmarks.results.settings import Setting, read_settings
from benchmarks.results.texts import insert_between
from cliquetta.errors import UserError
from cliquetta.evaluation.grid import grid_roles
from cliquetta.evaluation.record import Record, unpack_records

Texts = dict[Path, str]


@dataclass(frozen=True)
class ResultsPages:
    """The files of records, and the pages written from them."""

    results: Path
    readme: Path
    methods: Path

    def records_file(self, grid: str) -> Path:
        """Return the file of the records of a grid."""
        return self.results / f"{grid}.json"

    def texts(self, page: str) -> Texts:
        """Write the texts of a page's files, as its records say."""
        if page == "published":
            return self._published()
        if page == "leaderboard":
            return self._leaderboard()
        settings = {grid: self._settings(grid) for grid in GRIDS[page]}
        first = GRIDS[page][0]
        if not settings[first]:
            raise UserError(
                f"no records in {self.records_file(first)}: `{COMMAND} {page} --run` makes "
                "them; start it in a clone of the repository"
            )
        if page == "headline":
            return self._headline()
        if page == "ablation":
            listed = [*settings["ablation"], *settings["ablation-real"]]
            return {self.results / "ablation.md": ablation_page(listed)}
        text = methods_page(
            bundled=[*settings["bundled"], *settings["methods"]],
            real=settings["real"],
            streams=[*settings["streams"], *settings["streams-real"]],
            folder=self.methods.parent,
        )
        return {self.methods: text}

    def _records(self, grid: str) -> list[Record]:
        """Read the records of a grid; there may be none yet."""
        path = self.records_file(grid)
        return unpack_records(path) if path.exists() else []

    def _settings(self, grid: str) -> list[Setting]:
        """Read the records of a grid, grouped by what is equal in a table."""
        return read_settings(self._records(grid), grid_roles(grid_file(grid)))

    def _headline(self) -> Texts:
        """Write the table of README and of the site's first page, and its picture."""
        tower = "leaderboard-real"
        headline = read_headline(
            self._records("leaderboard-imagenet"),
            self._records(tower),
            grid_roles(grid_file(tower)),
        )
        table = headline_table(headline, read_costs(self.results))
        texts = {
            self.results.parent / "images/headline.svg": headline_picture(headline)
        }
        for page in (self.readme, self.results.parent / "index.md"):
            before = page.read_text(encoding="utf-8")
            texts[page] = insert_between(before, "headline", "headline", table)
        return texts

    def _leaderboard(self) -> Texts:
        """Write the boards, their picture, and the tables of ImageNet-C."""
        boards = {}
        for grid in GRIDS["leaderboard"]:
            records = self._records(grid)
            roles = grid_roles(grid_file(grid))
            boards[BOARDS[grid]] = (records, board_rows(records, roles))
        rows = {title: board for title, (_, board) in boards.items()}
        imagenet = self.results / "imagenet.md"
        imagenet_records, _ = boards[BOARDS["leaderboard-imagenet"]]
        before = imagenet.read_text(encoding="utf-8")
        return {
            self.results / "leaderboard.md": leaderboard_page(
                boards, self.methods.parent
            ),
            imagenet: imagenet_page(before, imagenet_records),
            self.results.parent / "images/leaderboard.svg": leaderboard_figure(rows),
        }

    def _published(self) -> Texts:
        """Write the page of published numbers, with our own on ImageNet."""
        path = self.results / "published.md"
        printed = printed_page.read_printed(self.results / printed_page.PRINTED)
        records = self._records("published-imagenet")
        section = printed_page.printed_section(printed, records)
        before = path.read_text(encoding="utf-8")
        return {path: insert_between(before, "imagenet", "published", section)}
