"""What goes over the wire: requests and answers, shared by the service and its client."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, EncodedBytes, EncoderProtocol, Field

from cliquetta.errors import UserError
from cliquetta.prompts.classes import DEFAULT_TEMPLATE

Option = bool | int | float | str | None | list[int | float | str]

EXAMPLE_SESSION: dict[str, Any] = {
    "classes": ["cat", "dog", "ship"],
    "method": "zero_shot",
    "seed": 0,
}
EXAMPLE_IMAGE = (  # a red PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


class _StrictBase64(EncoderProtocol):
    """Base64 without room for anything else; pydantic's own drops what it does not know."""

    @classmethod
    def decode(cls, data: bytes) -> bytes:
        """The bytes of base64 text."""
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error:
            raise UserError("not base64") from None

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        """Base64 text of bytes."""
        return base64.b64encode(value)

    @classmethod
    def get_json_format(cls) -> str:
        """The name in a JSON schema."""
        return "base64"


class _Model(BaseModel):
    # protected_namespaces: ``model`` is a word of ours. NaN and infinity are not JSON.
    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), allow_inf_nan=False, frozen=True
    )


class SessionRequest(_Model):
    """How a new session classifies and adapts; fixed for its life."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_SESSION]})

    classes: Annotated[list[str], Field(min_length=1)]
    """Class names, all different."""
    templates: Annotated[list[str], Field(min_length=1)] = [DEFAULT_TEMPLATE]
    """Each holds ``{}`` once for the class name; several are averaged."""
    model: str | None = None
    """One of ``/v1/models``; the first of them if left out."""
    method: str = "scap_domain"
    """One of ``/v1/methods``."""
    preset: str | None = None
    """One of the method's presets instead of its defaults."""
    options: dict[str, Option] = {}
    """Values of the method's config to replace."""
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Of the method and of augmented views; beyond 2**53 not all readers of JSON are exact."""


class SessionInfo(_Model):
    """A session as it stands."""

    id: str
    classes: list[str]
    templates: list[str]
    model: str
    method: str
    preset: str | None
    config: dict[str, Any]
    """The method's config in full."""
    seed: int
    created: str
    """UTC, ISO 8601."""
    sequence: int
    """Number of the last batch; 0 before the first."""
    images: int
    """Predicted in all batches."""


class SessionList(_Model):
    """The sessions of the asking client, oldest first."""

    sessions: list[SessionInfo]


class JsonImage(_Model):
    """An image inside a JSON request."""

    name: str = ""
    """Comes back with the answer; never opened."""
    data: Annotated[bytes, EncodedBytes(encoder=_StrictBase64)]
    """The file's bytes in base64."""


class JsonBatch(_Model):
    """A batch as JSON; the same as a form with files ``images``, a third larger."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"images": [{"name": "a.png", "data": EXAMPLE_IMAGE}]}]}
    )

    images: Annotated[list[JsonImage], Field(min_length=1)]
    sequence: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Number of this batch, 1 for the first: makes a repeat safe."""
    top_k: Annotated[int, Field(ge=1, le=2**31)] = 5
    """Classes to list per image."""
    evidence: bool = False
    """Whether to tell what the answer rests on."""


class Scored(_Model):
    """A class and its probability."""

    label: str
    probability: float


class ImagePrediction(_Model):
    """The answer for one image; ``index`` is its place in the request, from 0."""

    index: int
    name: str
    label: str
    probability: float
    top: list[Scored]


class ImageProblem(_Model):
    """An image that was left out of the batch, and why."""

    index: int
    name: str
    reason: str


class BatchAnswer(_Model):
    """The answer for a batch; it is on the server's disk before it is sent."""

    session: str
    sequence: int
    predictions: list[ImagePrediction]
    errors: list[ImageProblem]
    evidence: dict[str, Any] | None = None


class MethodInfo(_Model):
    """A method that sessions may use."""

    name: str
    summary: str
    presets: list[str]
    config: dict[str, Any]
    """Defaults."""


class MethodList(_Model):
    """All methods of this server."""

    methods: list[MethodInfo]


class ModelInfo(_Model):
    """A model that sessions may use."""

    name: str
    id: str
    image_size: int
    weights: str
    """Hash of the weights."""


class ModelList(_Model):
    """All models of this server; the first is the default."""

    models: list[ModelInfo]


class Health(_Model):
    """The server answers."""

    status: str
    version: str


class Problem(_Model):
    """Why a request was refused: a code for programs, a sentence for people."""

    code: str
    message: str
