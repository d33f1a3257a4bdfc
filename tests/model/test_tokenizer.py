"""CLIP's tokenizer against that of transformers, and known ids."""

import copy
import gzip
import json
import pickle
import unicodedata
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer

from cliquetta.model.tokenizer import Tokenizer, clean
from tests._helpers.texts import ODD, random_strings, words_in_templates

START, END = "<|startoftext|>", "<|endoftext|>"
# OpenAI's pattern ignores case, which makes the long s an s and U+0345, a mark, a
# letter; the others do not. No other character is concerned.
FOLDING = {"ſ", "\u0345"}


@pytest.fixture(scope="module")
def ours() -> Any:
    return Tokenizer()


def merge_lines() -> Any:
    packed = (
        files("cliquetta.model")
        .joinpath("data/bpe_simple_vocab_16e6.txt.gz")
        .read_bytes()
    )
    return gzip.decompress(packed).decode().splitlines()[1 : 49408 - 512 - 2 + 1]


def vocabulary(lines: Any) -> Any:
    single = sorted(pre_tokenizers.ByteLevel.alphabet())  # printable bytes first
    merged = ["".join(line.split()) for line in lines]
    symbols = [*single, *(s + "</w>" for s in single), *merged, START, END]
    return {symbol: n for n, symbol in enumerate(symbols)}


def their_tokenizer(folder: Path, merges: int | None = None) -> CLIPTokenizer:
    """That of transformers, with the first merges only."""
    lines = merge_lines()[:merges]
    (folder / "vocab.json").write_text(json.dumps(vocabulary(lines)))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def assert_equal_ids(
    ours: Tokenizer, theirs: CLIPTokenizer, texts: Sequence[str]
) -> None:
    # Transformers composes Unicode after the clean-up, OpenAI does not.
    cleaned = [c for c in map(clean, texts) if unicodedata.is_normalized("NFC", c)]
    cleaned = [c for c in cleaned if not FOLDING & set(c) and clean(c) == c]
    assert len(cleaned) > 0.9 * len(texts)
    ids = theirs(cleaned, add_special_tokens=False)["input_ids"]
    for text, expected in zip(cleaned, ids, strict=True):
        assert ours.encode(text) == expected, text


@pytest.mark.parametrize("source", ["odd", "imagenet", "random"])
def test_equals_transformers(ours: Tokenizer, tmp_path: Path, source: str) -> None:
    strings = random_strings(3000, seed=1, old_unicode=True)
    texts = {"odd": ODD, "imagenet": words_in_templates(), "random": strings}[source]
    assert_equal_ids(ours, their_tokenizer(tmp_path), texts)


def test_reduced_vocabulary_keeps_the_first_merges(tmp_path: Path) -> None:
    small = Tokenizer(context_length=32, merges=300)
    assert small.vocab_size == 512 + 300 + 2
    assert (small.start, small.end) == (812, 813)
    texts = [
        *words_in_templates()[:200],
        *random_strings(200, seed=2, old_unicode=True),
    ]
    assert_equal_ids(small, their_tokenizer(tmp_path, 300), texts)
    assert Tokenizer(merges=0).encode("ab") == [ord("a") - 33, ord("b") - 33 + 256]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  A  Photo\tof\na CAT ", "a photo of a cat"),
        ("salt &amp;amp; pepper &lt;3", "salt & pepper <3"),
        ("schÃ¶n", "schön"),
        ("\u201cquoted\u201d", '"quoted"'),
    ],
)
def test_texts_are_mended_and_unescaped(
    ours: Tokenizer, text: str, cleaned: str
) -> None:
    assert clean(text) == cleaned and ours.encode(text) == ours.encode(cleaned)


def test_known_ids(ours: Any) -> None:
    assert ours.encode("a photo of a") == [320, 1125, 539, 320]
    assert (ours.start, ours.end, ours.vocab_size) == (49406, 49407, 49408)
    rows = ours(["a diagram", ""])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [
        [49406, 320, 22697, 49407] + [0] * 73,
        [49406, 49407] + [0] * 75,
    ]
    assert torch.equal(ours("a diagram"), rows[:1]) and ours([]).shape == (0, 77)
    assert ours.encode("") == []
    assert ours.encode("<|endoftext|>") == [49407]


def test_pattern_ignores_case(ours: Any) -> None:
    assert ours.encode("it'ſ") == [*ours.encode("it"), *ours.encode("'ſ")]
    assert ours.encode("'ſt") == [*ours.encode("'ſ"), *ours.encode("t")]
    assert ours.encode("a!\u0345") == [
        *ours.encode("a"),
        *ours.encode("!"),
        *ours.encode("\u0345"),
    ]


def test_text_that_does_not_fit_is_refused_by_name(ours: Any) -> None:
    assert ours(["cat " * 75]).shape == (1, 77)
    with pytest.raises(ValueError, match="78 tokens"):
        ours(["dog", "cat " * 76])
    with pytest.raises(ValueError, match="blue bird"):
        Tokenizer(context_length=4)(["a blue bird"])


def test_copies_encode_alike(ours: Any) -> None:
    small = Tokenizer(context_length=16, merges=100)
    for twin in (pickle.loads(pickle.dumps(small)), copy.deepcopy(small)):
        assert torch.equal(twin(["a red car"]), small(["a red car"]))


def test_settings_out_of_range_are_refused() -> None:
    for bad in ({"merges": -1}, {"merges": 50000}, {"context_length": 1}):
        with pytest.raises(ValueError):
            Tokenizer(**bad)
