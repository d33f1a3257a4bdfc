"""From what a client asked for to an adapter: names looked up, options checked, nothing opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from pydantic import TypeAdapter

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.methods.allocation import AllocationLimit, StateTooLargeError
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import MethodEntry, create_method, method_config
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.errors import as_refusal, conflict, too_large
from cliquetta.serve.limits import bounded
from cliquetta.serve.schema import ClassesRequest, Option, SessionRequest
from cliquetta.serve.settings import Limits, Settings
from cliquetta.serve.store import SessionSpec


def create_session(
    request: SessionRequest, settings: Settings, *, id: str, owner: str
) -> tuple[SessionSpec, Adapter]:
    """A new session as asked, or a refusal that names the remedy."""
    _check_lists(request.classes, request.templates, settings.limits)
    try:
        spec = _specify(request, settings, id, owner)
    except Exception as error:
        raise as_refusal(error) from error
    return spec, _build_bounded(lambda: build_adapter(spec, settings), settings.limits)


def change_classes(
    request: ClassesRequest, spec: SessionSpec, adapter: Adapter, settings: Settings
) -> tuple[SessionSpec, Adapter]:
    """A session for another class list, with what its adapter learned apart from the classes."""
    templates = spec.templates if request.templates is None else tuple(request.templates)
    _check_lists(request.classes, templates, settings.limits)
    changed = replace(spec, classes=tuple(request.classes), templates=templates)
    if changed == spec:
        return spec, adapter

    def build() -> Adapter:
        return adapter.with_classes(ClassPrompts(changed.classes, changed.templates))

    return changed, _build_bounded(build, settings.limits)


def _build_bounded(build: Callable[[], Adapter], limits: Limits) -> Adapter:
    """An adapter that took and takes no more than the limits, or a refusal."""
    remedy = "use fewer classes or a cheaper method"
    try:
        with bounded(limits.batch_seconds, remedy), AllocationLimit(limits.state_bytes):
            return build()
    except StateTooLargeError as error:
        raise too_large(str(error)) from error
    except Exception as error:
        raise as_refusal(error) from error


def _check_lists(classes: Sequence[str], templates: Sequence[str], limits: Limits) -> None:
    for what, values, most in (
        ("class names", classes, limits.classes),
        ("templates", templates, limits.templates),
    ):
        if len(values) > most:
            raise too_large(f"{len(values)} {what}, at most {most} are allowed")
        if any(len(value) > limits.class_length for value in values):
            raise too_large(f"{what} may have {limits.class_length} characters each")


def _specify(request: SessionRequest, settings: Settings, id: str, owner: str) -> SessionSpec:
    model = next(iter(settings.models)) if request.model is None else request.model
    if model not in settings.models:
        raise UnknownNameError("model of this server", model, settings.models)
    if request.method not in settings.methods:
        raise UnknownNameError("method of this server", request.method, settings.methods)
    method = settings.methods[request.method]
    values = request.model_dump(exclude={"options"})
    values |= {name: tuple(values[name]) for name in ("classes", "templates")}
    values |= {"model": model, "config": resolve_config(method, request.preset, request.options)}
    created = datetime.now(timezone.utc).isoformat()
    return SessionSpec(id=id, owner=owner, created=created, **values)


def resolve_config(
    entry: MethodEntry, preset: str | None, options: Mapping[str, Option]
) -> dict[str, Any]:
    """The method's config in full, checked field by field, as JSON types."""
    base = method_config(entry.name, preset)
    fields = dataclasses.asdict(base)
    for name in options:
        if name not in fields:
            raise UnknownNameError(f"option of {entry.name}", name, fields)
    adapter: TypeAdapter[Any] = TypeAdapter(entry.config)
    config = adapter.validate_python({**fields, **options})
    plain: dict[str, Any] = adapter.dump_python(config, mode="json")
    return plain


def build_adapter(spec: SessionSpec, settings: Settings) -> Adapter:
    """A fresh adapter of a session; the same spec gives the same adapter at any time."""
    models, methods = settings.models, settings.methods
    for kind, name, known in (("model", spec.model, models), ("method", spec.method, methods)):
        if name not in known:
            raise conflict(
                "not_served",
                f"this session uses the {kind} {name!r}, which the server no longer offers",
            )
    prompts = ClassPrompts(spec.classes, spec.templates)
    entry = methods[spec.method]
    unknown = sorted(spec.config.keys() - entry.config.__dataclass_fields__.keys())
    if unknown:
        raise UserError(
            f"this session has settings that this version does not know ({', '.join(unknown)}): it "
            "was made by another version, start anew"
        )
    config = TypeAdapter(entry.config).validate_python(spec.config)
    adapter = create_method(spec.method, models[spec.model], prompts, config, seed=spec.seed)
    adapter.enable(reject=spec.reject, calibrate=spec.calibrate)
    return adapter
