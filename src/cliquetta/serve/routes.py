"""The routes of the service."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response

from cliquetta.methods._shared.state import plain_config
from cliquetta.serve.metrics import CONTENT_TYPE
from cliquetta.serve.parsing import read_batch
from cliquetta.serve.schema import (
    EXAMPLE_IMAGE,
    BatchAnswer,
    Health,
    JsonBatch,
    MethodInfo,
    MethodList,
    ModelInfo,
    ModelList,
    Problem,
    SessionInfo,
    SessionList,
    SessionRequest,
)
from cliquetta.serve.service import Service, own_version

REPLAYED = "Cliquetta-Replayed"
"""Header of an answer that was given before."""
BINARY = "application/octet-stream"

_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No token, or an unknown one"},
    403: {"model": Problem, "description": "Sent by a page of another site"},
    429: {"model": Problem, "description": "Too many requests; see Retry-After"},
    503: {"model": Problem, "description": "Busy, out of time or out of disk; see Retry-After"},
}
_BODY: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "Not a request that can be parsed"},
    408: {"model": Problem, "description": "The request took too long to arrive"},
    413: {"model": Problem, "description": "Beyond a limit of the server"},
    422: {"model": Problem, "description": "Understood, but not possible as asked"},
}
_SESSION: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "No such session of this client"},
    409: {"model": Problem, "description": "Does not fit what happened before"},
}


def _json_schema() -> dict[str, Any]:
    """The schema of :class:`JsonBatch` in one piece: references would point into it."""
    schema = JsonBatch.model_json_schema()
    schema["properties"]["images"]["items"] = schema.pop("$defs")["JsonImage"]
    return schema


_FORM_SCHEMA = {
    "type": "object",
    "required": ["images"],
    "additionalProperties": False,
    "properties": {
        "images": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "format": "binary"},
            "description": "JPEG, PNG, WebP, GIF, BMP or TIFF files",
        },
        "sequence": {"type": "integer", "minimum": 1, "maximum": 2**53},
        "top_k": {"type": "integer", "minimum": 1, "maximum": 2**31, "default": 5},
        "evidence": {"type": "boolean", "default": False},
    },
}
_BATCH_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {"schema": _FORM_SCHEMA},
        "application/json": {
            "schema": _json_schema(),
            "example": {"images": [{"name": "a.png", "data": EXAMPLE_IMAGE}], "sequence": 1},
        },
    },
}
_BINARY_SCHEMA = {BINARY: {"schema": {"type": "string", "format": "binary"}}}


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _owner(request: Request) -> str:
    owner: str = request.state.owner
    return owner


async def _session(
    service: Annotated[Service, Depends(_service)],
    owner: Annotated[str, Depends(_owner)],
    session: Annotated[str, Path(description="Id of a session", examples=["0f3a"])],
) -> str:
    """The id of a session that exists and belongs to the asking client."""
    return service.sessions.info(owner, session).id


ServiceOf = Annotated[Service, Depends(_service)]
OwnerOf = Annotated[str, Depends(_owner)]
SessionOf = Annotated[str, Depends(_session)]

open_router = APIRouter(tags=["server"])
router = APIRouter(prefix="/v1", tags=["sessions"], responses=_REFUSALS)


@open_router.get("/healthz")
async def health() -> Health:
    """Whether the server answers."""
    return Health(status="ok", version=own_version())


@open_router.get(
    "/metrics",
    response_class=Response,
    responses={**_REFUSALS, 200: {"content": {"text/plain": {}}, "description": "Prometheus text"}},
)
async def metrics(service: ServiceOf) -> Response:
    """Numbers for Prometheus."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/models", tags=["server"])
async def list_models(service: ServiceOf) -> ModelList:
    """The models that sessions may use; the first is the default."""
    return ModelList(
        models=[
            ModelInfo(
                name=name, id=model.id, image_size=model.image_size, weights=model.fingerprint
            )
            for name, model in service.settings.models.items()
        ]
    )


@router.get("/methods", tags=["server"])
async def list_methods(service: ServiceOf) -> MethodList:
    """The methods that sessions may use, with their presets and defaults."""
    return MethodList(
        methods=[
            MethodInfo(
                name=entry.name,
                summary=entry.summary,
                presets=sorted(entry.presets),
                config=plain_config(dataclasses.asdict(entry.config())),
            )
            for entry in service.settings.methods.values()
        ]
    )


@router.post("/sessions", status_code=201, responses=_BODY)
async def create_session(body: SessionRequest, service: ServiceOf, owner: OwnerOf) -> SessionInfo:
    """Start a session: a class list, a model and a method that adapts to what it is sent."""
    id = service.sessions.new_id()
    return await service.run(id, partial(service.sessions.create, owner, id, body))


@router.get("/sessions")
async def list_sessions(service: ServiceOf, owner: OwnerOf) -> SessionList:
    """The sessions of the asking client, oldest first."""
    return SessionList(sessions=service.sessions.owned_by(owner))


@router.get("/sessions/{session}", responses=_SESSION)
async def inspect_session(session: SessionOf, service: ServiceOf, owner: OwnerOf) -> SessionInfo:
    """How a session was made and how far it has come."""
    return service.sessions.info(owner, session)


@router.delete("/sessions/{session}", status_code=204, responses=_SESSION)
async def delete_session(session: SessionOf, service: ServiceOf) -> None:
    """Forget a session and all that it learned."""
    await service.run(session, partial(service.sessions.delete, session))


@router.post(
    "/sessions/{session}/batches",
    response_model=BatchAnswer,
    responses={
        **_SESSION,
        **_BODY,
        415: {"model": Problem, "description": "Neither a form nor JSON"},
    },
    openapi_extra={"requestBody": _BATCH_BODY},
)
async def send_batch(request: Request, session: SessionOf, service: ServiceOf) -> Response:
    """Classify a batch of images and learn from it.

    Images that cannot be read are listed under ``errors``; the others are predicted. With
    ``sequence`` (1 for the first batch, then one more each) a request may be repeated after a
    lost answer: it is applied once, and the same answer comes back.
    """
    service.pool.check_room(session)  # before the images are read
    batch = await read_batch(request, service.limits)
    work = partial(service.sessions.predict, session, batch)
    body, replayed = await service.run(session, work)
    headers = {REPLAYED: "true"} if replayed else None
    return Response(body, media_type="application/json", headers=headers)


@router.post("/sessions/{session}/reset", responses=_SESSION)
async def reset_session(session: SessionOf, service: ServiceOf) -> SessionInfo:
    """Forget what was learned; batches go on counting."""
    return await service.run(session, partial(service.sessions.reset, session))


@router.get(
    "/sessions/{session}/state",
    response_class=Response,
    responses={**_SESSION, 200: {"content": _BINARY_SCHEMA, "description": "safetensors"}},
)
async def export_state(session: SessionOf, service: ServiceOf) -> Response:
    """What the session has learned, as a safetensors file."""
    data = await service.run(session, partial(service.sessions.export_state, session))
    return Response(data, media_type=BINARY)


@router.put(
    "/sessions/{session}/state",
    responses={**_SESSION, **_BODY},
    openapi_extra={"requestBody": {"required": True, "content": _BINARY_SCHEMA}},
)
async def import_state(request: Request, session: SessionOf, service: ServiceOf) -> SessionInfo:
    """Go on from a state that an equal session exported."""
    data = await request.body()
    return await service.run(session, partial(service.sessions.import_state, session, data))
