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
    """A tokenizer of another library: a callable from texts to rows of ids."""

    def __init__(self, given: Any, context_length: int, vocab_size: int | None) -> None:
        self._given, self._words = given, vocab_size
        self.vocab_size = vocab_size or int(getattr(given, "vocab_size", 0))
        stated = getattr(given, "context_length", None)
        self.context_length = (
            context_length if stated is None else min(stated, context_length)
        )
        self._is_transformers = hasattr(given, "pad_token_id") and hasattr(
            given, "padding_side"
        )
        empty, one = self([""])[0].tolist(), self(["a"])[0].tolist()
        self.pad = empty[-1]
        same = next(
            (i for i, (x, y) in enumerate(zip(empty, one, strict=True)) if x != y), 0
        )
        self.prefix = tuple(empty[:same])
        rest = empty[same:]
        while rest and rest[-1] == self.pad:
            rest.pop()
        self.suffix = tuple(rest)

    def simplest(self) -> TextTokenizer:
        """CLIP's own tokenizer if it gives the same rows, else this one."""
        if self._words is not None and is_clip_vocabulary(self._words):
            ours = Tokenizer(self.context_length)
            if torch.equal(ours(_SAMPLES), self(_SAMPLES)):
                return ours
        return self

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without special tokens or padding."""
        row = self([text])[0].tolist()[len(self.prefix) :]
        while row and row[-1] == self.pad:
            row.pop()
        end = len(row) - len(self.suffix)
        return row[:end] if tuple(row[end:]) == self.suffix else row

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Rows of ids (N, context_length), int64, as the given tokenizer makes them."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        if self._is_transformers:
            padding = {"padding": "max_length", "padding_side": "right"}
            length = self.context_length
            rows = self._given(
                texts, **padding, max_length=length, return_tensors="pt"
            ).input_ids
        else:
            rows = self._given(texts)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != len(texts):
            raise UserError(
                "the tokenizer does not turn N texts into a tensor of N rows"
            )
        if rows.shape[1] > self.context_length:
            raise UserError(
                f"a text takes {rows.shape[1]} tokens, the model's context holds "
                f"{self.context_length}: shorten the class name or template"
            )
        if self._words is not None and int(rows.max()) >= self._words:
            raise UserError(
                f"a tokenizer of another vocabulary: it gives token {int(rows.max())}, the text "
                f"tower has {self._words}"
            )
        return rows.long()


def preprocess_from(given: Any) -> Preprocess:
    """Our preprocessing of torchvision's transforms or of transformers' image processor."""
    if isinstance(given, Preprocess):
        return given
    processor = getattr(given, "image_processor", given)
    if hasattr(processor, "image_mean"):
        values = processor.to_dict()
        size, crop = values.get("size") or {}, values.get("crop_size") or {}
        sides = [
            d.get(k)
            for d in (crop, size)
            for k in ("height", "shortest_edge")
            if d.get(k)
        ]
        if not sides or not isinstance(sides[0], int):
            message = f"{type(processor).__name__} states no size: pass preprocess=Preprocess(...)"
            raise UserError(message)
        return huggingface.preprocess_from(sides[0], values)
    if hasattr(given, "transforms"):
        ours = _from_transforms(given.transforms)
        shape = (ours.size + 37, 2 * ours.size, 3)
        image = Image.fromarray(
            np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        )
        if float((ours(image) - given(image)).abs().max()) < 1e-3:
            return ours
    raise UserError(
        f"{type(given).__name__} cannot be read as preprocessing: pass "
        "cliquetta.model.preprocess.Preprocess(size, mean, std, interpolation, resize)"
    )


def _from_transforms(transforms: Sequence[Any]) -> Preprocess:
    """Preprocessing of torchvision's Resize, CenterCrop and Normalize, in that order."""
    values: dict[str, Any] = {}
    size = 0
    for transform in transforms:
        kind = type(transform).__name__
        if kind == "Resize":
            wanted = transform.size
            values["resize_mode"] = "shortest" if isinstance(wanted, int) else "squash"
            size = wanted if isinstance(wanted, int) else wanted[0]
            values["interpolation"] = transform.interpolation.value
        elif kind == "CenterCrop":
            size = (
                transform.size if isinstance(transform.size, int) else transform.size[0]
            )
        elif kind == "Normalize":
            values |= {"mean": transform.mean, "std": transform.std}
    with suppress(UserError, ValueError):
        return open_clip.preprocess_from(size, values)
    raise UserError(
        "these transforms have no Resize, CenterCrop and Normalize that can be read"
    )


def stated_preprocess(model: Any, name: str) -> Preprocess:
    """The preprocessing that a model of open_clip says it was trained with."""
    cfg: Any = getattr(getattr(model, "visual", None), "preprocess_cfg", None)
    if cfg is None:
        raise UserError(
            f"{name} does not say how its images are prepared: pass "
            "from_model(..., preprocess=Preprocess(size, mean, std, ...))"
        )
    size = cfg.get("size", 224)
    return open_clip.preprocess_from(size if isinstance(size, int) else size[0], cfg)
