"""The one form in which the service says no."""

from __future__ import annotations

import math

from starlette.exceptions import HTTPException


class ServiceError(HTTPException):
    """A refusal with a status, a code for programs and one sentence for people.

    It is an :class:`HTTPException` because frameworks pass those through wherever they arise.
    """

    def __init__(
        self, status: int, code: str, message: str, *, retry_after: float | None = None
    ) -> None:
        headers = None
        if retry_after is not None:
            headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
        super().__init__(status, message, headers)
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
