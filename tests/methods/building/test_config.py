"""Configs: values that are refused, and how types are described."""

from dataclasses import dataclass
from typing import Any

import pytest

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.methods.building.config import (
    ConfigField,
    Count,
    Fraction,
    Interval,
    MethodConfig,
    config_fields,
    describe,
    field_types,
    parse,
)
from cliquetta.methods.building.registry import get_method, method_config

REFUSED: dict[str, dict[str, list[Any]]] = {
    "batclip": {"lr": [-1], "adapt_text": [1]},
    "clipartt": {"steps": [0], "template": ["a photo"]},
    "cocoop": {"hidden_dim": [0], "epochs": [0]},
    "coop": {"crop_scale": [(0.5, 0.1)], "crop_pool": [0]},
    "ctpt": {"dispersion_weight": [-1.0]},
    "dart": {"retained_weight": [2.0], "block": [-1]},
    "dmn": {"memory_weight": [0.0], "capacity": [0]},
    "domain_norm": {
        "domains": [1001],
        "evenness_limits": [(0.9, 0.7), (0.5, 1.5)],
        "settled_every": [1],
        "window": [0],
    },
    "maple": {"depth": [0, 1.5]},
    "mta": {"neighbour_fraction": [0.0], "iterations": [0]},
    "scap": {
        "topk": [0],
        "text_mix": [1.5],
        "propagation": [1.0],
        "blocks": [(), (2, 1), (-1,), (1.5,)],
        "concentration": [-1.0],
        "view_zoom": [0.5],
        "threshold": [float("nan")],
        "lr": [float("inf")],
    },
    "tda": {"positive_capacity": [0], "entropy_window": [(0.5, 0.2)]},
    "tent": {"lr": [0.0], "betas": [(0.9, 1.0), (0.9,)]},
    "tip_adapter": {"search_beta": [0.1], "search_steps": [(0, 1)]},
    "tip_adapter_f": {"batch_size": [0], "eps": [0.0]},
    "tpt": {"selection_fraction": [1.5], "text_chunk": [0]},
    "transclip": {"gaussian_temperature": [0.0], "neighbours": [0]},
    "watt": {"templates": [(), ("a",)]},
    "zero": {"selection_fraction": [0.0], "views": [0]},
    "zero_shot": {"temperature": [0.0, "hot"]},
}
CASES = [
    (m, field, v)
    for m, fields in REFUSED.items()
    for field, vs in fields.items()
    for v in vs
]


@pytest.mark.parametrize(("method", "field", "value"), CASES)
def test_values_out_of_range_are_refused(method: str, field: str, value: Any) -> None:
    with pytest.raises(UserError, match=field):
        get_method(method).config(**{field: value})


@dataclass(frozen=True)
class Example(MethodConfig):
    count: Count | None = None
    fraction: Fraction = 0.5
    window: Interval = (0.0, 1.0)
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("field", "text", "value", "kind"),
    [
        ("count", "none", None, "int, at least 1, or none"),
        ("count", "3", 3, "int, at least 1, or none"),
        ("fraction", "0.25", 0.25, "float, above 0 and at most 1"),
        (
            "window",
            "0,0.5",
            (0.0, 0.5),
            "tuple[float, float], an interval, low end first",
        ),
        ("names", "a,b", ("a", "b"), "tuple[str, ...]"),
    ],
)
def test_typed_text_becomes_a_value(
    field: str, text: str, value: Any, kind: str
) -> None:
    hint = field_types(Example)[field]
    assert parse(field, text, hint) == value
    assert describe(hint) == kind


@pytest.mark.parametrize("text", ["many", "0,1,many", ""])
def test_text_of_another_type_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="window"):
        Example(window=parse("window", text, field_types(Example)["window"]))


@pytest.mark.parametrize(
    ("method", "field", "value", "nearest"),
    [
        ("zero", "vote", "hart", "hard"),
        ("dart", "score", "plane", "plain"),
        ("watt", "mode", "sequentiall", "sequential"),
        ("coop", "class_position", "midle", "middle"),
        ("scap", "clique_combination", "conkat", "concat"),
    ],
)
def test_a_choice_names_the_nearest(
    method: str, field: str, value: str, nearest: str
) -> None:
    with pytest.raises(UnknownNameError, match=f"'{nearest}'"):
        method_config(method, options={field: value})


@dataclass(frozen=True)
class Documented(MethodConfig):
    rate: Fraction = 0.25  # Behind the field.
    names: tuple[str, ...] = ()
    """Under the field,
    in two lines."""
    bare: int = 3


def test_fields_have_their_type_default_and_the_text_beside_them() -> None:
    fields = {field.name: field for field in config_fields(Documented)}
    assert list(fields)[-3:] == ["rate", "names", "bare"]
    assert fields["rate"] == ConfigField(
        "rate", "float, above 0 and at most 1", 0.25, "Behind the field."
    )
    assert fields["names"].doc == "Under the field, in two lines."
    assert (fields["bare"].default, fields["bare"].doc) == (3, "")
