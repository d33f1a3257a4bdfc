"""``python -m cliquetta`` is the command."""

import subprocess
import sys

import cliquetta
from tests._helpers.running import child_environment


def test_the_package_runs_as_the_command() -> None:
    words = [sys.executable, "-m", "cliquetta", "--version"]
    run = subprocess.run(words, env=child_environment(), capture_output=True, text=True)
    assert run.stdout == f"cliquetta {cliquetta.__version__}\n", run.stderr
