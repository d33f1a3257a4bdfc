"""The widgets, without Gradio (a browser uses it in tests/browser): they fill the form in order."""

import asyncio
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cliquetta import app
from cliquetta.app.controller import Controller
from cliquetta.errors import UserError


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with widgets that do nothing where Gradio is not installed."""
    gradio = MagicMock()
    for name in ("Radio", "Dropdown", "Slider", "File", "Textbox"):
        setattr(gradio, name, lambda *values, **options: MagicMock(**options))
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    return SimpleNamespace(
        **runpy.run_path(str(Path(app.__path__[0]) / "interface.py"))
    )


def test_widgets_are_in_the_order_of_the_form(
    interface: Any, controller: Controller
) -> None:
    labels = [widget.label for widget in interface._form(controller)]
    assert labels == [
        *(
            "Model",
            "Method",
            "Class names",
            "Images",
            "Shift",
            "Severity",
            "Images per batch",
        ),
        "Images, at most 256",
    ]


def test_addresses_of_visitors_are_not_fetched(interface: Any) -> None:
    with pytest.raises(UserError, match="not fetched: http://example"):
        asyncio.run(interface.refuse_address("http://example.org/cat.png"))
