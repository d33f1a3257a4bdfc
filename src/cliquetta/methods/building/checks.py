"""Checks of the contract of methods, for the tests of whoever writes one."""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.building.base import Adapter, BatchDependence, NonFiniteError
from cliquetta.methods.building.state import load_state
from cliquetta.types import Batch

Build = Callable[[], Adapter]
ORDER = (7, 2, 9, 0, 4, 1, 8, 3, 6, 5)
TOLERANCE: dict[str, float] = {"atol": 5e-3, "rtol": 1e-4}
"""For logits that differ by the order of sums only, after some learning."""


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
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(10, 3, size, size, generator=generator)
    keys = tuple(f"image-{number}" for number in range(10))
    batch = Batch(images, keys)
    for check in CHECKS:
        check(build, batch, **tolerance or TOLERANCE)


def stream_of(batch: Batch) -> list[Batch]:
    """Split into four batches, one of them a single image and the last one short."""
    return [batch[0:4], batch[4:5], batch[5:9], batch[9:10]]


def logits_of(adapter: Adapter, batches: Sequence[Batch]) -> list[Tensor]:
    """Predict a stream: the logits of every batch."""
    return [adapter.predict(batch).logits for batch in batches]


def expect(holds: object, message: str) -> None:
    """Raise an AssertionError, also where Python leaves out ``assert``."""
    if not holds:
        raise AssertionError(message)


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Compare tensors bit by bit."""
    return all(map(torch.equal, left, right))


def _unchanged(adapter: Adapter, before: dict[str, Tensor]) -> bool:
    """Compare the memory with an earlier state."""
    state = adapter.state_dict()
    return all(value.equal(before[name]) for name, value in state.items())


def logits_are_finite_float32(build: Build, batch: Batch, **_: float) -> None:
    """Expect logits (B, N) that are finite and float32, for batches of any size."""
    adapter = build()
    for part in stream_of(batch):
        logits = adapter.predict(part).logits

        actual = tuple(logits.shape)
        images = len(part)
        shape = (images, len(adapter.prompts))
        expect(actual == shape, f"logits are {actual}, not {shape}")

        expect(logits.dtype == torch.float32, f"logits are {logits.dtype}")
        expect(logits.isfinite().all(), "logits are not finite")


def empty_batches_teach_nothing(build: Build, batch: Batch, **_: float) -> None:
    """Expect a prediction of an empty batch that changes nothing."""
    adapter = build()
    before = adapter.state_dict()
    logits = adapter.predict(batch[0:0]).logits
    expect(len(logits) == 0, "no images, and yet a prediction")
    expect(_unchanged(adapter, before), "an empty batch changed the memory")


def bad_pixels_teach_nothing(build: Build, batch: Batch, **_: float) -> None:
    """Expect refusal of pixels that are not finite; the stream goes on without them."""
    adapter = build()
    stream = stream_of(batch)
    expected = logits_of(build(), stream)
    actual = logits_of(adapter, stream[:1])

    # The third of four images has one bad pixel.
    for value in (torch.nan, torch.inf, -torch.inf):
        spoilt = batch.images[:4].clone()
        spoilt[2, 1, 5, 7] = value
        try:
            adapter.predict(Batch(spoilt, batch.keys[:4]))
        except NonFiniteError as error:
            text = str(error)
            names_it = "1 of 4 images" in text and f"number 2 ({batch.keys[2]})" in text
            expect(names_it, f"no image is named: {error}")
        else:
            raise AssertionError(f"a pixel of {value} was accepted")

    actual += logits_of(adapter, stream[1:])
    expect(_equal(expected, actual), "refused images teach")


def failures_teach_nothing(build: Build, batch: Batch, **_: float) -> None:
    """Expect the memory as it was after an error while or after predicting."""
    adapter = build()
    logits_of(adapter, stream_of(batch)[:2])
    before = adapter.state_dict()
    for step in ("_predict", "_on_model_scale"):
        inner = getattr(adapter, step)

        def fail(argument: Any, inner: Callable[[Any], Any] = inner) -> None:
            inner(argument)
            raise TimeoutError

        setattr(adapter, step, fail)
        with contextlib.suppress(TimeoutError):
            adapter.predict(batch)
        delattr(adapter, step)
        expect(_unchanged(adapter, before), f"an error after {step} changed the memory")


def reset_replays_the_stream(build: Build, batch: Batch, **_: float) -> None:
    """Expect the same predictions after a reset, and of an equal adapter."""
    adapter = build()
    stream = stream_of(batch)
    first = logits_of(adapter, stream)
    adapter.reset()
    again = logits_of(adapter, stream)
    expect(_equal(first, again), "a reset adapter predicts otherwise")
    other = logits_of(build(), stream)
    expect(_equal(first, other), "an equally built adapter predicts otherwise")


def saved_states_continue(build: Build, batch: Batch, **_: float) -> None:
    """Expect a loaded state to continue any stream bit by bit."""
    stream = stream_of(batch)
    with tempfile.TemporaryDirectory() as folder:
        for stop in range(len(stream)):
            adapter = build()
            logits_of(adapter, stream[:stop])
            path = Path(folder) / f"{stop}.safetensors"
            adapter.save(path)
            state = list(adapter.state_dict().values())
            copied = [value.clone() for value in state]
            expected = logits_of(adapter, stream[stop:])

            # Another adapter, which has seen something else before.
            other = build()
            logits_of(other, [batch[3:8]])
            load_state(other, path)
            actual = logits_of(other, stream[stop:])

            continues = _equal(expected, actual)
            expect(continues, f"loaded after {stop} batches it predicts otherwise")
            expect(_equal(copied, state), "a state dict is no copy")


def weights_are_untouched(build: Build, batch: Batch, **_: float) -> None:
    """Expect the model as it was: weights, mode, gradients."""
    adapter = build()
    model = adapter.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits_of(adapter, stream_of(batch))

    after = model.state_dict()
    changed = [name for name in after if not after[name].equal(before[name])]
    expect(not changed, f"weights were changed: {', '.join(changed)}")

    expect(not model.training, "the model was put into training mode")
    for weight in model.parameters():
        is_frozen = weight.grad is None and not weight.requires_grad
        expect(is_frozen, "gradients were left on the model's weights")


def gradients_stay_inside(build: Build, batch: Batch, **_: float) -> None:
    """Expect a method to work with gradients on and off, and to leave none behind."""
    adapter = build()
    logits = adapter.predict(batch).logits
    values = [logits, *adapter.state_dict().values()]
    expect(torch.is_grad_enabled(), "gradients were left switched off")

    requiring = [value for value in values if value.requires_grad]
    expect(not requiring, "a result still requires gradients")

    with torch.no_grad():
        without = build().predict(batch).logits
    expect(torch.equal(logits, without), "no_grad changes predictions")


def random_numbers_are_its_own(build: Build, batch: Batch, **_: float) -> None:
    """Expect that the global random state neither matters nor is changed."""
    adapter = build()
    stream = stream_of(batch)
    outside = torch.get_rng_state()
    try:
        torch.manual_seed(1)
        first = logits_of(adapter, stream)
        adapter.reset()
        torch.manual_seed(2)
        before = torch.get_rng_state()
        again = logits_of(adapter, stream)
        expect(_equal(first, again), "torch.manual_seed changes predictions")
        after = torch.get_rng_state()
        expect(torch.equal(before, after), "global random numbers were drawn")
    finally:
        torch.set_rng_state(outside)


def dependence_is_as_declared(build: Build, batch: Batch, **tolerance: Any) -> None:
    """Expect order to matter if sequential only, splitting if joint only."""
    adapter = build()
    together = adapter.predict(batch).logits
    kind = adapter.batch_dependence

    # Another order inside the batch.
    if kind is not BatchDependence.SEQUENTIAL:
        order = list(ORDER)
        keys = tuple(batch.keys[index] for index in order)
        mixed = Batch(batch.images[order], keys)
        actual = build().predict(mixed).logits
        agrees = torch.allclose(actual, together[order], **tolerance)
        expect(agrees, f"{kind}, and order matters")

    # The same images in batches of other sizes.
    if kind is not BatchDependence.JOINT:
        actual = torch.cat(logits_of(build(), stream_of(batch)))
        agrees = torch.allclose(actual, together, **tolerance)
        expect(agrees, f"{kind}, and splitting matters")


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
