"""Figures as text."""


def decimal(value: float, digits: int = 2, *, signed: bool = False) -> str:
    """Write a figure; one that rounds to zero has no minus sign.

    >>> decimal(-0.001), decimal(-0.001, signed=True), decimal(1.5, 1, signed=True)
    ('0.00', '+0.00', '+1.5')
    """
    rounded = round(value, digits) + 0.0  # which turns -0.0 into 0.0
    return f"{rounded:{'+' if signed else ''}.{digits}f}"


def signed(value: float, digits: int = 2) -> str:
    """Write a difference with its sign."""
    return decimal(value, digits, signed=True)
