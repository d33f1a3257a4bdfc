"""The memory of every method, counted before it is allocated."""

import contextlib
import dataclasses
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cliquetta.errors import UserError
from cliquetta.methods.building.allocation import AllocationLimit
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.checks import Build
from cliquetta.methods.building.registry import (
    MethodEntry,
    create_method,
    method_entries,
)
from tests._helpers.building import build_adapter
from tests._helpers.tiny_world import TINY, TINY_PROMPTS

CLEAR_REFS = Path("/proc/self/clear_refs")


def test_a_state_is_counted_before_it_exists(build: Build) -> None:
    with AllocationLimit(2**40) as limit:
        adapter = build()
    assert limit.total == allocated(adapter)


def allocated(adapter: Adapter) -> int:
    """Bytes of a memory and of the copy that a reset restores."""
    memory = sum(adapter.memory[name].nbytes for name in adapter.memory)
    return 2 * memory


def counts(entry: MethodEntry) -> Iterator[Any]:
    """The config with each of its whole numbers at three millions, where it may be."""
    config = entry.config()
    for field in dataclasses.fields(entry.config):
        if type(getattr(config, field.name)) is not int:
            continue
        with contextlib.suppress(UserError):
            yield dataclasses.replace(config, **{field.name: 3_000_000})


def peak_memory() -> int:
    """The most KiB that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    "entry",
    [e for e in method_entries() if e.fit is None],
    ids=lambda entry: entry.name,
)
def test_settings_that_need_gigabytes_are_refused_before_allocation(
    entry: MethodEntry,
) -> None:
    build_adapter(entry, TINY, TINY_PROMPTS)
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")  # Linux forgets the peak of the tests before
    before = peak_memory()
    most = 50_000_000

    for config in counts(entry):
        with contextlib.suppress(UserError), AllocationLimit(most):
            adapter = create_method(entry.name, TINY, TINY_PROMPTS, config)
            assert allocated(adapter) <= most

    assert peak_memory() - before < 300_000
