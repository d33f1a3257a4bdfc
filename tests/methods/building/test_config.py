"""Configs: values that are refused, and how types are described."""

from dataclasses import dataclass
from typing import Any

import pytest

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.methods.building.config import (
    Count,
    Fraction,
    Interval,
    MethodConfig,
    describe,
    field_types,
    parse,
)
from cliquetta.methods.registry import get_method, method_config

REFUSED: dict[str, list[tuple[str, Any, str]]] = {
    "batclip": [("lr", -1, "above 0"), ("adapt_text", 1, "true or false")],
    "clipartt": [("steps", 0, "at least 1"), ("template", "a photo", "{} once")],
    "cocoop": [("hidden_dim", 0, "at least 1"), ("epochs", 0, "at least 1")],
    "coop": [("crop_scale", (0.5, 0.1), "low end first"), ("crop_pool", 0, "at least 1")],
    "ctpt": [("dispersion_weight", -1.0, "0 or more")],
    "dart": [("retained_weight", 2.0, "between 0 and 1"), ("block", -1, "0 or more")],
    "dmn": [("memory_weight", 0.0, "above 0"), ("capacity", 0, "at least 1")],
    "domain_norm": [
        ("confident_fraction", 0.0, "above 0"),
        ("evenness_floor", 0.95, "must not be above evenness_cap"),
        ("settled_every", 1, "must not be below step_every"),
        ("warmup_images", -1, "0 or more"),
    ],
    "maple": [("depth", 0, "at least 1"), ("depth", 1.5, "a whole number")],
    "mta": [("neighbour_fraction", 0.0, "above 0 and at most 1"), ("iterations", 0, "at least 1")],
    "scap": [
        ("topk", 0, "at least 1"),
        ("text_mix", 1.5, "between 0 and 1"),
        ("propagation", 1.0, "0 or more and below 1"),
        ("blocks", (), "different and ascending"),
        ("blocks", (2, 1), "different and ascending"),
        ("blocks", (-1,), "different and ascending"),
        ("blocks", (1.5,), "a whole number"),
        ("concentration", -1.0, "0 or more"),
        ("view_zoom", 0.5, "at least 1"),
        ("threshold", float("nan"), "a finite number"),
        ("lr", float("inf"), "a finite number"),
    ],
    "tda": [("positive_capacity", 0, "at least 1"), ("entropy_window", (0.5, 0.2), "low end")],
    "tent": [("lr", 0.0, "above 0"), ("betas", (0.9, 1.0), "below 1"), ("betas", (0.9,), "tuple")],
    "tip_adapter": [("search_beta", 0.1, "above 0.1"), ("search_steps", (0, 1), "at least 1")],
    "tip_adapter_f": [("batch_size", 0, "at least 1"), ("eps", 0.0, "above 0")],
    "tpt": [("selection_fraction", 1.5, "at most 1"), ("text_chunk", 0, "at least 1")],
    "transclip": [("gaussian_temperature", 0.0, "above 0"), ("neighbours", 0, "at least 1")],
    "watt": [("templates", (), "at least one"), ("templates", ("a",), "{} once")],
    "zero": [("selection_fraction", 0.0, "above 0"), ("views", 0, "at least 1")],
    "zero_shot": [("temperature", 0.0, "above 0"), ("temperature", "hot", "a finite number")],
}


@pytest.mark.parametrize(
    ("method", "field", "value", "message"),
    [(method, *case) for method, cases in REFUSED.items() for case in cases],
)
def test_values_out_of_range_are_refused(method: str, field: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"{field} .*{message}.*|{message}"):
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
        ("window", "0,0.5", (0.0, 0.5), "tuple[float, float], an interval, low end first"),
        ("names", "a,b", ("a", "b"), "tuple[str, ...]"),
    ],
)
def test_typed_text_becomes_a_value(field: str, text: str, value: Any, kind: str) -> None:
    hint = field_types(Example)[field]
    assert parse(field, text, hint) == value
    assert describe(hint) == kind


@pytest.mark.parametrize("text", ["many", "0,1,many", ""])
def test_text_of_another_type_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"window (is|must be) tuple"):
        Example(window=parse("window", text, field_types(Example)["window"]))


def test_a_choice_names_the_nearest() -> None:
    for method, field, value, nearest in (
        ("zero", "vote", "hart", "hard"),
        ("dart", "score", "plane", "plain"),
        ("watt", "mode", "sequentiall", "sequential"),
        ("coop", "class_position", "midle", "middle"),
        ("scap", "clique_combination", "conkat", "concat"),
    ):
        with pytest.raises(UnknownNameError, match=f"did you mean '{nearest}'"):
            method_config(method, options={field: value})
