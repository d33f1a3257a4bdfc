"""The command that a report prints gives the same run again."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cliquetta.evaluation.grid import RunSpec, with_method
from cliquetta.evaluation.record import load_record
from cliquetta.evaluation.sweep import RunContext
from cliquetta.prompts.catalogue import templates
from cliquetta.report.repeat import repeat_command
from tests._helpers.made_runs import make_run
from tests._helpers.running import Run


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("tent/lr=0.004", {}),
        (
            "scap:paper/blocks=0,1/retention=false/topk=2",
            {"batch_size": 7, "seed": 3, "order": "correlated"},
        ),
        ("zero_shot", {"templates": ("a {}.", 'it\'s a "{}"')}),
        ("zero_shot", {"dataset": "bundled>bundled@fog:2", "limit": 6}),
    ],
)
def test_the_command_repeats_the_run(
    run: Run, method: str, changes: Any, tiny_file: Path, tmp_path: Path
) -> None:
    base = RunSpec("bundled@fog:3", "", str(tiny_file), limit=12, batch_size=6)
    spec = with_method(replace(base, **changes), method)
    record = RunContext(tmp_path / "first", device="cpu").run(spec)
    command, remarks = repeat_command(record)
    assert remarks == []
    words = shlex.split(command)
    assert words[0] == "cliquetta"
    # the record knows a file by the name that the model gives itself
    words[words.index("--model") + 1] = str(tiny_file)
    assert run(*words[1:], "--out", tmp_path / "again").code == 0
    (again,) = (tmp_path / "again").iterdir()
    assert again.name == record.id
    assert load_record(again).preset == record.preset
    first = tmp_path / "first" / record.id / "predictions.jsonl"
    assert (again / "predictions.jsonl").read_bytes() == first.read_bytes()


def test_what_a_command_cannot_say_is_a_remark(tmp_path: Path) -> None:
    record = load_record(make_run(tmp_path, "plug-in", [0], [0], config={"depth": 3}))
    assert "plug-in is not a method of this version" in repeat_command(record)[1][0]
    settings = {**record.settings, "fitted": "abc123", "method": "coop"}
    command, remarks = repeat_command(type(record)(record.id, settings))
    assert "--fitted FILE" in command and "abc123" in remarks[0]
    settings["stream"] = {
        **record.settings["stream"],
        "dirichlet": 0.5,
        "order": "correlated",
    }
    settings["prompts"] = {"templates": list(templates("openai-80"))}
    command, _ = repeat_command(type(record)(record.id, settings))
    assert "--order correlated --gamma 0.5 --templates openai-80" in command
