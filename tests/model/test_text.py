"""The text tower: cut at the end token, in chunks, with context, against its literal self."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model.clip import CLIP
from tests._helpers.literal_towers import (
    all_features,
    assert_same_gradients,
    draw,
    text_features,
)
from tests._helpers.tolerance import FEATURE, SUM

TEXTS = [
    "cat",
    "a photo of a small frog.",
    "ship",
    "a truck, which is a type of thing on a road",
]


def literal(clip: CLIP, ids: Any, **options: Any) -> Any:
    return all_features(text_features, clip, ids, **options)


def test_cut_at_the_end_and_in_chunks_equals_the_full_context(clip: CLIP) -> None:
    ids = clip.tokenizer(TEXTS)
    assert ids.shape == (4, 32)
    expected = literal(clip, ids)
    for chunk in (1, 3, 4, 100):
        actual = clip.encode_text(ids, chunk=chunk)
        torch.testing.assert_close(actual, expected, atol=SUM, rtol=FEATURE)


def test_what_stands_behind_the_end_never_matters(clip: CLIP) -> None:
    ids = clip.tokenizer(TEXTS)
    ends = ids.argmax(dim=1, keepdim=True)
    behind = torch.arange(32) > ends
    other = torch.where(behind, 300, ids)
    assert not torch.equal(other, ids)
    assert torch.equal(clip.encode_text(other), clip.encode_text(ids))


@pytest.mark.parametrize("shape", [(3, 32), (4, 3, 32)], ids=["shared", "one a class"])
def test_context(clip: CLIP, shape: tuple[int, ...]) -> None:
    ids = clip.tokenizer([f"x x x {text}" for text in TEXTS])
    context = draw(*shape).requires_grad_()
    ours = clip.encode_text(ids, context=context, chunk=3)
    of_class = context if context.ndim == 2 else context.__getitem__
    theirs = literal(clip, ids, context=of_class)
    assert_same_gradients(ours, theirs, [context])


def test_context_at_positions_of_a_template(clip: CLIP) -> None:
    """Words on both sides of the name: positions differ from class to class."""
    ids = clip.tokenizer([f"x {text} x" for text in TEXTS])
    first = torch.ones(4, dtype=torch.long)
    last = ids.argmax(dim=1) - 1
    positions = torch.stack([first, last], dim=1)

    context = draw(2, 32).requires_grad_()
    ours = clip.encode_text(ids, context=context, positions=positions)
    theirs = literal(clip, ids, context=context, positions=positions.__getitem__)
    assert_same_gradients(ours, theirs, [context])


def test_deep_prompts(clip: CLIP) -> None:
    ids = clip.tokenizer([f"x x {text}" for text in TEXTS])
    context = draw(2, 32).requires_grad_()
    deep = draw(2, 32, seed=1).requires_grad_()
    ours = clip.encode_text(ids, context=context, deep=[deep], chunk=3)
    theirs = literal(clip, ids, context=context, deep=[deep])
    # replaced hidden states cut the context off from everything but the first block
    assert_same_gradients(ours, theirs, [context, deep])


def test_packed_tokens_give_what_padded_rows_give(clip: CLIP) -> None:
    text = clip.require_text()
    ids = clip.tokenizer(TEXTS)
    ends = ids.argmax(dim=1)
    # rows as long as the longest text, and with all positions
    for length in (int(ends.max()) + 1, 32):
        embedded = text.tokens(ids[:, :length]).detach().requires_grad_()
        packed = text.encode_packed(embedded, ends)
        padded = text.encode(embedded, ends)
        assert_same_gradients(packed, padded, [embedded])


def test_packing_computes_real_tokens_only(
    clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = clip.require_text()
    monkeypatch.setattr("cliquetta.model.text.PACKED", "cpu")
    seen = []

    def watch(module: Any, given: Any, out: Tensor) -> None:
        seen.append(out.shape)

    handle = text.block(0).out.register_forward_hook(watch)
    ids = clip.tokenizer(TEXTS)
    packed = text(ids)
    handle.remove()
    # up to the end tokens, and these
    real_tokens = int(ids.argmax(dim=1).sum()) + len(ids)
    assert seen == [(real_tokens, 32)]
    torch.testing.assert_close(packed, literal(clip, ids), atol=SUM, rtol=FEATURE)
