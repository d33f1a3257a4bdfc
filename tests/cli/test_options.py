"""How the values of options are parsed."""

import pytest

from cliquetta.cli.options import read_settings, split_list


def test_settings_are_pairs() -> None:
    assert read_settings(["steps=2", "text=a=b"]) == {"steps": "2", "text": "a=b"}
    with pytest.raises(ValueError, match="key=value"):
        read_settings(["=2"])


def test_lists_lose_repeats_and_blanks() -> None:
    assert split_list("a, b,,a", "things") == ["a", "b"]
    with pytest.raises(ValueError, match="no things given"):
        split_list(" ,", "things")
