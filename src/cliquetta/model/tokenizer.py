"""Text to token ids: what all tokenizers share, and CLIP's own byte-level BPE.

The BPE is equal to OpenAI's tokeniser on any text. Tokenizers that come with a checkpoint are in
:mod:`cliquetta.model.pretrained_tokenizer`.
"""

from __future__ import annotations

import gzip
import html
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise

import ftfy
import regex
import torch
from torch import Tensor

from cliquetta.errors import UserError

START = "<|startoftext|>"
END = "<|endoftext|>"
MERGES = 48894
"""Merges of OpenAI's vocabulary: 49408 = 2 * 256 bytes + 48894 merges + 2 specials."""

_VOCABULARY = 2 * 256 + MERGES + 2
CLIP_END = _VOCABULARY - 1
"""Id of OpenAI's end-of-text token."""
_ADDED = 1024
"""A fine-tuning may have added a few words."""
_WORD_END = "</w>"
_CACHED_WORDS = 1 << 16

# Contractions, runs of letters, single digits, runs of anything else that is not a space. Case is
# ignored although the text is lower case by then: it matters for letters such as the long s.
_PIECE = regex.compile(
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+",
    regex.IGNORECASE,
)
_BLANKS = regex.compile(r"\s+")


def is_clip_vocabulary(size: int) -> bool:
    """Whether a text tower with ``size`` embeddings spells in OpenAI's vocabulary."""
    return _VOCABULARY <= size < _VOCABULARY + _ADDED


def clean(text: str) -> str:
    """``text`` as the vocabulary was learnt on: mended, unescaped, one space apart, lower case."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return str(_BLANKS.sub(" ", text.strip()).strip().lower())


@lru_cache(maxsize=1)
def _byte_symbols() -> tuple[str, ...]:
    """The printable character that stands for each byte in the vocabulary, by byte value.

    Printable Latin-1 stands for itself; the other bytes take the code points from 256 on.
    """
    spare = iter(range(256, 512))
    return tuple(
        chr(byte)
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        else chr(next(spare))
        for byte in range(256)
    )


@lru_cache(maxsize=1)
def _all_merges() -> tuple[tuple[str, str], ...]:
    """The merges of OpenAI's vocabulary, in the order in which they were learnt."""
    packed = files("cliquetta.model").joinpath("data/bpe_simple_vocab_16e6.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode("utf-8").split("\n")[1 : MERGES + 1]
    pairs = (line.split() for line in lines)
    return tuple((left, right) for left, right in pairs)


class TextTokenizer(ABC):
    """Texts as rows of ``context_length`` ids: special tokens around the text's own, padding."""

    context_length: int
    prefix: tuple[int, ...]
    """Special tokens before a text."""
    suffix: tuple[int, ...]
    """Special tokens after it."""
    pad: int
    """Fills the rest of a row."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without special tokens or padding."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Rows of ids (N, context_length), int64; a text that does not fit is refused by name."""
        texts = [texts] if isinstance(texts, str) else texts
        rows = torch.full((len(texts), self.context_length), self.pad, dtype=torch.int64)
        for row, text in zip(rows, texts, strict=True):
            ids = [*self.prefix, *self.encode(text), *self.suffix]
            if len(ids) > self.context_length:
                shown = text if len(text) <= 80 else text[:77] + "..."
                raise UserError(
                    f"text {shown!r} takes {len(ids)} tokens with start and end, the model's "
                    f"context holds {self.context_length}: shorten the class name or template"
                )
            row[: len(ids)] = torch.tensor(ids)
        return rows


class Tokenizer(TextTokenizer):
    """Turns texts into rows of ``context_length`` ids: start, the text's tokens, end, padding.

    Ids are, in order: the 256 bytes, the 256 bytes that end a word, one per merge, start, end.
    ``merges`` keeps only that many of OpenAI's merges, which gives a smaller vocabulary for small
    models; by default all are kept and the ids are OpenAI's. Features are taken at the end token
    under a causal mask, so that padding does not matter.
    """

    pad = 0

    def __init__(self, context_length: int = 77, merges: int | None = None) -> None:
        merges = MERGES if merges is None else merges
        if not 0 <= merges <= MERGES:
            raise UserError(f"merges is 0 to {MERGES}, got {merges}")
        if context_length < 2:
            raise UserError(
                f"a context of {context_length} has no room for the start and end tokens"
            )
        self.context_length = context_length
        self.merges = merges
        self._byte_symbols = _byte_symbols()
        learnt = _all_merges()[:merges]
        # Symbols sort by code point, which puts the bytes that stand for themselves first.
        single = sorted(self._byte_symbols)
        symbols = [*single, *(s + _WORD_END for s in single), *(a + b for a, b in learnt)]
        self._symbols = (*symbols, START, END)
        self._ids = {symbol: index for index, symbol in enumerate(self._symbols)}
        self._ranks = {pair: rank for rank, pair in enumerate(learnt)}
        self._word = lru_cache(maxsize=_CACHED_WORDS)(self._encode_word)
        self.prefix, self.suffix = (self.start,), (self.end,)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[int, int]]:
        """Copies and pickles carry the settings only; tables and cache are built again."""
        return Tokenizer, (self.context_length, self.merges)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._symbols)

    @property
    def start(self) -> int:
        """Id of the start-of-text token."""
        return len(self._symbols) - 2

    @property
    def end(self) -> int:
        """Id of the end-of-text token: the highest there is."""
        return len(self._symbols) - 1

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without start, end or padding."""
        return [i for piece in _PIECE.findall(clean(text)) for i in self._word(piece)]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """The ids of one piece: its bytes, joined by the earliest learnt merge until none fits."""
        if word in (START, END):
            return (self._ids[word],)
        parts = [self._byte_symbols[byte] for byte in word.encode("utf-8")]
        parts[-1] += _WORD_END
        unknown = len(self._ranks)
        while len(parts) > 1:
            pairs = pairwise(parts)
            pair = min(pairs, key=lambda p: self._ranks.get(p, unknown))
            if pair not in self._ranks:
                break
            parts = _joined(parts, pair)
        return tuple(self._ids[part] for part in parts)


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """``parts`` with every occurrence of ``pair`` joined, from the left."""
    out: list[str] = []
    at = 0
    while at < len(parts):
        if at + 1 < len(parts) and parts[at] == pair[0] and parts[at + 1] == pair[1]:
            out.append(parts[at] + parts[at + 1])
            at += 2
        else:
            out.append(parts[at])
            at += 1
    return out
