"""Methods of other packages: an installed distribution registers them by entry points."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

import cliquetta
from benchmarks.results import method_pages
from benchmarks.results.grid_files import GRIDS, grid_file
from benchmarks.results.methods_page import methods_page
from cliquetta.cli.main import app
from cliquetta.errors import UnknownNameError
from cliquetta.evaluation.grid import read_grid
from cliquetta.methods.building import registry
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.registry import (
    create_method,
    get_method,
    method_config,
    method_entries,
    register,
)
from cliquetta.types import Prediction
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import LOGIT

MODULE = """
from dataclasses import dataclass
from cliquetta import MethodConfig, Prediction, register
from cliquetta.methods.building.config import Positive
from cliquetta.methods.building.feature_level import FixedText

@dataclass(frozen=True)
class MadeUpConfig(MethodConfig):
    factor: Positive = 2.0

@register("made_up")
class MadeUp(FixedText):
    '''Zero-shot with another scale.'''
    config: MadeUpConfig

    def _predict_features(self, features):
        logits = self.config.factor * self.scale * features[:, 0] @ self.classifier.T
        return Prediction(logits)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # modules register themselves once: those imported here would be lost
    registry._load_all()
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    yield tmp_path
    registry._load_all.cache_clear()


def distribute(folder: Path, module: str, source: str) -> None:
    """Install a package of one module with one entry point, as ``pip`` does."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[cliquetta.methods]\n{module} = {module}\n"
    )
    registry._load_all.cache_clear()


def test_a_plug_in_is_a_method_like_ours(install: Path) -> None:
    distribute(install, "made_up_plug_in", MODULE)
    assert "made_up" in [entry.name for entry in method_entries()]
    assert get_method("made_up").summary == "Zero-shot with another scale"

    config = method_config("made_up", options={"factor": "3"})
    made_up = create_method("made_up", TINY, TINY_PROMPTS, config)
    zero_shot = create_method("zero_shot", TINY, TINY_PROMPTS)
    actual = made_up.predict(TINY_IMAGES).logits
    expected = 3 * zero_shot.predict(TINY_IMAGES).logits

    assert actual.allclose(expected, atol=LOGIT)


def test_one_file_enters_a_method_everywhere(install: Path) -> None:
    """Command line, grids, pages and the contract tests follow the registry."""
    distribute(install, "another_plug_in", MODULE)
    entry = get_method("made_up")

    assert entry in method_entries()

    printed = CliRunner().invoke(app, ["methods", "--json"]).stdout
    assert "made_up" in [method["name"] for method in json.loads(printed)]

    # ImageNet's grid names its methods, each with settings of its own.
    for grid in set(GRIDS["leaderboard"]) - {"leaderboard-imagenet"}:
        specs = read_grid(grid_file(grid), root="/data")
        assert "made_up" in {spec.method for spec in specs}

    _, _, not_run = methods_page([], [], [], install).partition("not run")
    assert "`made_up`" in not_run
    assert "`factor`" in method_pages.settings_table(entry)
    assert "--method made_up" in method_pages.command(entry)


def test_nothing_but_its_file_names_a_method() -> None:
    """Baseline, defaults and examples aside: no module outside of its own lists methods."""
    texts = []
    for path in Path(cliquetta.__file__).parent.rglob("*.py"):
        if "methods" not in path.parts:
            texts.append(path.read_text(encoding="utf-8"))
    quoted = set(re.findall(r"""["'](\w+)(?=["'])""", "\n".join(texts)))
    named = {entry.name for entry in method_entries()} & quoted

    # coop: templates
    assert named <= {"zero_shot", "scap", "domain_norm", "tda", "coop"}


def test_a_broken_plug_in_is_named_and_left_out(install: Path) -> None:
    distribute(install, "broken_plug_in", "import a_module_that_is_not_there")
    with pytest.warns(UserWarning, match="broken_plug_in"):
        assert get_method("zero_shot").name == "zero_shot"
    with pytest.raises(UnknownNameError):
        get_method("broken_plug_in")


def test_an_adapter_without_a_config_is_refused() -> None:
    class Plain(FixedText):
        def _predict_features(self, features: Tensor) -> Prediction:
            return Prediction(features)

    with pytest.raises(TypeError, match="config"):
        register("plain")(Plain)
