"""A service on the tiny model for every test that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cliquetta.model.clip import CLIP
from tests._helpers.serve_setup import Local, local_service


@pytest.fixture
def service(tmp_path: Path, tiny_clip: CLIP) -> Iterator[Local]:
    """An empty service without tokens."""
    with local_service(tmp_path / "sessions", tiny_clip) as local:
        yield local
