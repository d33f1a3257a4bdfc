"""Tokenizers and preprocessing of other libraries, as ours."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.model.checkpoints import huggingface, open_clip
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.tokenizer import TextTokenizer, Tokenizer, is_clip_vocabulary

_SAMPLES = ("a photo of a cat.", "A sketch of an old truck")


class RowTokenizer(TextTokenizer):
    """Tokenizer of another library: a callable from texts to rows of ids."""

    def __init__(
        self, tokenizer: Any, context_length: int, vocab_size: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._tower_size = vocab_size
        self.vocab_size = vocab_size or int(getattr(tokenizer, "vocab_size", 0))

        stated = getattr(tokenizer, "context_length", context_length)
        self.context_length = (
            context_length if stated is None else min(stated, context_length)
        )
        self._is_transformers = hasattr(tokenizer, "pad_token_id") and hasattr(
            tokenizer, "padding_side"
        )

        # Special tokens: what an empty text and another one have in common.
        empty = self([""])[0].tolist()
        word = self(["a"])[0].tolist()
        self.pad = empty[-1]
        pairs = enumerate(zip(empty, word, strict=True))
        start = next((place for place, (x, y) in pairs if x != y), 0)
        self.prefix = tuple(empty[:start])
        self.suffix = tuple(self._without_padding(empty[start:]))

    def _without_padding(self, ids: list[int]) -> list[int]:
        """Cut the padding off the end of a row."""
        while ids and ids[-1] == self.pad:
            ids.pop()
        return ids

    def simplest(self) -> TextTokenizer:
        """Return CLIP's own tokenizer if it gives the same rows, else this one."""
        if self._tower_size is not None and is_clip_vocabulary(self._tower_size):
            ours = Tokenizer(self.context_length)
            if torch.equal(ours(_SAMPLES), self(_SAMPLES)):
                return ours
        return self

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without special tokens or padding."""
        row = self([text])[0].tolist()
        ids = self._without_padding(row[len(self.prefix) :])
        end = len(ids) - len(self.suffix)
        return ids[:end] if tuple(ids[end:]) == self.suffix else ids

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Make rows of ids (N, context_length), int64, as the other tokenizer does."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        if self._is_transformers:
            encoded = self._tokenizer(
                texts,
                padding="max_length",
                padding_side="right",
                max_length=self.context_length,
                return_tensors="pt",
            )
            rows = encoded.input_ids
        else:
            rows = self._tokenizer(texts)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != len(texts):
            raise UserError(
                "the tokenizer does not turn N texts into a tensor of N rows"
            )
        if rows.shape[1] > self.context_length:
            raise UserError(
                f"a text takes {rows.shape[1]} tokens, the model's context holds "
                f"{self.context_length}: shorten the class name or template"
            )
        if self._tower_size is not None and int(rows.max()) >= self._tower_size:
            raise UserError(
                f"a tokenizer of another vocabulary: it gives token {int(rows.max())}, the text "
                f"tower has {self._tower_size}"
            )
        return rows.long()


def preprocess_from(rule: Any) -> Preprocess:
    """Read our preprocessing of torchvision's transforms or transformers' image processor."""
    if isinstance(rule, Preprocess):
        return rule
    processor = getattr(rule, "image_processor", rule)
    if hasattr(processor, "image_mean"):
        return _from_processor(processor)
    if hasattr(rule, "transforms"):
        ours = _from_transforms(rule.transforms)

        # Both have to agree on a random picture that needs all steps.
        shape = (ours.size + 37, 2 * ours.size, 3)
        noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        image = Image.fromarray(noise)
        if float((ours(image) - rule(image)).abs().max()) < 1e-3:
            return ours
    raise UserError(
        f"{type(rule).__name__} cannot be read as preprocessing: pass "
        "cliquetta.model.preprocess.Preprocess(size, mean, std, interpolation, resize)"
    )


def _from_processor(processor: Any) -> Preprocess:
    """Read the preprocessing of transformers' image processor."""
    values = processor.to_dict()
    for name in ("crop_size", "size"):
        sides = values.get(name) or {}
        size = sides.get("height") or sides.get("shortest_edge")
        if size:
            break
    if not isinstance(size, int):
        raise UserError(
            f"{type(processor).__name__} states no size: pass preprocess=Preprocess(...)"
        )
    return huggingface.preprocess_from(size, values)


def _from_transforms(transforms: Sequence[Any]) -> Preprocess:
    """Read torchvision's Resize, CenterCrop and Normalize, in that order."""
    values: dict[str, Any] = {}
    size = 0
    for transform in transforms:
        kind = type(transform).__name__
        if kind == "Resize":
            shorter = isinstance(transform.size, int)
            values["resize_mode"] = "shortest" if shorter else "squash"
            values["interpolation"] = transform.interpolation.value
            size = _side(transform.size)
        elif kind == "CenterCrop":
            size = _side(transform.size)
        elif kind == "Normalize":
            values |= {"mean": transform.mean, "std": transform.std}
    with suppress(UserError, ValueError):
        return open_clip.preprocess_from(size, values)
    raise UserError(
        "these transforms have no Resize, CenterCrop and Normalize that can be read"
    )


def _side(size: Any) -> int:
    """Return the first side of a size that is a number or a pair."""
    side: int = size if isinstance(size, int) else size[0]
    return side


def stated_preprocess(model: Any, name: str) -> Preprocess:
    """Read the preprocessing that a model of open_clip says it was trained with."""
    cfg: Any = getattr(getattr(model, "visual", None), "preprocess_cfg", None)
    if cfg is None:
        raise UserError(
            f"{name} does not say how its images are prepared: pass "
            "from_model(..., preprocess=Preprocess(size, mean, std, ...))"
        )
    return open_clip.preprocess_from(_side(cfg.get("size", 224)), cfg)
