"""OpenAI's and open_clip's files: read without running code, in the right activation and shape."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model.factory import create_model
from tests._helpers.openai_module import OpenAIModule, assert_same
from tests._helpers.tolerance import FEATURE


@pytest.mark.filterwarnings("error::UserWarning")
def test_torchscript_archive(
    archive: Path, module: Any, pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the archive's code must not be loaded")

    monkeypatch.setattr(torch.jit, "load", refuse)
    model = create_model(archive)
    assert_same(model, module, pixels)
    vision = model.config.vision
    assert (vision.width, vision.layers, vision.heads, vision.patch_size) == (
        128,
        2,
        2,
        8,
    )
    assert vision.activation == "quick_gelu"
    assert vision.image_size == 32
    assert_same(create_model(f"openai:{archive}"), module, pixels)


@pytest.mark.filterwarnings("error::UserWarning")
def test_half_precision_becomes_float32(
    module: Any, pixels: Tensor, tmp_path: Path
) -> None:
    class Wrapped(torch.nn.Module):
        """Only holds what is saved; nothing needs to run in half precision."""

        def __init__(self) -> None:
            super().__init__()
            self.visual = OpenAIModule().half().visual

        def forward(self, x: Tensor) -> Any:
            return x

    torch.jit.trace(Wrapped(), torch.ones(1), check_trace=False).save(
        str(tmp_path / "half.pt")
    )
    model = create_model(tmp_path / "half.pt")
    assert model.dtype == torch.float32
    assert model.text is None
    wanted = OpenAIModule().half().float().visual(pixels)
    torch.testing.assert_close(
        model.encode_image(pixels), wanted, atol=FEATURE, rtol=FEATURE
    )


@pytest.mark.filterwarnings("error::UserWarning")
def test_state_dict_with_settings_is_openai(
    module: Any, pixels: Tensor, tmp_path: Path
) -> None:
    torch.save(module.state_dict(), tmp_path / "state.pt")
    assert_same(create_model(tmp_path / "state.pt"), module, pixels)
