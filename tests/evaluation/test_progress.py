"""Progress of runs on a cluster."""

import subprocess
import sys

from cliquetta.evaluation.progress import ProgressBoard, RunReport


def test_a_board_holds_the_latest_report_until_it_is_read() -> None:
    board = ProgressBoard()
    board.post(0, RunReport(1, 9, 4, None))
    board.post(0, RunReport(2, 9, 8, 50.0))
    board.post(3, RunReport(1, 5, 4, None))
    assert board.take() == {0: RunReport(2, 9, 8, 50.0), 3: RunReport(1, 5, 4, None)}
    assert board.take() == {}


def test_an_actor_that_holds_a_board_starts_without_torch() -> None:
    code = "import sys, cliquetta.evaluation.progress; print('torch' in sys.modules)"
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True).strip()
        == "False"
    )
