"""The wire format: requests and responses, shared by the service, its client and its docs."""

import hashlib
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from cliquetta.data.inputs import from_base64
from cliquetta.methods.building.registry import DEFAULT_METHOD as DEFAULT_METHOD
from cliquetta.prompts.classes import DEFAULT_TEMPLATE

Option = bool | int | float | str | None | list[int | float | str]

# header: creations with the same key give the same session
CREATION_KEY = "Idempotency-Key"
SESSION_HEADER = "X-Session-Id"
"""Header by which balancers may keep a session on one replica; no server reads it."""
_LONGEST_NAME = 255
_NAMES = ["cat", "dog", "ship"]
EXAMPLE_SESSION: dict[str, Any] = {"classes": _NAMES, "method": "zero_shot", "seed": 0}
EXAMPLE_IMAGE = (  # a red PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def _raw_bytes(value: Any) -> Any:
    """Bytes of base64 text (strictly: pydantic's own decoder skips what it does not know)."""
    return from_base64(value) if isinstance(value, str) else value  # a file of a form


def _printable(name: Any) -> Any:
    """A file name as a label: printable, short, never a path that is opened."""
    if not isinstance(name, str):
        return name
    text = name.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST_NAME]


class _Model(BaseModel):
    # protected_namespaces: ``model`` is a field of ours. NaN and infinity are not JSON.
    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), allow_inf_nan=False, frozen=True
    )


class SessionRequest(_Model):
    """How a new session classifies and adapts; only its classes may change later."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_SESSION]})

    classes: list[str] = Field(min_length=1)  # all different
    # each holds `{}` once for the class name; several are averaged
    templates: list[str] = Field(default=[DEFAULT_TEMPLATE], min_length=1)
    model: str | None = None  # one of `/v1/models`; the first of them if left out
    method: str = DEFAULT_METHOD  # one of `/v1/methods`
    preset: str | None = None  # one of the method's presets instead of its defaults
    options: dict[str, Option] = {}  # fields of the method's config to override
    # for the method and augmented views; JSON readers are not exact beyond 2**53
    seed: int = Field(default=0, ge=0, le=2**53)
    # name images of none of the classes: how many of them to look for, such as 0.9
    reject: float | None = Field(default=None, gt=0, lt=1)
    calibrate: bool = False  # scale probabilities by a temperature that needs no labels


class ClassesRequest(_Model):
    """Another class list for a session."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"classes": ["cat", "dog", "bird"]}]}
    )

    classes: list[str] = Field(min_length=1)  # all different
    templates: list[str] | None = Field(
        default=None, min_length=1
    )  # the session's if left out


class SessionInfo(_Model):
    """A session and how far it has come."""

    id: str
    classes: list[str]
    templates: list[str]
    model: str
    method: str
    preset: str | None
    config: dict[str, Any]  # the method's config in full
    seed: int
    reject: float | None = None  # as it was asked for
    calibrate: bool = False  # whether probabilities are scaled
    created: str  # UTC, ISO 8601
    sequence: int  # number of the last batch; 0 before the first
    images: int  # images predicted in all batches


class SessionList(_Model):
    """The sessions of the asking client, oldest first."""

    sessions: list[SessionInfo]


class Upload(_Model):
    """One image of a batch."""

    # returned with the prediction; never opened
    name: Annotated[str, BeforeValidator(_printable)] = ""
    # JPEG, PNG, WebP, GIF, BMP, TIFF, or HEIC if the server can; in JSON as base64 or
    # `data:` URI
    data: Annotated[
        bytes,
        BeforeValidator(_raw_bytes),
        WithJsonSchema({"type": "string", "format": "base64"}),
    ]


class BatchRequest(_Model):
    """A batch, as a form with files ``images`` or as JSON with base64, which is a third larger."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"images": [{"name": "a.png", "data": EXAMPLE_IMAGE}]}]
        }
    )

    images: list[Upload] = Field(min_length=1)
    # number of this batch, 1 for the first: makes a repeat safe
    sequence: int | None = Field(default=None, ge=1, le=2**53)
    top_k: int = Field(default=5, ge=1, le=2**31)  # classes to list per image
    evidence: bool = False  # whether to return what the predictions are based on

    @property
    def digest(self) -> str:
        """Hash of everything that the response depends on; tells a repeat from another batch."""
        digest = hashlib.sha256(repr((self.top_k, self.evidence)).encode())
        for image in self.images:
            digest.update(repr((image.name, len(image.data))).encode() + image.data)
        return digest.hexdigest()

    @classmethod
    def body_schemas(cls) -> dict[str, Any]:
        """Schema for each content type, in one piece: references would point into it."""
        schema = cls.model_json_schema()
        image = schema.pop("$defs")["Upload"]
        examples = {"example": schema.pop("examples")[0]}

        def with_items(items: dict[str, Any]) -> dict[str, Any]:
            images = {**schema["properties"]["images"], "items": items}
            return {**schema, "properties": {**schema["properties"], "images": images}}

        file = {"type": "string", "format": "binary"}
        return {
            "multipart/form-data": {"schema": with_items(file)},
            "application/json": {"schema": with_items(image), **examples},
        }


class Scored(_Model):
    """A class and its probability."""

    label: str
    probability: float


class ImagePrediction(_Model):
    """The prediction for one image; ``index`` is its position in the request, from 0."""

    index: int
    name: str
    label: str
    probability: float
    top: list[Scored]
    # in sessions with `reject`: whether it looks like none of the classes, and how
    # unsure (0 to 1)
    rejected: bool | None = None
    rejection_score: float | None = None


class ImageProblem(_Model):
    """An image that was left out of the batch, and why."""

    index: int
    name: str
    reason: str


class BatchResponse(_Model):
    """The response to a batch; it is on the server's disk before it is sent."""

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
    config: dict[str, Any]  # defaults


class MethodList(_Model):
    """All methods of this server."""

    methods: list[MethodInfo]


class ModelInfo(_Model):
    """A model that sessions may use."""

    name: str
    id: str
    image_size: int
    weights: str  # hash of the weights


class ModelList(_Model):
    """All models of this server; the first is the default."""

    models: list[ModelInfo]


class Health(_Model):
    """The server responds and can save sessions."""

    status: str
    version: str


class Problem(_Model):
    """Why a request was refused: a code for programs, a sentence for people."""

    code: str
    message: str
