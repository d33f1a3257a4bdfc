"""The documented fields of a config dataclass, read from its source."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from cliquetta.methods.building.config import describe, field_types


@dataclass(frozen=True)
class ConfigField:
    """One option of a method."""

    name: str
    type: str
    default: Any
    """``None`` also where there is no default."""
    doc: str


def config_fields(config: type[Any]) -> list[ConfigField]:
    """All fields of ``config``, also inherited ones, each with the text that stands under it."""
    docs: dict[str, str] = {}
    for parent in reversed(config.__mro__):
        if dataclasses.is_dataclass(parent):
            docs |= _field_docs(parent)
    kinds = field_types(config)
    return [
        ConfigField(
            field.name,
            describe(kinds[field.name]),
            _default(field),
            docs.get(field.name, ""),
        )
        for field in dataclasses.fields(config)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _field_docs(config: type[Any]) -> dict[str, str]:
    """The string under each field, or the comment behind it."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except OSError:  # typed in a shell: there is no file to read
        return {}
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    docs = {}
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        text = _string(after) or _comment(lines[(statement.end_lineno or 1) - 1])
        if text:
            docs[statement.target.id] = " ".join(text.split())
    return docs


def _string(statement: ast.stmt | None) -> str:
    """The text of a statement that is nothing but a string."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else ""
    return ""


def _comment(line: str) -> str:
    return line.partition("  # ")[2]
