"""Every registered method, for tests that hold for all of them."""

import pytest
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.methods.checks import Build
from cliquetta.methods.registry import MethodEntry, method_entries
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.building import build_adapter


@pytest.fixture(params=method_entries(), ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> MethodEntry:
    return request.param


@pytest.fixture
def build(entry: MethodEntry, tiny_clip: CLIP, tiny_prompts: ClassPrompts) -> Build:
    return lambda: build_adapter(entry, tiny_clip, tiny_prompts)


@pytest.fixture
def adapter(build: Build) -> Adapter:
    return build()


@pytest.fixture
def batch(tiny_images: Tensor) -> Batch:
    return Batch(tiny_images, tuple(f"image-{i}" for i in range(len(tiny_images))))
