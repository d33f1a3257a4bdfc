"""The index that commands check names against is what the registry holds; files of methods load."""

import os
from dataclasses import fields
from pathlib import Path

import pytest

from cliquetta.errors import UserError
from cliquetta.methods.building import index, registry
from cliquetta.methods.building.index import INDEX_FILE, PLUG_IN_FILES, index_text
from cliquetta.methods.building.registry import get_method, list_methods, method_entries
from tests._helpers.running import Result, Run
from tests._helpers.running import run as run

METHOD = '''
"""A method in one file."""

from dataclasses import dataclass

from cliquetta import register
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig


@dataclass(frozen=True)
class MirrorConfig(ZeroShotConfig):
    """One more setting than zero-shot has."""

    share: float = 0.5  # of nothing


@register("mirror")
class Mirror(ZeroShot):
    """Zero-shot by another name."""

    config: MirrorConfig
'''


def test_names_read_from_the_source_are_those_registered() -> None:
    assert index.method_names() == list_methods()


def test_the_packaged_index_is_up_to_date() -> None:
    """`python -m benchmarks.results methods --overwrite` writes it."""
    entries = {
        entry.name: (
            list(entry.presets),
            [field.name for field in fields(entry.config)],
        )
        for entry in method_entries()
    }
    path = Path(__file__).parents[3] / INDEX_FILE
    assert path.read_text(encoding="utf-8") == index_text(entries)


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one method; what it registers is forgotten after the test."""
    monkeypatch.setenv(PLUG_IN_FILES, "")
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    path = tmp_path / "mirror.py"
    path.write_text(METHOD, encoding="utf-8")
    return path


def test_a_method_in_one_file_is_used_by_commands(run: Run, plug_in: Path) -> None:
    def evaluate(*more: str | Path) -> Result:
        return run(
            "evaluate",
            "--dataset",
            "bundled",
            "--limit",
            8,
            "--method",
            "mirror/share=1",
            *more,
        )

    refused = evaluate()
    assert refused.refuses("unknown method 'mirror'")

    result = evaluate("--plugin", plug_in, "--out", plug_in.parent / "runs")
    assert result.code == 0
    assert "mirror" in result.stdout
    assert get_method("mirror").summary == "Zero-shot by another name"

    listed = run("methods", "mirror", "--plugin", plug_in)
    assert listed.code == 0
    assert "share" in listed.stdout


def test_child_processes_read_the_same_files(plug_in: Path) -> None:
    index.name_plug_in_files([plug_in])
    index.name_plug_in_files([plug_in])
    assert os.environ[PLUG_IN_FILES] == str(plug_in)


def test_a_broken_file_is_named_with_its_error(plug_in: Path) -> None:
    broken = plug_in.with_name("broken.py")
    broken.write_text("lr = undefined", encoding="utf-8")
    index.name_plug_in_files([broken])

    with pytest.raises(UserError, match=r"broken.py: NameError: name 'undefined'"):
        get_method("zero_shot")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a Python file"):
        index.name_plug_in_files([tmp_path / "gone.py"])
