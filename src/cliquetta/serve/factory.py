"""From what a client asked for to an adapter: names looked up, options checked, nothing opened."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from pydantic import TypeAdapter

from cliquetta.errors import UserError, look_up
from cliquetta.methods.building.allocation import AllocationLimit, StateTooLargeError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import (
    MethodEntry,
    create_method,
    method_config,
)
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.errors import ServiceError, as_refusal, conflict, too_large
from cliquetta.serve.limits import bounded
from cliquetta.serve.schema import ClassesRequest, Option, SessionInfo, SessionRequest
from cliquetta.serve.settings import Limits, Settings


def create_session(
    request: SessionRequest, settings: Settings, id: str
) -> tuple[SessionInfo, Adapter]:
    """A new session as asked, or a refusal that names the remedy."""
    _check_lists(request.classes, request.templates, settings.limits)
    with _bounded_build(settings.limits):
        info = _specify(request, settings, id)
        adapter = build_adapter(info, settings)
    return info, adapter


def change_classes(
    request: ClassesRequest, info: SessionInfo, adapter: Adapter, settings: Settings
) -> tuple[SessionInfo, Adapter]:
    """A session for another class list, with what its adapter learned apart from the classes."""
    templates = info.templates if request.templates is None else request.templates
    _check_lists(request.classes, templates, settings.limits)
    changed = info.model_copy(
        update={"classes": request.classes, "templates": templates}
    )
    if changed == info:
        return info, adapter
    with _bounded_build(settings.limits):
        other = adapter.with_classes(
            ClassPrompts(tuple(request.classes), tuple(templates))
        )
    return changed, other


@contextmanager
def _bounded_build(limits: Limits) -> Iterator[None]:
    """Build an adapter that takes no more than the limits, or refuse to."""
    remedy = "use fewer classes or a cheaper method"
    try:
        with bounded(limits.batch_seconds, remedy), AllocationLimit(limits.state_bytes):
            yield
    except StateTooLargeError as error:
        raise too_large(str(error)) from error
    except Exception as error:
        raise as_refusal(error) from error


def _check_lists(
    classes: Sequence[str], templates: Sequence[str], limits: Limits
) -> None:
    _check_list("class names", classes, limits.classes, limits)
    _check_list("templates", templates, limits.templates, limits)


def _check_list(what: str, values: Sequence[str], most: int, limits: Limits) -> None:
    if len(values) > most:
        raise too_large(f"{len(values)} {what}, at most {most} are allowed")
    longest = max(map(len, values), default=0)
    if longest > limits.class_length:
        raise too_large(f"{what} may have {limits.class_length} characters each")


def _specify(request: SessionRequest, settings: Settings, id: str) -> SessionInfo:
    model = request.model
    if model is None:
        model = next(iter(settings.models))
    look_up("model of this server", model, settings.models)
    method = look_up("method of this server", request.method, settings.methods)
    given = request.model_dump(exclude={"options", "model"})
    return SessionInfo(
        id=id,
        created=datetime.now(timezone.utc).isoformat(),
        sequence=0,
        images=0,
        model=model,
        config=resolve_config(method, request.preset, request.options),
        **given,
    )


def resolve_config(
    entry: MethodEntry, preset: str | None, options: Mapping[str, Option]
) -> dict[str, Any]:
    """The method's config in full, checked field by field, as JSON types."""
    base = method_config(entry.name, preset)
    fields = dataclasses.asdict(base)
    for name in options:
        look_up(f"option of {entry.name}", name, fields)
    adapter: TypeAdapter[Any] = TypeAdapter(entry.config)
    config = adapter.validate_python({**fields, **options})
    return dict(adapter.dump_python(config, mode="json"))


def _not_offered(kind: str, name: str) -> ServiceError:
    message = (
        f"this session uses the {kind} {name!r}, which the server no longer offers"
    )
    return conflict("not_served", message)


def build_adapter(info: SessionInfo, settings: Settings) -> Adapter:
    """A fresh adapter of a session; the same session gives the same adapter at any time."""
    models = settings.models
    if info.model not in models:
        raise _not_offered("model", info.model)
    if info.method not in settings.methods:
        raise _not_offered("method", info.method)
    entry = settings.methods[info.method]
    known = entry.config.__dataclass_fields__
    unknown = sorted(info.config.keys() - known.keys())
    if unknown:
        raise UserError(
            f"this session has settings that this version does not know ({', '.join(unknown)}): it "
            "was made by another version, start anew"
        )
    config = TypeAdapter(entry.config).validate_python(info.config)
    prompts = ClassPrompts(tuple(info.classes), tuple(info.templates))
    adapter = create_method(
        info.method, models[info.model], prompts, config, seed=info.seed
    )
    adapter.enable(reject=info.reject, calibrate=info.calibrate)
    return adapter
