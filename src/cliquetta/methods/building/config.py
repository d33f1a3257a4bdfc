"""Configs of methods: frozen dataclasses whose annotations limit the values.

>>> @dataclass(frozen=True)
... class ExampleConfig(MethodConfig):
...     lr: Positive = 1e-3
...     steps: Count = 1
>>> ExampleConfig(steps=0)
Traceback (most recent call last):
cliquetta.errors.UserError: steps must be at least 1, got 0

All methods spell a setting alike: ``lr``, ``betas``, ``weight_decay``, ``steps``,
``views`` (how many), ``view_kind``, ``view_zoom``, ``selection_fraction``,
``temperature``, ``templates``.
"""

import ast
import dataclasses
import inspect
import json
import math
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.types import ViewSpec

Config = TypeVar("Config")


@dataclass(frozen=True)
class Rule:
    """Condition on the value of a field, as stated after "must be"."""

    text: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("at least 1", lambda value: value >= 1)]
Positive = Annotated[float, Rule("above 0", lambda value: value > 0)]
NonNegativeCount = Annotated[int, Rule("0 or more", lambda value: value >= 0)]
NonNegative = Annotated[float, Rule("0 or more", lambda value: value >= 0)]
Fraction = Annotated[float, Rule("above 0 and at most 1", lambda value: 0 < value <= 1)]
Weight = Annotated[float, Rule("between 0 and 1", lambda value: 0 <= value <= 1)]
Decay = Annotated[float, Rule("0 or more and below 1", lambda value: 0 <= value < 1)]
Template = Annotated[
    str,
    Rule("a text with {} once, for the class name", lambda text: text.count("{}") == 1),
]
_ASCENDING = Rule("an interval, low end first", lambda ends: ends[0] <= ends[1])
Interval = Annotated[tuple[float, float], _ASCENDING]
CropScale = Annotated[tuple[Fraction, Fraction], _ASCENDING]


@dataclass(frozen=True)
class MethodConfig:
    """Base of all configs: every field is checked against its annotation."""

    @property
    def spec(self) -> ViewSpec | None:
        """The views that the method looks at; ``None`` for the image alone."""
        return None

    def __post_init__(self) -> None:
        """Check every field; subclasses add conditions on several fields together."""
        for name, hint in field_types(type(self)).items():
            check(name, getattr(self, name), hint)


def field_types(config: type[Any]) -> dict[str, Any]:
    """Resolve the annotations of the fields of a dataclass, with their rules."""
    hints = get_type_hints(config, include_extras=True)
    return {name: hints[name] for name in config.__dataclass_fields__ if name in hints}


def check(name: str, value: Any, hint: Any) -> None:
    """Raise a :class:`UserError` unless a value suits its field's annotation."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        check(name, value, arguments[0])
        for rule in arguments[1:]:
            if isinstance(rule, Rule) and not rule.holds(value):
                raise UserError(f"{name} must be {rule.text}, got {value!r}")
    elif origin is Literal:
        if value not in arguments:
            raise UnknownNameError(f"value of {name}", str(value), arguments)
    elif origin in (Union, types.UnionType):
        if value is not None:
            check(name, value, _present(arguments))
    elif origin is tuple:
        _check_tuple(name, value, hint)
    elif hint in _KINDS:
        kind, text = _KINDS[hint]
        is_kind = isinstance(value, kind)
        # True is an int in Python, but no number of views.
        if isinstance(value, bool) and hint is not bool:
            is_kind = False
        if not is_kind or (hint is float and not math.isfinite(value)):
            raise UserError(f"{name} must be {text}, got {value!r}")


def _check_tuple(name: str, value: Any, hint: Any) -> None:
    """Check a tuple of fixed length, or of any (``tuple[int, ...]``), part by part."""
    kinds = get_args(hint)
    is_tuple = isinstance(value, tuple)

    # ``tuple[int, ...]``: each part is of the first kind.
    if is_tuple and kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)

    if not is_tuple or len(value) != len(kinds):
        raise UserError(f"{name} must be {describe(hint)}, got {value!r}")
    for part, kind in zip(value, kinds, strict=True):
        check(name, part, kind)


_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a finite number"),
    str: (str, "text"),
}
_TRUTH = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
}


def parse(name: str, text: Any, hint: Any) -> Any:
    """Parse a value as typed on a command line; JSON lists become tuples."""
    if not isinstance(text, str):
        return tuple(text) if isinstance(text, list) else text
    origin = get_origin(hint)
    arguments = get_args(hint)

    # What wraps another type.
    if origin is Annotated:
        return parse(name, text, arguments[0])
    if origin in (Union, types.UnionType):
        if text.lower() in {"none", "null"}:
            return None
        return parse(name, text, _present(arguments))

    # A list of parts, or a single value.
    try:
        if origin is tuple:
            parts = [part for part in text.split(",") if part]
            return tuple(parse(name, part, arguments[0]) for part in parts)
        if hint is bool:
            return _TRUTH[text.lower()]
        if hint in (int, float):
            return hint(text)
        return text
    except (KeyError, ValueError):
        raise UserError(f"{name} is {describe(hint)}, {text!r} is not") from None


def describe(hint: Any) -> str:
    """Write an annotation for users: ``int, at least 1``."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        rules = [rule.text for rule in arguments[1:] if isinstance(rule, Rule)]
        return ", ".join([describe(arguments[0]), *rules])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return f"{describe(_present(arguments))}, or none"
    if origin is tuple:
        kinds = ["..." if part is Ellipsis else describe(part) for part in arguments]
        # A description with a comma, such as ``int, at least 1``, is no list of two.
        has_comma = any("," in kind for kind in kinds)
        separator = "; " if has_comma else ", "
        return f"tuple[{separator.join(kinds)}]"
    return getattr(hint, "__name__", str(hint))


def _present(alternatives: tuple[Any, ...]) -> Any:
    """Return the type of an optional field when it is not ``None``."""
    return next(kind for kind in alternatives if kind is not types.NoneType)


def read_presets(method: str, config: type[Config]) -> dict[str, Config]:
    """Read presets, chosen by the authors per dataset, from ``data/<method>.json``."""
    path = files("cliquetta.methods").joinpath(f"data/{method}.json")
    text = path.read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = json.loads(text)["presets"]

    presets = {}
    for name, entry in entries.items():
        presets[name] = config(**entry["options"])
    return presets


@dataclass(frozen=True)
class ConfigField:
    """One option of a method."""

    name: str
    type: str
    default: Any  # ``None`` also where there is no default.
    doc: str


def config_fields(config: type[Any]) -> list[ConfigField]:
    """List the fields, also inherited ones, with the text behind or under each."""
    docs: dict[str, str] = {}
    for parent in reversed(config.__mro__):
        if dataclasses.is_dataclass(parent):
            docs |= _field_docs(parent)
    kinds = field_types(config)
    return [
        ConfigField(f.name, describe(kinds[f.name]), _default(f), docs.get(f.name, ""))
        for f in dataclasses.fields(config)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _field_docs(config: type[Any]) -> dict[str, str]:
    """Read the string under each field, or the comment behind it."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except OSError:  # typed in a shell: there is no file to read
        return {}
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    docs = {}
    following = [*body.body[1:], None]
    for statement, after in zip(body.body, following, strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        if not isinstance(statement.target, ast.Name):
            continue
        last_line = lines[(statement.end_lineno or 1) - 1]
        text = last_line.partition("  # ")[2]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            constant = after.value.value
            text = constant if isinstance(constant, str) else text
        if text:
            docs[statement.target.id] = " ".join(text.split())
    return docs
