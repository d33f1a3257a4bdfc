"""The tokeniser against Hugging Face's, a slow literal one and known ids."""

from __future__ import annotations

import copy
import gzip
import html
import json
import pickle
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import ftfy
import pytest
import torch
from transformers import CLIPTokenizer

from cliquetta.model.tokenizer import Tokenizer, clean
from tests._helpers.texts import ODD, random_strings, words_in_templates

START, END = "<|startoftext|>", "<|endoftext|>"
# OpenAI's pattern ignores case, which makes the long s an s and U+0345, a mark, a letter; the
# others do not. No other character is concerned.
FOLDING = {"ſ", "\u0345"}


@pytest.fixture(scope="module")
def ours() -> Any:
    return Tokenizer()


def merge_lines() -> Any:
    packed = files("cliquetta.model").joinpath("data/bpe_simple_vocab_16e6.txt.gz").read_bytes()
    return gzip.decompress(packed).decode().splitlines()[1 : 49408 - 512 - 2 + 1]


def alphabet() -> Any:
    """Symbols of the bytes in the order of the vocabulary, from OpenAI's description."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(rest)}


def vocabulary(lines: Any) -> Any:
    single = list(alphabet().values())
    merged = ["".join(line.split()) for line in lines]
    symbols = [*single, *(s + "</w>" for s in single), *merged, START, END]
    return {symbol: n for n, symbol in enumerate(symbols)}


class Literal:
    """Sennrich's rule on a blank-separated string, and a scanner instead of a pattern."""

    def __init__(self, merges: Any = None) -> None:
        lines = merge_lines()[:merges]
        self.ranks = {line: n for n, line in enumerate(lines)}
        self.vocab = vocabulary(lines)
        self.bytes = alphabet()
        self.word = lru_cache(maxsize=None)(self._word)

    def _word(self, piece: Any) -> Any:
        if piece in (START, END):
            return [self.vocab[piece]]
        word = " ".join(self.bytes[b] for b in piece.encode()) + "</w>"
        while True:
            symbols = word.split(" ")
            pairs = {" ".join(p) for p in pairwise(symbols)}
            known = [p for p in pairs if p in self.ranks]
            if not known:
                return [self.vocab[s] for s in symbols]
            pair = min(known, key=self.ranks.__getitem__)
            joined = pair.replace(" ", "").replace("\\", r"\\")
            word = re.sub(rf"(?<!\S){re.escape(pair)}(?!\S)", joined, word)

    @staticmethod
    def kind(char: Any) -> Any:
        if char in " ":
            return "blank"
        return {"L": "letter", "N": "digit"}.get(unicodedata.category(char)[0], "other")

    def pieces(self, text: str) -> Iterator[Any]:
        at = 0
        while at < len(text):
            special = next(
                (s for s in (START, END, "'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
                 if text.startswith(s, at)), None,
            )  # fmt: skip
            if special:
                yield special
                at += len(special)
                continue
            kind, end = self.kind(text[at]), at + 1
            while end < len(text) and self.kind(text[end]) == kind and kind != "digit":
                end += 1
            if kind != "blank":
                yield text[at:end]
            at = end

    def encode(self, text: str) -> Any:
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
        text = " ".join(text.split()).lower()
        return [i for piece in self.pieces(text) for i in self.word(piece)]


@pytest.fixture(scope="module")
def literal() -> Any:
    return Literal()


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("clip")
    lines = merge_lines()
    vocab = folder / "vocab.json"
    vocab.write_text(json.dumps(vocabulary(lines)))
    merges = folder / "merges.txt"
    merges.write_text("\n".join(["#version: 0.2", *lines]))
    return CLIPTokenizer(str(vocab), str(merges))


def test_known_ids(ours: Any) -> None:
    assert ours.encode("a photo of a") == [320, 1125, 539, 320]
    assert (ours.start, ours.end, ours.vocab_size) == (49406, 49407, 49408)
    row = ours(["a diagram"])[0]
    assert row.tolist() == [49406, 320, 22697, 49407] + [0] * 73
    assert ours.encode("") == []
    assert ours.encode("<|endoftext|>") == [49407]


@pytest.mark.parametrize("source", ["odd", "imagenet", "random"])
def test_equals_the_literal_rule(ours: Any, literal: Any, source: str) -> None:
    texts = {
        "odd": ODD,
        "imagenet": words_in_templates(),
        "random": random_strings(2000, seed=0, old_unicode=True),
    }[source]
    texts = [text for text in texts if not FOLDING & set(text)]
    assert len(texts) > 0.9 * len(ODD)
    for text in texts:
        assert ours.encode(text) == literal.encode(text), text


@pytest.mark.parametrize("source", ["odd", "imagenet", "random"])
def test_equals_transformers(ours: Any, hugging_face: Any, source: str) -> None:
    texts = {
        "odd": ODD,
        "imagenet": words_in_templates(),
        "random": random_strings(3000, seed=1, old_unicode=True),
    }[source]
    # Transformers composes Unicode after the clean-up, OpenAI does not.
    cleaned = [c for c in map(clean, texts) if unicodedata.is_normalized("NFC", c)]
    cleaned = [c for c in cleaned if not FOLDING & set(c) and clean(c) == c]
    assert len(cleaned) > 0.9 * len(texts)
    theirs = hugging_face(cleaned, add_special_tokens=False)["input_ids"]
    for text, ids in zip(cleaned, theirs, strict=True):
        assert ours.encode(text) == ids, text


def test_pattern_ignores_case(ours: Any) -> None:
    assert ours.encode("it'ſ") == [*ours.encode("it"), *ours.encode("'ſ")]
    assert ours.encode("'ſt") == [*ours.encode("'ſ"), *ours.encode("t")]
    assert ours.encode("a!\u0345") == [*ours.encode("a"), *ours.encode("!"), *ours.encode("\u0345")]


def test_reduced_vocabulary_keeps_the_first_merges() -> None:
    small, literal = Tokenizer(context_length=32, merges=300), Literal(300)
    assert small.vocab_size == 512 + 300 + 2
    assert (small.start, small.end) == (812, 813)
    texts = [*words_in_templates()[:200], *random_strings(200, seed=2, old_unicode=True)]
    for text in [text for text in texts if not FOLDING & set(text)]:
        assert small.encode(text) == literal.encode(text), text
    assert Tokenizer(merges=0).encode("ab") == [ord("a") - 33, ord("b") - 33 + 256]


def test_rows_are_start_text_end_and_zeros(ours: Any) -> None:
    texts = ["a photo of a cat.", "", "dog"]
    rows = ours(texts)
    assert rows.shape == (3, 77) and rows.dtype == torch.int64
    lengths = [8, 2, 3]
    for row, text, length in zip(rows.tolist(), texts, lengths, strict=True):
        assert row == [49406, *ours.encode(text), 49407] + [0] * (77 - length)
    assert torch.equal(rows.argmax(dim=1) + 1, torch.tensor(lengths))
    assert torch.equal(ours("dog"), rows[2:])
    assert ours([]).shape == (0, 77)


def test_text_that_does_not_fit_is_refused_by_name(ours: Any) -> None:
    assert ours(["cat " * 75]).shape == (1, 77)
    with pytest.raises(ValueError, match=r"'cat cat .*takes 78 tokens.* holds 77"):
        ours(["dog", "cat " * 76])
    with pytest.raises(ValueError, match=r"'a blue bird' takes 5 tokens.* holds 4"):
        Tokenizer(context_length=4)(["a blue bird"])


def test_copies_encode_alike(ours: Any) -> None:
    small = Tokenizer(context_length=16, merges=100)
    for twin in (pickle.loads(pickle.dumps(small)), copy.deepcopy(small)):
        assert torch.equal(twin(["a red car"]), small(["a red car"]))


@pytest.mark.parametrize("bad", [{"merges": -1}, {"merges": 50000}, {"context_length": 1}])
def test_settings_out_of_range_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError):
        Tokenizer(**bad)
