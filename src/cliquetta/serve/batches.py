"""One batch of images from a client: decoded, predicted, answered.

Images are decoded one by one and refused one by one, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cliquetta.data.images import HEIF, ImageError, open_image
from cliquetta.data.views import image_views, to_pixels
from cliquetta.methods.base import Adapter, NonFiniteError
from cliquetta.model.preprocess import Preprocess
from cliquetta.serve.errors import conflict, invalid, too_large
from cliquetta.serve.limits import bounded
from cliquetta.serve.schema import (
    BatchAnswer,
    BatchRequest,
    ImagePrediction,
    ImageProblem,
    Scored,
    Upload,
)
from cliquetta.serve.settings import Limits
from cliquetta.serve.store import Answer, Progress, SessionSpec
from cliquetta.types import Batch, Prediction, ViewSpec

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", HEIF)
"""Pillow's decoders that a client's bytes may reach; others are large, rare or run programs.

HEIF is read where the operator has installed pillow-heif."""

_START_OF_SCAN = b"\xff\xda"
_MOST_SCANS = 200  # of a JPEG: each costs a pass over all pixels, however few bytes it has
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")
CHEAPER = "send fewer images or choose a cheaper method"
_NUMBERS = 512
"""Tensors and lists of evidence up to this many entries are sent whole."""
_DEEPEST = 4


@dataclass(frozen=True)
class Decoded:
    """The usable images of a batch, their positions in the request, and the others."""

    batch: Batch
    places: tuple[int, ...]
    refused: tuple[ImageProblem, ...]


def decode(
    images: Sequence[Upload],
    preprocess: Preprocess,
    *,
    views: ViewSpec | None,
    seed: int,
    max_pixels: int,
    check: Callable[[], None] = lambda: None,
) -> Decoded:
    """Pixels (and views) of all images that can be read; ``check`` is called before each."""
    pixels: list[Tensor] = []
    places: list[int] = []
    refused: list[ImageProblem] = []
    for index, image in enumerate(images):
        check()
        try:
            pixels.append(_pixels(image, preprocess, views, seed, max_pixels))
            places.append(index)
        except ImageError as error:
            # a decoder's message without addresses of this process, and not too long
            reason = _ADDRESS.sub("the data", error.reason)[:300]
            refused.append(ImageProblem(index=index, name=image.name, reason=reason))
    keys = tuple(images[place].key for place in places)
    size = preprocess.size
    stacked = torch.stack(pixels) if pixels else torch.empty(0, 3, size, size)
    if views is None or not pixels:
        batch = Batch(stacked, keys)
    else:
        batch = Batch(stacked[:, 0], keys, stacked)
    return Decoded(batch, tuple(places), tuple(refused))


def _pixels(
    upload: Upload, preprocess: Preprocess, views: ViewSpec | None, seed: int, max_pixels: int
) -> Tensor:
    """Pixels (3, S, S) of one image, or its views (V, 3, S, S).

    By the functions that the loader's workers call, in this thread: a single request would only
    wait for the way to another process and back.
    """
    _check_header(upload.data, max_pixels)
    image = open_image(upload.data, max_pixels=max_pixels, formats=FORMATS)
    if views is None:
        return preprocess(image)
    return to_pixels(image_views(image, upload.key, views, seed, preprocess), preprocess)


def _check_header(data: bytes, max_pixels: int) -> None:
    """Refuse what is expensive to decode before Pillow would look at it."""
    if data[:2] == b"\xff\xd8" and data.count(_START_OF_SCAN) > _MOST_SCANS:
        raise ImageError("image", f"a JPEG of more than {_MOST_SCANS} scans")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and data[12:16] == b"VP8X":
        # libwebp allocates the whole canvas when it is opened, not when it is decoded
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        if width * height > max_pixels:
            reason = f"too large ({width} x {height}, more than {max_pixels:,} pixels)"
            raise ImageError("image", reason)


def predict_images(
    adapter: Adapter, images: Sequence[Upload], limits: Limits
) -> tuple[Decoded, Prediction]:
    """Decode and predict, within the limits of time and memory."""
    check_views(adapter, len(images), limits)
    with bounded(limits.batch_seconds, CHEAPER) as deadline:
        decoded = decode(
            images,
            adapter.model.preprocess,
            views=adapter.views,
            seed=adapter.seed,
            max_pixels=limits.image_pixels,
            check=deadline.check,
        )
        return decoded, predict_finite(adapter, decoded.batch)


def predict_finite(adapter: Adapter, batch: Batch) -> Prediction:
    """Predict; an answer that is not finite is refused."""
    try:
        return adapter.predict(batch)
    except NonFiniteError as error:
        raise invalid(str(error)) from error


def check_views(adapter: Adapter, images: int, limits: Limits) -> None:
    """Refuse batches whose views would fill the memory."""
    if adapter.views is None:
        return
    needed = images * adapter.views.count * 3 * adapter.model.image_size**2 * 4
    if needed > limits.view_bytes:
        raise too_large(
            f"{images} images in {adapter.views.count} views take {needed:,} bytes, at most "
            f"{limits.view_bytes:,} are allowed: send fewer images"
        )


def find_repeated(
    progress: Progress, answers: Mapping[int, Answer], sequence: int | None, digest: str
) -> Answer | None:
    """The stored answer if ``sequence`` was answered before; ``None`` if it is the next one."""
    if sequence is None or sequence == progress.sequence + 1:
        return None
    if sequence > progress.sequence:
        expected = progress.sequence + 1
        raise conflict("out_of_order", f"the next batch is number {expected}, got {sequence}")
    answer = answers.get(sequence)
    if answer is None:
        message = f"batch {sequence} was answered; only the last {len(answers)} answers are kept"
        raise conflict("answer_gone", message)
    if answer.digest != digest:
        raise conflict("sequence_used", f"number {sequence} was used for another batch")
    return answer


@torch.no_grad()
def render_answer(
    spec: SessionSpec, number: int, request: BatchRequest, decoded: Decoded, prediction: Prediction
) -> bytes:
    """The answer as JSON."""
    best = prediction.probabilities.topk(min(request.top_k, len(spec.classes)), dim=-1)
    values, labels = best.values.float().cpu().numpy(), best.indices.tolist()
    predictions = []
    rejections: list[dict[str, Any]] = [{} for _ in labels]
    if prediction.rejection is not None:
        scores, rejected = prediction.rejection
        pairs = zip(scores.float().cpu().numpy(), rejected.tolist(), strict=True)
        rejections = [{"rejected": no, "rejection_score": float(str(s))} for s, no in pairs]
    for place, row, classes, said in zip(decoded.places, values, labels, rejections, strict=True):
        # str() of a float32 is the shortest that reads back as the same
        top = [
            Scored(label=spec.classes[c], probability=float(str(p)))
            for p, c in zip(row, classes, strict=True)
        ]
        name = request.images[place].name
        first = dict(top[0])
        predictions.append(ImagePrediction(index=place, name=name, **first, top=top, **said))
    answer = BatchAnswer(
        session=spec.id,
        sequence=number,
        predictions=predictions,
        errors=list(decoded.refused),
        evidence=summarise(dict(prediction.evidence)) if request.evidence else None,
    )
    return answer.model_dump_json(exclude_unset=True).encode()


def summarise(value: Any, depth: int = 0) -> Any:
    """Evidence as JSON of bounded size: tensors whole if small, else shape, mean and extremes.

    Numbers that JSON does not know (NaN, infinity) become ``None``.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return _summarise_tensor(value.detach())
    if depth >= _DEEPEST:
        return type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return summarise(fields, depth)
    if isinstance(value, Mapping):
        return {str(key): summarise(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        whole = [summarise(item, depth + 1) for item in items[:_NUMBERS]]
        return whole if len(items) <= _NUMBERS else {"length": len(items), "first": whole}
    return type(value).__name__


def _summarise_tensor(value: Tensor) -> Any:
    if value.numel() <= _NUMBERS:
        return _finite(value.cpu().tolist())
    numbers = value.float()
    extremes = {name: float(getattr(numbers, name)()) for name in ("mean", "min", "max")}
    return {"shape": list(value.shape), **{k: summarise(v) for k, v in extremes.items()}}


def _finite(value: Any) -> Any:
    """Nested lists of numbers with ``None`` for those that are not finite."""
    return [_finite(item) for item in value] if isinstance(value, list) else summarise(value)
