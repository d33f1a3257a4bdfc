"""Every registered method, for tests that hold for all of them."""

import pytest

from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.checks import Build
from cliquetta.methods.building.registry import MethodEntry, method_entries
from cliquetta.types import Batch
from tests._helpers.building import build_adapter
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


@pytest.fixture(params=method_entries(), ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> MethodEntry:
    return request.param


@pytest.fixture
def build(entry: MethodEntry) -> Build:
    return lambda: build_adapter(entry, TINY, TINY_PROMPTS)


@pytest.fixture
def adapter(build: Build) -> Adapter:
    return build()


@pytest.fixture
def batch() -> Batch:
    return Batch(TINY_IMAGES, tuple(f"image-{i}" for i in range(len(TINY_IMAGES))))
