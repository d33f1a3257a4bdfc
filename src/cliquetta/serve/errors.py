"""Refusals of the service: one exception for all of them, and what other errors become."""

import logging
import math
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

_log = logging.getLogger(__name__)


class ServiceError(HTTPException):
    """A refusal: a status, a code for programs, a sentence for people; frameworks pass it on."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        headers = dict(headers or {})
        if retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
        super().__init__(status, message, headers or None)
        self.code = code
        self.message = message


def not_found(what: str) -> ServiceError:
    """Something that does not exist, or that belongs to another client."""
    return ServiceError(404, "not_found", f"no such {what}")


def invalid(message: str) -> ServiceError:
    """A request that was understood and cannot be done as asked."""
    return ServiceError(422, "invalid", message)


def too_large(message: str) -> ServiceError:
    """A request beyond one of the limits."""
    return ServiceError(413, "too_large", message)


def conflict(code: str, message: str) -> ServiceError:
    """A request that does not fit what happened before."""
    return ServiceError(409, code, message)


def invalid_field(errors: Sequence[Any], prefix: str = "") -> ServiceError:
    """The first of pydantic's complaints: where and why, without what was sent."""
    where = ".".join(str(part) for part in errors[0]["loc"])
    return invalid(
        f"{prefix}{where}: {errors[0]['msg']}" if where else str(errors[0]["msg"])
    )


def incident(error: Exception) -> ServiceError:
    """A defect: the trace goes to the log, its incident number to the client."""
    number = secrets.token_hex(4)
    _log.error("incident %s", number, exc_info=error)
    message = f"something went wrong here (incident {number}); the session is unchanged"
    return ServiceError(500, "internal", message)


def as_refusal(error: Exception) -> ServiceError:
    """The refusal of a session that cannot be built as asked."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, ValidationError):
        return invalid_field(error.errors(), "options.")
    if isinstance(error, ValueError | KeyError | TypeError | ArithmeticError):
        return invalid(str(error))
    _log.exception("a session could not be built", exc_info=error)
    return invalid("the method cannot be built with these options on this model")
