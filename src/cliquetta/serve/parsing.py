"""A batch from the wire: a form with files, or JSON with base64; one schema for both."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cliquetta.serve.errors import ServiceError, invalid, invalid_field, too_large
from cliquetta.serve.schema import BatchRequest


async def read_batch(request: Request, most: int) -> BatchRequest:
    """The batch of a request in either form; more than ``most`` images are refused."""
    too_many = too_large(f"more than {most} images: send fewer per batch")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            batch = BatchRequest.model_validate(await _read_form(request, most))
        elif kind == "application/json":
            body = await request.body()
            batch = await asyncio.to_thread(BatchRequest.model_validate_json, body)
        else:
            message = "send images as multipart/form-data or application/json"
            raise ServiceError(415, "unsupported_media_type", message)
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False, include_input=False)) from None
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
                images.append({"name": value.filename or "", "data": await value.read()})
            elif isinstance(value, UploadFile) or name in values:
                raise invalid(f"field {name[:50]!r}: files go into 'images', other fields once")
            else:
                values[name] = value
    return values
