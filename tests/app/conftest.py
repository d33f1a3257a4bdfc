"""Visitors' sessions and a controller on the tiny model, and the form that visitors fill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cliquetta.app.controller import STREAM, Controller, Form, Pages
from cliquetta.app.session import AppSession
from cliquetta.model.clip import CLIP
from cliquetta.serve.schema import SessionRequest
from cliquetta.serve.settings import Limits, Settings
from tests._helpers.serve_setup import picture

NAMES = ("airplane", "automobile", "bird", "cat", "frog", "truck")
FOG = ("bundled@fog:3", 6)
FORM = Form("tiny", "tent", ",".join(NAMES), STREAM, "fog", 3, 6)
Make = Callable[..., AppSession]


@pytest.fixture
def make(tiny_clip: CLIP) -> Make:
    def build(method: str = "tent", limits: Limits | None = None) -> AppSession:
        settings = Settings({"tiny": tiny_clip}, limits=limits or Limits())
        return AppSession(settings, SessionRequest(classes=list(NAMES), method=method))

    return build


@pytest.fixture
def controller(tiny_clip: CLIP, tmp_path: Path) -> Controller:
    return Controller(Settings({"tiny": tiny_clip}), tmp_path)


def photos(folder: Path, seeds: range) -> list[Path]:
    paths = [folder / f"photo{seed}.png" for seed in seeds]
    for seed, path in zip(seeds, paths, strict=True):
        path.write_bytes(picture(seed))
    return paths


def predicted(shown: Any) -> list[tuple[str, float]]:
    return [(row.after, row.after_probability) for row in shown.rows]


Press = Callable[..., tuple[AppSession, Pages]]


@pytest.fixture
def press(controller: Controller) -> Press:
    """Press "Next batch" with a form: the visitor's session and what the page shows."""

    def call(
        session: AppSession | None = None, **changes: Any
    ) -> tuple[AppSession, Pages]:
        session, pages = controller.next_batch(
            session, replace(FORM, **changes), "class"
        )
        assert session is not None
        return session, pages

    return call
