"""The widgets, without Gradio (a browser uses it in tests/browser): they fill the form in order."""

import asyncio
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cliquetta import app
from cliquetta.app.controller import Controller
from cliquetta.errors import UserError


class Widget:
    """Anything of Gradio's: remembers its label, and listens to nothing."""

    def __init__(self, *values: Any, label: str = "", **options: Any) -> None:
        self.label = label

    def change(self, *values: Any, **options: Any) -> None:
        """Nothing changes."""


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with widgets that do nothing where Gradio is not installed."""
    gradio: Any = ModuleType("gradio")
    for name in ("Radio", "Dropdown", "Slider", "File", "Textbox"):
        setattr(gradio, name, Widget)
    gradio.Group, gradio.Blocks, gradio.SelectData = nullcontext, Widget, Widget
    gradio.processing_utils = ModuleType("processing_utils")
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    path = Path(app.__path__[0]) / "interface.py"
    spec = importlib.util.spec_from_file_location("interface_without_gradio", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_widgets_are_in_the_order_of_the_form(interface: Any, controller: Controller) -> None:
    labels = [widget.label for widget in interface._form(controller)]
    assert labels == [
        *("Model", "Method", "Class names", "Images", "Shift", "Severity", "Images per batch"),
        "Images, at most 256",
    ]


def test_addresses_of_visitors_are_not_fetched(interface: Any) -> None:
    with pytest.raises(UserError, match="not fetched: http://example"):
        asyncio.run(interface.refuse_address("http://example.org/cat.png"))
