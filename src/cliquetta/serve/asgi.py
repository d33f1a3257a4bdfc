"""The HTTP service: sessions that adapt to one client each, behind one gate."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cliquetta.serve.errors import ServiceError
from cliquetta.serve.middleware import Gate, problem_response
from cliquetta.serve.routes import open_router, router
from cliquetta.serve.service import Service, Settings, own_version
from cliquetta.serve.store import Store

_log = logging.getLogger(__name__)

_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_media_type",
}


def create_app(store: Store, settings: Settings) -> FastAPI:
    """The ASGI application over an open store; its workers stop with its lifespan."""
    service = Service(store, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="CliqueTTA",
        version=own_version(),
        summary="CLIP that adapts to each client while it predicts.",
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from other sites
        redoc_url=None,
    )
    app.state.service = service
    app.openapi = partial(_document, app, settings)  # type: ignore[method-assign]
    app.include_router(open_router)
    app.include_router(router)
    app.add_middleware(
        Gate,
        tokens=settings.tokens,
        hosts=settings.hosts,
        limits=settings.limits,
        budget=service.budget,
        metrics=service.metrics,
    )
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _failed)
    return app


def _document(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """The OpenAPI document, with the names that this server knows."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        fields = document["components"]["schemas"]["SessionRequest"]["properties"]
        fields["method"]["enum"] = list(settings.methods)
        fields["model"]["enum"] = [*settings.models, None]
        app.openapi_schema = document
    return app.openapi_schema


async def _refused(request: Request, error: Exception) -> Response:
    """Every refusal in one form, those of the framework too."""
    del request
    assert isinstance(error, HTTPException)
    if not isinstance(error, ServiceError):
        code = _CODES.get(error.status_code, "refused")
        refusal = ServiceError(error.status_code, code, str(error.detail))
        refusal.headers = error.headers
        error = refusal
    return problem_response(error)


async def _invalid(request: Request, error: Exception) -> Response:
    """The first thing that is wrong with a request; what was sent is not repeated."""
    del request
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return problem_response(ServiceError(422, "invalid", f"{where}: {first['msg']}"))


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this any more."""
    del request, error
    return Response(status_code=400)


async def _failed(request: Request, error: Exception) -> Response:
    """A defect: the trace goes to the log, its number to the client."""
    del request
    incident = secrets.token_hex(4)
    _log.error("incident %s", incident, exc_info=error)
    message = f"something went wrong here (incident {incident}); the session is unchanged"
    return problem_response(ServiceError(500, "internal", message))
