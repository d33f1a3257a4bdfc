"""Deprecated functions work, warn where they are called, and go in time."""

import re
import warnings
from pathlib import Path

import cliquetta
from cliquetta.deprecation import deprecated


@deprecated("cliquetta.predict", until="0.4")
def classify(image: str, *, times: int = 1) -> str:
    """Name an image."""
    return image * times


def test_a_deprecated_function_works_and_says_what_to_use_once_per_place() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert [classify("a", times=2) for _ in range(3)] == ["aa"] * 3
    (warning,) = caught
    assert warning.category is FutureWarning and warning.filename == __file__
    words = "is deprecated: use cliquetta.predict; it goes in version 0.4"
    assert str(warning.message).endswith(f"classify {words}")
    assert classify.__name__ == "classify" and str(classify.__doc__).startswith(
        "Name an image."
    )


def test_nothing_is_deprecated_beyond_its_time() -> None:
    now = [int(part) for part in re.findall(r"\d+", cliquetta.__version__)[:2]]
    for path in Path(cliquetta.__path__[0]).rglob("*.py"):
        if path.name == "deprecation.py":
            continue
        for until in re.findall(
            r"@deprecated\([^)]*until=\"([\d.]+)\"", path.read_text("utf-8")
        ):
            assert [int(part) for part in until.split(".")[:2]] > now, (
                f"remove it: {path}"
            )
