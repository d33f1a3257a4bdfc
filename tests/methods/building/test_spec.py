"""A method as it is written, and the adapter that it builds."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.spec import MethodSpec
from cliquetta.methods.building.support_set import FewShot
from tests._helpers.running import child_environment
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


def test_what_is_written_is_read_and_written_again() -> None:
    spec = MethodSpec.parse("scap:paper-views/lr=0.1/capacity=2")
    assert spec.method == "scap"
    assert spec.preset == "paper-views"
    assert dict(spec.options) == {"lr": 0.1, "capacity": 2}
    assert MethodSpec.parse(str(spec)) == spec
    assert MethodSpec.parse("tent") == MethodSpec("tent")


def test_settings_that_are_the_presets_do_not_count() -> None:
    usual = MethodSpec.parse("tda").with_options({"positive_capacity": "3"})
    assert usual == MethodSpec("tda")
    with pytest.raises(UserError, match="option of tda"):
        MethodSpec.parse("tda/capacity=3")
    with pytest.raises(UserError, match="preset of tda"):
        MethodSpec.parse("tda:nowhere")


def test_it_builds_the_method_with_its_settings() -> None:
    adapter = MethodSpec.parse("tent/lr=0.25").build(TINY, TINY_PROMPTS, seed=7)
    assert adapter.name == "tent"
    assert adapter.config.lr == 0.25
    assert adapter.seed == 7


def test_predicting_and_exporting_load_no_metrics() -> None:
    """They once built a cell of the evaluation's grid, which imports torchmetrics."""
    code = (
        "import cliquetta.inference.bulk, cliquetta.export, sys\n"
        "from cliquetta.cli.command import read_methods\n"
        "read_methods('tda', None, ['positive_capacity=2'])\n"
        "print(*[name for name in sys.modules if 'torchmetrics' in name or '.evaluation' in name])"
    )
    words = [sys.executable, "-c", code]
    printed = subprocess.check_output(words, text=True, env=child_environment())

    assert printed.strip() == ""


def test_a_fitted_file_names_its_method(tmp_path: Path) -> None:
    path = tmp_path / "tip.safetensors"
    few_shot = FewShot(TINY_IMAGES, torch.arange(10) // 2)
    fitted = fit_method("tip_adapter", TINY, TINY_PROMPTS, few_shot)
    fitted.save(path)
    spec = MethodSpec.from_fitted(path)

    assert (spec.method, spec.fitted) == ("tip_adapter", str(path))

    adapter = spec.build(TINY, TINY_PROMPTS)
    expected = fitted.predict(TINY_IMAGES).logits

    torch.testing.assert_close(
        adapter.predict(TINY_IMAGES).logits, expected, rtol=0, atol=0
    )
