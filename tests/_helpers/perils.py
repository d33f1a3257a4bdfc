"""A context on which the first attempt at some runs goes wrong."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.progress import Step
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.sweep import RunContext


@dataclass
class PerilousPlace(RunContext):
    """Kills its own process in the middle of TDA, and loses its disk in zero-shot; once each."""

    perils: Path | None = None  # folder in which each is noted before it happens

    def run(self, spec: RunSpec, on_step: Callable[[Step], None] | None = None) -> Record:
        """The record of one cell, if nothing happens."""
        if spec.method == "zero_shot" and self.first_time("disk"):
            raise OSError("no such disk")

        def step(done: Step) -> None:
            if on_step is not None:
                on_step(done)
            if spec.method == "tda" and done.number == 130 and self.first_time("kill"):
                os.kill(os.getpid(), signal.SIGKILL)

        return super().run(spec, step)

    def first_time(self, name: str) -> bool:
        assert self.perils is not None
        note = self.perils / name
        there = note.exists()
        note.touch()
        return not there
