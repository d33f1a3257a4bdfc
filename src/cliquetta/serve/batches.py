"""One batch of images from a client: read and refused one by one, predicted, rendered as JSON."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cliquetta.data.images import ImageError
from cliquetta.data.inputs import as_batch
from cliquetta.methods.building.base import Adapter, NonFiniteError
from cliquetta.serve import schema
from cliquetta.serve.errors import conflict, invalid, too_large
from cliquetta.serve.limits import bounded
from cliquetta.serve.settings import Limits
from cliquetta.types import Batch, Prediction

CHEAPER = "send fewer images or choose a cheaper method"
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")
_NUMBERS = 512  # tensors and lists of evidence up to this many entries are sent in full
_DEEPEST = 4


@dataclass(frozen=True)
class BatchResult:
    """The usable images of a batch, their positions in the request, and the others."""

    batch: Batch
    positions: tuple[int, ...]
    refused: tuple[schema.ImageProblem, ...]
    prediction: Prediction


def predict_images(
    adapter: Adapter, files: Sequence[schema.Upload], limits: Limits
) -> BatchResult:
    """Read and predict, within the limits of time and memory."""
    check_views(adapter, len(files), limits)
    refused: dict[int, schema.ImageProblem] = {}

    def refuse(index: int, error: ImageError) -> None:
        # a decoder's message without addresses of this process, and not too long
        reason = _ADDRESS.sub("the data", error.reason)[:300]
        refused[index] = schema.ImageProblem(
            index=index, name=files[index].name, reason=reason
        )

    with bounded(limits.batch_seconds, CHEAPER) as deadline:

        def timed() -> Iterator[bytes]:
            for file in files:
                deadline.check()
                yield file.data

        # in this thread: a single request would only wait for the way to a worker and
        # back
        batch = as_batch(
            timed(),
            adapter.model.preprocess,
            views=adapter.views,
            seed=adapter.seed,
            max_pixels=limits.image_pixels,
            untrusted=True,
            on_error=refuse,
        )
        positions = tuple(index for index in range(len(files)) if index not in refused)
        prediction = predict_finite(adapter, batch)
    return BatchResult(batch, positions, tuple(refused.values()), prediction)


def predict_finite(adapter: Adapter, batch: Batch) -> Prediction:
    """Predict; a prediction that is not finite is refused."""
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


def is_new(last: int, sequence: int | None) -> bool:
    """Whether a request is for the batch after ``last``, and not a repeat of an earlier one."""
    expected = last + 1
    if sequence is None or sequence == expected:
        return True
    if sequence > expected:
        raise conflict(
            "out_of_order", f"the next batch is number {expected}, got {sequence}"
        )
    return False


@torch.no_grad()
def render_response(
    session: schema.SessionInfo, request: schema.BatchRequest, result: BatchResult
) -> bytes:
    """The response of a session, after the batch, as JSON."""
    prediction = result.prediction
    best, ranked = prediction.topk(request.top_k)
    rejections: list[dict[str, Any]] = [{} for _ in result.positions]
    if prediction.rejection is not None:
        scores, rejected = prediction.rejection
        pairs = zip(scores.float().cpu().numpy(), rejected.tolist(), strict=True)
        rejections = [
            {"rejected": no, "rejection_score": float(str(s))} for s, no in pairs
        ]
    predictions = []
    for index, row, classes, rejection in zip(
        result.positions, best.cpu().numpy(), ranked.tolist(), rejections, strict=True
    ):
        # str() of a float32 is the shortest that reads back as the same
        top = [
            schema.Scored(label=session.classes[c], probability=float(str(p)))
            for p, c in zip(row, classes, strict=True)
        ]
        image = {"index": index, "name": request.images[index].name, **dict(top[0])}
        predictions.append(schema.ImagePrediction(**image, top=top, **rejection))
    response = schema.BatchResponse(
        session=session.id,
        sequence=session.sequence,
        predictions=predictions,
        errors=list(result.refused),
        evidence=summarise(dict(prediction.evidence)) if request.evidence else None,
    )
    return response.model_dump_json(exclude_unset=True).encode()


def summarise(value: Any, depth: int = 0) -> Any:
    """Evidence as JSON of bounded size: of large tensors shape, mean and extremes."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else None
        )  # JSON knows neither NaN nor infinity
    if isinstance(value, Tensor):
        if value.numel() <= _NUMBERS:
            return _finite(value.detach().cpu().tolist())
        numbers = value.detach().float()
        extremes = {
            name: getattr(numbers, name)().item() for name in ("mean", "min", "max")
        }
        return {
            "shape": list(value.shape),
            **{k: summarise(v) for k, v in extremes.items()},
        }
    if depth >= _DEEPEST:
        return type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return summarise(fields, depth)
    if isinstance(value, Mapping):
        return {str(key): summarise(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        first = [summarise(item, depth + 1) for item in items[:_NUMBERS]]
        return (
            first if len(items) <= _NUMBERS else {"length": len(items), "first": first}
        )
    return type(value).__name__


def _finite(value: Any) -> Any:
    """Nested lists of numbers with ``None`` for those that are not finite."""
    return (
        [_finite(item) for item in value]
        if isinstance(value, list)
        else summarise(value)
    )
