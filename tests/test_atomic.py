"""Files appear as any other program would make them, unless they are private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cliquetta.atomic import write_atomically


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_modes_follow_the_mask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "state", b"x")
        write_atomically(tmp_path / "private", b"x", 0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600
