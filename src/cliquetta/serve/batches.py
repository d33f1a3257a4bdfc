"""One batch of one session: what was asked, what is computed, what is answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from cliquetta.methods.base import Adapter
from cliquetta.serve.deadline import Deadline, OutOfTimeError
from cliquetta.serve.decoding import Decoded, Upload, decode
from cliquetta.serve.errors import ServiceError, conflict, invalid, too_large
from cliquetta.serve.evidence import summarise
from cliquetta.serve.factory import is_out_of_memory
from cliquetta.serve.limits import Limits
from cliquetta.serve.schema import BatchAnswer, ImagePrediction, ImageProblem, Scored
from cliquetta.serve.store import Answer, Progress, SessionSpec
from cliquetta.types import Prediction


@dataclass(frozen=True)
class BatchRequest:
    """A batch as it was sent, in either form."""

    uploads: tuple[Upload, ...]
    sequence: int | None = None
    top_k: int = 5
    evidence: bool = False

    @property
    def digest(self) -> str:
        """Hash of everything that the answer depends on; tells a repeat from another batch."""
        digest = hashlib.sha256(repr((self.top_k, self.evidence)).encode())
        for upload in self.uploads:
            digest.update(repr((upload.name, len(upload.data))).encode() + upload.data)
        return digest.hexdigest()


def compute_batch(
    adapter: Adapter, request: BatchRequest, limits: Limits
) -> tuple[Decoded, Prediction]:
    """Decode and predict, within the limits of time and memory."""
    check_views(adapter, len(request.uploads), limits)
    try:
        with Deadline(limits.batch_seconds) as deadline:
            decoded = decode(
                request.uploads,
                adapter.model.preprocess,
                views=adapter.views,
                seed=adapter.seed,
                max_pixels=limits.image_pixels,
                check=deadline.check,
            )
            prediction = adapter.predict(decoded.batch)
    except OutOfTimeError:
        raise out_of_time(limits) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise too_large("not enough memory for this batch: send fewer images") from error
        raise
    if not bool(prediction.logits.isfinite().all()):
        raise invalid("the method's answer is not a number with these options and images")
    return decoded, prediction


def check_views(adapter: Adapter, images: int, limits: Limits) -> None:
    """Refuse batches whose views would fill the memory."""
    if adapter.views is None:
        return
    needed = images * adapter.views.count * 3 * adapter.model.image_size**2 * 4
    if needed > limits.view_bytes:
        raise too_large(
            f"{images} images in {adapter.views.count} views take {needed:,} bytes, at most "
            f"{limits.view_bytes:,} are served: send fewer images"
        )


def out_of_time(limits: Limits) -> ServiceError:
    """What a client is told whose work was broken off."""
    message = (
        f"it took longer than {limits.batch_seconds:g} s and was not applied: send fewer images "
        "or choose a cheaper method"
    )
    return ServiceError(503, "out_of_time", message, retry_after=5)


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
        message = f"batch {sequence} was answered; only the last answers are kept"
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
    for place, row, classes in zip(decoded.places, values, labels, strict=True):
        # str() of a float32 is the shortest that reads back as the same
        top = [
            Scored(label=spec.classes[c], probability=float(str(p)))
            for p, c in zip(row, classes, strict=True)
        ]
        predictions.append(
            ImagePrediction(
                index=place,
                name=request.uploads[place].name,
                label=top[0].label,
                probability=top[0].probability,
                top=top,
            )
        )
    answer = BatchAnswer(
        session=spec.id,
        sequence=number,
        predictions=predictions,
        errors=[ImageProblem(**asdict(refused)) for refused in decoded.refused],
        evidence=summarise(dict(prediction.evidence)) if request.evidence else None,
    )
    return answer.model_dump_json().encode()
