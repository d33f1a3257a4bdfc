"""From what a client asked for to an adapter: names looked up, options checked, nothing opened."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cliquetta.errors import UnknownNameError
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import MethodEntry, create_method, list_methods, method_config
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.errors import ServiceError, conflict, invalid, too_large
from cliquetta.serve.limits import Limits
from cliquetta.serve.schema import Option, SessionRequest
from cliquetta.serve.store import SessionSpec

_log = logging.getLogger(__name__)


def served_methods(allowed: Iterable[str] | None = None) -> dict[str, MethodEntry]:
    """Methods that sessions may use: all that need no fit, or those of them named."""
    known = {entry.name: entry for entry in list_methods() if entry.fit is None}
    if allowed is None:
        return known
    for name in allowed:
        if name not in known:
            raise UnknownNameError("method that can be served", name, known)
    return {name: known[name] for name in allowed}


def check_request(request: SessionRequest, limits: Limits) -> None:
    """Refuse class lists and templates beyond the limits."""
    for what, values, most in (
        ("class names", request.classes, limits.classes),
        ("templates", request.templates, limits.templates),
    ):
        if len(values) > most:
            raise too_large(f"{len(values)} {what}, at most {most} are served")
        if any(len(value) > limits.class_length for value in values):
            raise too_large(f"{what} may have {limits.class_length} characters each")


def resolve_config(
    entry: MethodEntry, preset: str | None, options: Mapping[str, Option]
) -> dict[str, Any]:
    """The method's config in full, checked field by field, as JSON types."""
    base = method_config(entry.name, preset)
    known = [field.name for field in dataclasses.fields(entry.config)]
    for name in options:
        if name not in known:
            raise UnknownNameError(f"option of {entry.name}", name, known)
    adapter: TypeAdapter[Any] = TypeAdapter(entry.config)
    config = adapter.validate_python({**dataclasses.asdict(base), **options})
    plain: dict[str, Any] = adapter.dump_python(config, mode="json")
    return plain


def build_adapter(
    spec: SessionSpec, models: Mapping[str, CLIP], methods: Mapping[str, MethodEntry]
) -> Adapter:
    """A fresh adapter of a session; the same spec gives the same adapter at any time."""
    for kind, name, known in (("model", spec.model, models), ("method", spec.method, methods)):
        if name not in known:
            raise conflict(
                "not_served",
                f"this session uses the {kind} {name!r}, which the server does not offer any more",
            )
    prompts = ClassPrompts(spec.classes, spec.templates)
    config = TypeAdapter(methods[spec.method].config).validate_python(spec.config)
    return create_method(spec.method, models[spec.model], prompts, config, seed=spec.seed)


def as_refusal(error: Exception) -> ServiceError:
    """What a client is told when a session cannot be built as asked."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return invalid(f"options.{where}: {first['msg']}" if where else first["msg"])
    if is_out_of_memory(error):
        return too_large("the session needs more memory than there is: fewer classes or options")
    if isinstance(error, ValueError | KeyError | TypeError | ArithmeticError):
        return invalid(str(error))
    _log.exception("a session could not be built", exc_info=error)
    return invalid("the method cannot be built with these options on this model")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch has an error of its own for CUDA only."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("out of memory" in str(error) or "allocate memory" in str(error))
    )
