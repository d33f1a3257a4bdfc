"""Errors that name the remedy."""

import pytest

from cliquetta.errors import UnknownNameError, UserError, first_line, look_up


def test_an_unknown_name_is_bad_input_that_names_the_nearest() -> None:
    entries = {"tent": 1, "tda": 2}
    assert look_up("method", "tda", entries) == 2
    with pytest.raises(UnknownNameError) as caught:
        look_up("method", "tant", entries)
    assert (
        str(caught.value)
        == "unknown method 'tant': did you mean 'tent'? known are tda, tent"
    )
    assert isinstance(caught.value, UserError) and isinstance(caught.value, KeyError)
    assert "did you mean" not in str(UnknownNameError("method", "xyz", entries))


def test_the_first_line_of_an_error() -> None:
    assert first_line(OSError(" full\nand more")) == "full"
    assert first_line(OSError()) == "OSError"
