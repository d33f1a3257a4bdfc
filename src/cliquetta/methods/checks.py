"""Checks of the contract of methods, for the tests of whoever writes one."""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.base import Adapter, BatchDependence, NonFiniteError
from cliquetta.methods.state import load_state
from cliquetta.types import Batch

Build = Callable[[], Adapter]
ORDER = (7, 2, 9, 0, 4, 1, 8, 3, 6, 5)
TOLERANCE: dict[str, float] = {"atol": 5e-3, "rtol": 1e-4}
"""For logits that differ by the order of floating-point sums only, after a method has learned."""


def check_method(
    build: Build, *, images: Tensor | None = None, tolerance: Any = None
) -> None:
    """Check that a method keeps to the contract: learning, state and batches.

    Call it from a test of your own:

    >>> import cliquetta
    >>> model = cliquetta.create_model("micro")
    >>> check_method(lambda: cliquetta.create_method("tda", model, ["cat", "dog", "ship"]))

    Args:
        build: Gives a fresh adapter, built equally at every call.
        images: Preprocessed pixels (10, 3, S, S); noise by default.
        tolerance: ``atol`` and ``rtol`` where sums may be computed in another order.

    Raises:
        AssertionError: It does not; the message says in what.

    """
    if images is None:
        size = build().model.preprocess.size
        images = torch.randn(
            10, 3, size, size, generator=torch.Generator().manual_seed(0)
        )
    batch = Batch(images, tuple(f"image-{number}" for number in range(10)))
    for check in CHECKS:
        check(build, batch, **tolerance or TOLERANCE)


def stream_of(batch: Batch) -> list[Batch]:
    """Four batches, one of them a single image and the last one short."""
    return [batch[0:4], batch[4:5], batch[5:9], batch[9:10]]


def logits_of(adapter: Adapter, batches: Sequence[Batch]) -> list[Tensor]:
    """The logits of a method over a stream."""
    return [adapter.predict(batch).logits for batch in batches]


def expect(holds: object, message: str) -> None:
    """Raise an AssertionError, also where Python leaves out ``assert``."""
    if not holds:
        raise AssertionError(message)


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def _unchanged(adapter: Adapter, before: dict[str, Tensor]) -> bool:
    return all(
        value.equal(before[name]) for name, value in adapter.state_dict().items()
    )


def logits_are_finite_float32(build: Build, batch: Batch, **_: float) -> None:
    """Logits (B, N) are finite and float32, for batches of any size."""
    adapter = build()
    for part in stream_of(batch):
        logits = adapter.predict(part).logits
        shape = (len(part), len(adapter.prompts))
        expect(logits.shape == shape, f"logits are {tuple(logits.shape)}, not {shape}")
        expect(logits.dtype == torch.float32, f"logits are {logits.dtype}")
        expect(logits.isfinite().all(), "logits are not finite")


def empty_batches_teach_nothing(build: Build, batch: Batch, **_: float) -> None:
    """An empty batch is predicted and changes nothing."""
    adapter = build()
    before = adapter.state_dict()
    expect(
        len(adapter.predict(batch[0:0]).logits) == 0, "no images, and yet a prediction"
    )
    expect(_unchanged(adapter, before), "an empty batch changed the memory")


def bad_pixels_teach_nothing(build: Build, batch: Batch, **_: float) -> None:
    """Pixels that are not finite are refused, and the stream goes on as if they had not come."""
    adapter, stream = build(), stream_of(batch)
    expected, actual = logits_of(build(), stream), logits_of(adapter, stream[:1])
    for value in (torch.nan, torch.inf, -torch.inf):
        spoilt = batch.images[:4].clone()
        spoilt[2, 1, 5, 7] = value
        try:
            adapter.predict(Batch(spoilt, batch.keys[:4]))
        except NonFiniteError as error:
            words = ("1 of 4 images", f"number 2 ({batch.keys[2]})")
            expect(
                all(word in str(error) for word in words), f"no image is named: {error}"
            )
        else:
            raise AssertionError(f"a pixel of {value} was accepted")
    expect(
        _equal(expected, actual + logits_of(adapter, stream[1:])),
        "refused images teach",
    )


def failures_teach_nothing(build: Build, batch: Batch, **_: float) -> None:
    """An error while or after predicting leaves the memory as it was."""
    adapter = build()
    logits_of(adapter, stream_of(batch)[:2])
    before = adapter.state_dict()
    for step in ("_predict", "_on_model_scale"):
        inner = getattr(adapter, step)

        def fail(given: Any, inner: Callable[[Any], Any] = inner) -> None:
            inner(given)
            raise TimeoutError

        setattr(adapter, step, fail)
        with contextlib.suppress(TimeoutError):
            adapter.predict(batch)
        delattr(adapter, step)
        expect(_unchanged(adapter, before), f"an error after {step} changed the memory")


def reset_replays_the_stream(build: Build, batch: Batch, **_: float) -> None:
    """After a reset, and in an equally built adapter, the same stream gets the same predictions."""
    adapter, stream = build(), stream_of(batch)
    first = logits_of(adapter, stream)
    adapter.reset()
    expect(
        _equal(first, logits_of(adapter, stream)), "a reset adapter predicts otherwise"
    )
    expect(
        _equal(first, logits_of(build(), stream)),
        "an equally built adapter predicts otherwise",
    )


def saved_states_continue(build: Build, batch: Batch, **_: float) -> None:
    """Whatever an adapter has seen, a loaded state continues the stream bit by bit."""
    stream = stream_of(batch)
    with tempfile.TemporaryDirectory() as folder:
        for stop in range(len(stream)):
            adapter, other = build(), build()
            logits_of(adapter, stream[:stop])
            path = Path(folder) / f"{stop}.safetensors"
            adapter.save(path)
            state = list(adapter.state_dict().values())
            copied = [value.clone() for value in state]
            expected = logits_of(adapter, stream[stop:])
            logits_of(other, [batch[3:8]])
            load_state(other, path)
            actual = logits_of(other, stream[stop:])
            expect(
                _equal(expected, actual),
                f"loaded after {stop} batches it predicts otherwise",
            )
            expect(_equal(copied, state), "a state dict is no copy")


def weights_are_untouched(build: Build, batch: Batch, **_: float) -> None:
    """The model stays as it was: weights, mode, gradients."""
    adapter = build()
    model = adapter.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits_of(adapter, stream_of(batch))
    changed = [
        name
        for name, value in model.state_dict().items()
        if not value.equal(before[name])
    ]
    expect(not changed, f"weights were changed: {', '.join(changed)}")
    expect(not model.training, "the model was put into training mode")
    left = [p for p in model.parameters() if p.grad is not None or p.requires_grad]
    expect(not left, "gradients were left on the model's weights")


def gradients_stay_inside(build: Build, batch: Batch, **_: float) -> None:
    """A method works with gradients on and off, and leaves none behind."""
    adapter = build()
    logits = adapter.predict(batch).logits
    values = [logits, *adapter.state_dict().values()]
    expect(torch.is_grad_enabled(), "gradients were left switched off")
    expect(
        not any(value.requires_grad for value in values),
        "a result still requires gradients",
    )
    with torch.no_grad():
        expect(
            torch.equal(logits, build().predict(batch).logits),
            "no_grad changes predictions",
        )


def random_numbers_are_its_own(build: Build, batch: Batch, **_: float) -> None:
    """The global random state neither matters nor is changed."""
    adapter, stream, outside = build(), stream_of(batch), torch.get_rng_state()
    try:
        torch.manual_seed(1)
        first = logits_of(adapter, stream)
        adapter.reset()
        torch.manual_seed(2)
        before = torch.get_rng_state()
        expect(
            _equal(first, logits_of(adapter, stream)),
            "torch.manual_seed changes predictions",
        )
        expect(
            torch.equal(before, torch.get_rng_state()),
            "global random numbers were drawn",
        )
    finally:
        torch.set_rng_state(outside)


def dependence_is_as_declared(build: Build, batch: Batch, **tolerance: Any) -> None:
    """Order inside a batch matters if sequential only, splitting it if joint only."""
    adapter, order = build(), list(ORDER)
    together, kind = adapter.predict(batch).logits, adapter.batch_dependence
    if kind is not BatchDependence.SEQUENTIAL:
        mixed = Batch(batch.images[order], tuple(batch.keys[i] for i in order))
        actual = build().predict(mixed).logits
        expect(
            torch.allclose(actual, together[order], **tolerance),
            f"{kind}, and order matters",
        )
    if kind is not BatchDependence.JOINT:
        actual = torch.cat(logits_of(build(), stream_of(batch)))
        expect(
            torch.allclose(actual, together, **tolerance),
            f"{kind}, and splitting matters",
        )


CHECKS = (
    logits_are_finite_float32,
    empty_batches_teach_nothing,
    bad_pixels_teach_nothing,
    failures_teach_nothing,
    reset_replays_the_stream,
    saved_states_continue,
    weights_are_untouched,
    gradients_stay_inside,
    random_numbers_are_its_own,
    dependence_is_as_declared,
)
