"""The HTTP service as an ASGI application: its routes, its requests and its refusals."""

import asyncio
import dataclasses
import hashlib
import mimetypes
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import resources
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cliquetta import __version__
from cliquetta.methods.building.state import plain_config
from cliquetta.serve import schema
from cliquetta.serve.errors import (
    ServiceError,
    incident,
    invalid,
    invalid_field,
    too_large,
)
from cliquetta.serve.metrics import CONTENT_TYPE
from cliquetta.serve.middleware import (
    AdmissionMiddleware,
    CSPMiddleware,
    problem_response,
)
from cliquetta.serve.service import Service
from cliquetta.serve.session_store import SessionStore
from cliquetta.serve.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")
REPLAYED = "Cliquetta-Replayed"  # header of a response that was given before
BINARY = "application/octet-stream"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Policy of the service's pages: they may load from, and talk to, the service itself only."""
CLOSING_SECONDS = 2.0
"""Time for work that goes on when the server has stopped."""
_SWEEP_SECONDS = 60
_PAGES = {
    "/": "index.html",
    "/docs": "docs.html",
    "/docs.js": "docs.js",
    "/style.css": "style.css",
}
_BINARY_SCHEMA = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
_CODES |= {413: "too_large", 415: "unsupported_media_type"}
_REFUSALS = {
    400: "Not a request that can be parsed",
    401: "No token, or an unknown one",
    403: "Sent by a page of another site",
    404: "No such session of this client",
    408: "The request took too long to arrive",
    409: "Does not fit what happened before",
    413: "Beyond a limit of the server",
    415: "Neither a form nor JSON",
    422: "Understood, but not possible as asked",
    429: "Too many requests; see Retry-After",
    503: "Busy, out of time or out of disk; see Retry-After",
}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        code: {"model": schema.Problem, "description": _REFUSALS[code]}
        for code in statuses
    }


def _body_of(content: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content}}


_ANY = _refusals(401, 403, 429, 503)
_SESSION = _refusals(404, 409)
_BODY = _refusals(400, 408, 413, 422)
_UNSAVED = _refusals(503)
_UNSAVED[503]["description"] = "Sessions cannot be saved"


class Call:
    """A request: the service that it is for, and whose it is."""

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self.sessions = self.service.sessions
        self.owner: str = request.state.owner

    async def run(
        self,
        session: str,
        work: Callable[Concatenate[str, P], T],
        *given: P.args,
        **named: P.kwargs,
    ) -> T:
        """The result of ``work`` on a session, when it is the session's turn."""
        return await self.service.run(
            self.owner, session, partial(work, session, *given, **named)
        )


CallOf = Annotated[Call, Depends()]


async def _session(
    call: CallOf,
    session: Annotated[str, Path(description="Id of a session", examples=["0f3a"])],
) -> str:
    """The id of a session that exists and belongs to the asking client."""
    await asyncio.to_thread(call.sessions.check_owner, call.owner, session)
    return session


SessionOf = Annotated[str, Depends(_session)]

open_router = APIRouter(tags=["server"])
router = APIRouter(prefix="/v1", tags=["sessions"], responses=_ANY)


@open_router.get("/healthz", responses=_UNSAVED)
async def health(call: CallOf) -> schema.Health:
    """Whether the server responds and can save sessions."""
    await asyncio.to_thread(call.sessions.check_health)
    return schema.Health(status="ok", version=__version__)


@open_router.get(
    "/metrics",
    response_class=Response,
    responses={
        **_ANY,
        200: {"content": {"text/plain": {}}, "description": "Prometheus text"},
    },
)
async def metrics(call: CallOf) -> Response:
    """Numbers for Prometheus."""
    text = await asyncio.to_thread(call.service.render_metrics)
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/models", tags=["server"])
async def list_models(call: CallOf) -> schema.ModelList:
    """The models that sessions may use; the first is the default."""
    models = [
        schema.ModelInfo(
            name=name,
            id=model.id,
            image_size=model.image_size,
            weights=model.fingerprint,
        )
        for name, model in call.service.settings.models.items()
    ]
    return schema.ModelList(models=models)


@router.get("/methods", tags=["server"])
async def method_entries(call: CallOf) -> schema.MethodList:
    """The methods that sessions may use, with their presets and defaults."""
    methods = [
        schema.MethodInfo(
            name=entry.name,
            summary=entry.summary,
            presets=sorted(entry.presets),
            config=plain_config(dataclasses.asdict(entry.config())),
        )
        for entry in call.service.settings.methods.values()
    ]
    return schema.MethodList(methods=methods)


@router.post("/sessions", status_code=201, responses=_BODY)
async def create_session(
    body: schema.SessionRequest,
    call: CallOf,
    repeat: Annotated[
        str | None, Header(alias=schema.CREATION_KEY, max_length=255)
    ] = None,
) -> schema.SessionInfo:
    """Create a session: a class list, a model and a method that adapts to its batches.

    A request may be repeated with the same ``Idempotency-Key``: one session is made.
    """
    id = secrets.token_hex(16)
    if (
        repeat is not None
    ):  # hashed with its owner: nobody chooses the id of another's session
        id = hashlib.sha256(f"{call.owner} {repeat}".encode()).hexdigest()[:32]
    return await call.run(id, call.sessions.create, call.owner, body)


@router.get("/sessions")
async def list_sessions(call: CallOf) -> schema.SessionList:
    """The sessions of the asking client, oldest first."""
    return schema.SessionList(
        sessions=await asyncio.to_thread(call.sessions.owned_by, call.owner)
    )


@router.get("/sessions/{session}", responses=_SESSION)
async def inspect_session(session: SessionOf, call: CallOf) -> schema.SessionInfo:
    """Tell how a session was created and how far it has come."""
    return await asyncio.to_thread(call.sessions.info, call.owner, session)


@router.delete("/sessions/{session}", status_code=204, responses=_SESSION)
async def delete_session(session: SessionOf, call: CallOf) -> None:
    """Delete a session and all that it learned."""
    await call.run(session, call.sessions.delete)


@router.post(
    "/sessions/{session}/batches",
    response_model=schema.BatchResponse,
    responses={**_SESSION, **_BODY, **_refusals(415)},
    openapi_extra=_body_of(schema.BatchRequest.body_schemas()),
)
async def send_batch(request: Request, session: SessionOf, call: CallOf) -> Response:
    """Classify a batch of images and learn from it.

    Images that cannot be read are listed under ``errors``; the others are predicted.
    With ``sequence`` (1 for the first batch, then one more each) a request may be
    repeated after a lost response: it is applied once, and the same response comes
    back.
    """
    call.service.pool.check_room(call.owner, session)  # before the images are read
    batch = await _read_batch(request, call.service.limits.images)
    body, replayed = await call.run(session, call.sessions.predict, batch)
    headers = {REPLAYED: "true"} if replayed else None
    return Response(body, media_type="application/json", headers=headers)


@router.post("/sessions/{session}/reset", responses=_SESSION)
async def reset_session(session: SessionOf, call: CallOf) -> schema.SessionInfo:
    """Forget what was learned; batch numbers continue."""
    return await call.run(session, call.sessions.reset)


@router.put("/sessions/{session}/classes", responses={**_SESSION, **_BODY})
async def set_classes(
    body: schema.ClassesRequest, session: SessionOf, call: CallOf
) -> schema.SessionInfo:
    """Classify among other classes from the next batch on, keeping what does not depend on them.

    It takes its turn among the session's batches and may be repeated. Methods that
    learn about their classes only refuse.
    """
    return await call.run(session, call.sessions.set_classes, body)


@router.get(
    "/sessions/{session}/state",
    response_class=Response,
    responses={
        **_SESSION,
        200: {"content": _BINARY_SCHEMA, "description": "safetensors"},
    },
)
async def export_state(session: SessionOf, call: CallOf) -> Response:
    """Export what the session has learned, as a safetensors file."""
    data = await call.run(session, call.sessions.export_state)
    return Response(data, media_type=BINARY)


@router.put(
    "/sessions/{session}/state",
    responses={**_SESSION, **_BODY},
    openapi_extra=_body_of(_BINARY_SCHEMA),
)
async def import_state(
    request: Request, session: SessionOf, call: CallOf
) -> schema.SessionInfo:
    """Continue from a state that an equal session exported."""
    return await call.run(session, call.sessions.import_state, await request.body())


def create_app(store: SessionStore, settings: Settings) -> FastAPI:
    """The ASGI application over an open database; its workers stop with its lifespan."""
    service = Service(store, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(service))
        yield
        sweeping.cancel()
        await asyncio.to_thread(service.pool.close, CLOSING_SECONDS)

    app = FastAPI(
        title="CliqueTTA",
        version=__version__,
        summary="CLIP that adapts to each client while it predicts.",
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from other sites; ours are in pages/
        redoc_url=None,
    )
    app.state.service = service
    app.openapi = partial(_document, app, settings)  # type: ignore[method-assign]
    app.include_router(open_router)
    app.include_router(router)
    for path, name in _PAGES.items():
        app.add_route(path, partial(_page, name), include_in_schema=False)
    app.add_middleware(CSPMiddleware, policy=POLICY)
    app.add_middleware(
        AdmissionMiddleware,
        settings=settings,
        budget=service.budget,
        metrics=service.metrics,
    )
    for kind in (HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


async def _read_batch(request: Request, most: int) -> schema.BatchRequest:
    """The batch of a request in either form; more than ``most`` images are refused."""
    too_many = too_large(f"more than {most} images: send fewer per batch")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            batch = schema.BatchRequest.model_validate(await _read_form(request, most))
        elif kind == "application/json":
            body = await request.body()
            batch = await asyncio.to_thread(
                schema.BatchRequest.model_validate_json, body
            )
        else:
            message = "send images as multipart/form-data or application/json"
            raise ServiceError(415, "unsupported_media_type", message)
    except ValidationError as error:
        raise invalid_field(
            error.errors(include_url=False, include_input=False)
        ) from None
    except HTTPException as error:
        if "Too many files" in str(error.detail):
            raise too_many from None
        raise
    if len(batch.images) > most:
        raise too_many
    return batch


async def _read_form(request: Request, most: int) -> dict[str, object]:
    images: list[dict[str, object]] = []
    values: dict[str, object] = {"images": images}
    async with request.form(max_files=most, max_fields=8, max_part_size=4096) as fields:
        for name, value in fields.multi_items():
            if name == "images" and isinstance(value, UploadFile):
                images.append(
                    {"name": value.filename or "", "data": await value.read()}
                )
            elif isinstance(value, UploadFile) or name in values:
                raise invalid(
                    f"field {name[:50]!r}: files go into 'images', other fields once"
                )
            else:
                values[name] = value
    return values


async def _sweep(service: Service) -> None:
    """Delete sessions that are due, now and every minute."""
    while True:
        with suppress(ServiceError):  # of the disk: the next sweep will
            await asyncio.to_thread(service.sweep)
        await asyncio.sleep(_SWEEP_SECONDS)


async def _page(name: str, _: Request) -> Response:
    text = (
        resources.files(__package__).joinpath("pages", name).read_text(encoding="utf-8")
    )
    return Response(text, media_type=mimetypes.guess_type(name)[0])


def _document(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """The OpenAPI document, with the names that this server knows."""
    document = FastAPI.openapi(app)  # made once
    fields = document["components"]["schemas"]["SessionRequest"]["properties"]
    fields["method"]["enum"] = list(settings.methods)
    fields["model"]["enum"] = [*settings.models, None]
    return document


async def _refuse(request: Request, error: Exception) -> Response:
    """Every refusal in one form, those of the framework and defects too; no input is repeated."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)  # nobody reads it
    if isinstance(error, ServiceError):
        refusal = error
    elif isinstance(error, RequestValidationError):
        refusal = invalid_field(error.errors())
    elif isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "refused")
        headers = dict(error.headers or {})
        refusal = ServiceError(
            error.status_code, code, str(error.detail), headers=headers
        )
    else:
        refusal = incident(error)
    return problem_response(refusal, request.app.state.service.metrics)
