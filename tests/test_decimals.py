"""Figures as text."""

from cliquetta.decimals import decimal, signed


def test_what_rounds_to_zero_has_no_minus_sign() -> None:
    assert decimal(-0.004) == "0.00"
    assert signed(-0.004) == "+0.00"


def test_digits_and_signs() -> None:
    assert decimal(1.25, 1) == "1.2"
    assert signed(-1.5, 1) == "-1.5"
    assert signed(2) == "+2.00"
