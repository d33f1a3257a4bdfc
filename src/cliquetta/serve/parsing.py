"""A batch from the wire: a form with files, or JSON with base64."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from cliquetta.serve.batches import BatchRequest
from cliquetta.serve.decoding import Upload
from cliquetta.serve.errors import ServiceError, invalid, too_large
from cliquetta.serve.limits import Limits
from cliquetta.serve.schema import JsonBatch

_LONGEST_NAME = 255


class _Fields(BaseModel):
    """The fields of a form beside its files; the same as those of :class:`JsonBatch`."""

    model_config = ConfigDict(extra="forbid")

    sequence: int | None = Field(None, ge=1, le=2**53)
    top_k: int = Field(5, ge=1, le=2**31)
    evidence: bool = False


async def read_batch(request: Request, limits: Limits) -> BatchRequest:
    """The batch of a request in either form; it is refused if there are too many images."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        batch = await _read_form(request, limits)
    elif kind == "application/json":
        batch = await asyncio.to_thread(_parse_json, await request.body())
    else:
        message = "send images as multipart/form-data or application/json"
        raise ServiceError(415, "unsupported_media_type", message)
    if not batch.uploads:
        raise invalid("no images: send at least one file in the field 'images'")
    if len(batch.uploads) > limits.images:
        raise too_large(f"{len(batch.uploads)} images, at most {limits.images} are served at once")
    return batch


async def _read_form(request: Request, limits: Limits) -> BatchRequest:
    # one file more than allowed, so that the refusal is ours
    form = request.form(max_files=limits.images + 1, max_fields=8, max_part_size=4096)
    async with form as fields:
        uploads, values = [], {}
        for name, value in fields.multi_items():
            if name == "images" and isinstance(value, UploadFile):
                uploads.append(Upload(_clean(value.filename), await value.read()))
            elif isinstance(value, UploadFile) or name == "images" or name in values:
                raise invalid(f"field {name[:50]!r}: files go into 'images', other fields once")
            else:
                values[name] = value
    try:
        given = _Fields.model_validate(values)
    except ValidationError as error:
        raise invalid(first_error(error)) from None
    return BatchRequest(tuple(uploads), given.sequence, given.top_k, given.evidence)


def _parse_json(body: bytes) -> BatchRequest:
    try:
        given = JsonBatch.model_validate_json(body)
    except ValidationError as error:
        raise invalid(first_error(error)) from None
    uploads = tuple(Upload(_clean(image.name), image.data) for image in given.images)
    return BatchRequest(uploads, given.sequence, given.top_k, given.evidence)


def first_error(error: ValidationError) -> str:
    """Where and why, without what was sent."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _clean(name: str | None) -> str:
    """A file name as a label: printable, short, never a path."""
    text = (name or "").encode("utf-8", "replace").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST_NAME]
