"""Settings of the operator, as typed."""

import pytest

from cliquetta.serve.settings import Limits, name_models


def test_operators_name_models_and_limits_plainly() -> None:
    assert name_models(["micro", "b16=/models/b.pt"]) == {
        "micro": "micro",
        "b16": "/models/b.pt",
    }
    for bad in (["=x"], ["a="], ["a", "a=b"]):
        with pytest.raises(ValueError, match="model"):
            name_models(bad)
    assert Limits.from_text({"images": "7", "rate": "0.5"}) == Limits(
        images=7, rate=0.5
    )
    with pytest.raises(ValueError, match="number"):
        Limits.from_text({"images": "many"})
