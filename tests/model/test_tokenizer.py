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

START = "<|startoftext|>"
END = "<|endoftext|>"
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
    """Numbers of all symbols: bytes, bytes that end a word, merges, the two ends."""
    single = sorted(pre_tokenizers.ByteLevel.alphabet())  # printable bytes first
    symbols = [*single]
    symbols += [symbol + "</w>" for symbol in single]
    symbols += [line.replace(" ", "") for line in lines]
    symbols += [START, END]
    return {symbol: number for number, symbol in enumerate(symbols)}


def their_tokenizer(folder: Path, merges: int | None = None) -> CLIPTokenizer:
    """That of transformers, with the first merges only."""
    lines = merge_lines()[:merges]
    symbols = folder / "vocab.json"
    symbols.write_text(json.dumps(vocabulary(lines)))
    pairs = folder / "merges.txt"
    pairs.write_text("\n".join(["#version: 0.2", *lines]))
    return CLIPTokenizer(str(symbols), str(pairs))


def comparable(text: str) -> bool:
    """Whether both tokenizers read a clean text alike."""
    # Transformers composes Unicode after the clean-up, OpenAI does not.
    if not unicodedata.is_normalized("NFC", text):
        return False
    return clean(text) == text and not FOLDING & set(text)


def assert_equal_ids(
    ours: Tokenizer, theirs: CLIPTokenizer, texts: Sequence[str]
) -> None:
    cleaned = list(filter(comparable, map(clean, texts)))
    assert len(cleaned) > 0.9 * len(texts)
    ids = theirs(cleaned, add_special_tokens=False)["input_ids"]
    for text, expected in zip(cleaned, ids, strict=True):
        assert ours.encode(text) == expected, text


@pytest.mark.parametrize("source", ["odd", "imagenet", "random"])
def test_equals_transformers(ours: Tokenizer, tmp_path: Path, source: str) -> None:
    texts = {
        "odd": ODD,
        "imagenet": words_in_templates(),
        "random": random_strings(3000, seed=1, old_unicode=True),
    }
    assert_equal_ids(ours, their_tokenizer(tmp_path), texts[source])


def test_reduced_vocabulary_keeps_the_first_merges(tmp_path: Path) -> None:
    small = Tokenizer(context_length=32, merges=300)
    # 256 bytes, inside of a word and at its end, the merges, and the two ends
    assert small.vocab_size == 512 + 300 + 2
    assert (small.start, small.end) == (812, 813)
    texts = words_in_templates()[:200]
    texts += random_strings(200, seed=2, old_unicode=True)
    assert_equal_ids(small, their_tokenizer(tmp_path, 300), texts)


def test_without_merges_bytes_are_tokens() -> None:
    # "!" is the first printable byte; those that end a word come 256 later
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
    assert clean(text) == cleaned
    assert ours.encode(text) == ours.encode(cleaned)


def test_known_ids(ours: Any) -> None:
    assert ours.encode("a photo of a") == [320, 1125, 539, 320]
    assert ours.encode("") == []
    assert ours.encode("<|endoftext|>") == [49407]
    assert ours.start == 49406
    assert ours.end == 49407
    assert ours.vocab_size == 49408


def test_texts_become_rows_that_zeros_fill_up(ours: Any) -> None:
    rows = ours(["a diagram", ""])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [
        [49406, 320, 22697, 49407] + [0] * 73,
        [49406, 49407] + [0] * 75,
    ]
    assert torch.equal(ours("a diagram"), rows[:1])
    assert ours([]).shape == (0, 77)


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
    expected = small(["a red car"])
    pickled = pickle.loads(pickle.dumps(small))
    copied = copy.deepcopy(small)
    assert torch.equal(pickled(["a red car"]), expected)
    assert torch.equal(copied(["a red car"]), expected)


def test_settings_out_of_range_are_refused() -> None:
    for bad in ({"merges": -1}, {"merges": 50000}, {"context_length": 1}):
        with pytest.raises(ValueError):
            Tokenizer(**bad)
