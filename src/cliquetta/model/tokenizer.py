"""Text to token ids: CLIP's own BPE, equal to OpenAI's, and tokenizers of other checkpoints."""

import gzip
import html
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import ftfy
import regex
import torch
from torch import Tensor

from cliquetta.errors import UserError, first_line
from cliquetta.model.config import TextConfig

START = "<|startoftext|>"
END = "<|endoftext|>"
# merges of OpenAI's vocabulary: 49408 = 2 * 256 bytes + 48894 merges + 2 specials
MERGES = 48894

_VOCABULARY = 2 * 256 + MERGES + 2
CLIP_END = _VOCABULARY - 1  # id of OpenAI's end-of-text token
_ADDED = 1024  # a fine-tuning may have added a few words
_WORD_END = "</w>"
_CACHED_WORDS = 1 << 16

# Contractions, runs of letters, single digits, runs of anything else that is not a
# space. Case is ignored although the text is lower case by then: it matters for letters
# such as the long s.
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
    """The printable character of each byte: itself in printable Latin-1, else one from 256 on."""
    spare = iter(range(256, 512))
    return tuple(
        chr(byte)
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        else chr(next(spare))
        for byte in range(256)
    )


@lru_cache(maxsize=1)
def _all_merges() -> tuple[tuple[str, str], ...]:
    packed = (
        files("cliquetta.model")
        .joinpath("data/bpe_simple_vocab_16e6.txt.gz")
        .read_bytes()
    )
    lines = gzip.decompress(packed).decode("utf-8").split("\n")[1 : MERGES + 1]
    return tuple((left, right) for left, right in map(str.split, lines))


class TextTokenizer(ABC):
    """Texts as rows of ``context_length`` ids: special tokens around the text's own, padding."""

    context_length: int
    prefix: tuple[int, ...]  # special tokens before a text
    suffix: tuple[int, ...]  # special tokens after it
    pad: int  # fills the rest of a row
    vocab_size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without special tokens or padding."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Rows of ids (N, context_length), int64; a text that does not fit is refused by name."""
        texts = [texts] if isinstance(texts, str) else texts
        rows = torch.full(
            (len(texts), self.context_length), self.pad, dtype=torch.int64
        )
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

    Ids are, in order: the 256 bytes, the 256 bytes that end a word, one per merge,
    start, end. ``merges`` is the number of OpenAI's merges, by default all; fewer give
    a smaller vocabulary.
    """

    pad = 0

    def __init__(self, context_length: int = 77, merges: int | None = None) -> None:
        merges = MERGES if merges is None else merges
        if not 0 <= merges <= MERGES:
            raise UserError(f"merges is 0 to {MERGES}, got {merges}")
        if context_length < 2:
            message = f"a context of {context_length} has no room for the start and end tokens"
            raise UserError(message)
        self.context_length, self.merges = context_length, merges
        self._byte_symbols = _byte_symbols()
        learnt = _all_merges()[:merges]
        # Symbols sort by code point, which puts the bytes that stand for themselves
        # first.
        single = sorted(self._byte_symbols)
        symbols = [
            *single,
            *(s + _WORD_END for s in single),
            *(a + b for a, b in learnt),
        ]
        self._ids = {
            symbol: index for index, symbol in enumerate([*symbols, START, END])
        }
        self._ranks = {pair: rank for rank, pair in enumerate(learnt)}
        self._word = lru_cache(maxsize=_CACHED_WORDS)(self._encode_word)
        self.vocab_size = len(self._ids)
        self.start, self.end = self._ids[START], self._ids[END]
        self.prefix, self.suffix = (self.start,), (self.end,)

    def __reduce__(self) -> "tuple[type[Tokenizer], tuple[int, int]]":
        """Copies and pickles carry the settings only; tables and cache are built again."""
        return Tokenizer, (self.context_length, self.merges)

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
        # one pair at a time, which is the same as all equal ones: no two merges give
        # one symbol
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, unknown) for pair in pairwise(parts)]
            first = ranks.index(min(ranks))
            if ranks[first] == unknown:
                break
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        return tuple(self._ids[part] for part in parts)


# --- tokenizer.json or a SentencePiece model, read by an extra of the package --------------------


Find = Callable[
    [str], Path | None
]  # looks for a file by its name, in a folder or repository
# in a folder or repository; the first that is there is read
FILES = ("tokenizer.json", "spiece.model", "tokenizer.model")
# share of the embeddings by which a vocabulary may differ: extra tokens, rounded-up
# sizes
_MARGIN = 0.02
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_END = 1  # the end token of SigLIP's three vocabularies


def canonicalize(text: str) -> str:
    """``text`` as SigLIP's authors evaluate it: lower case, no punctuation, one space apart."""
    return " ".join(text.replace("_", " ").translate(_NO_PUNCTUATION).lower().split())


class PretrainedTokenizer(TextTokenizer):
    """The vocabulary in a file, with the special tokens that a text tower was trained with.

    SigLIP's towers read canonicalised text, an end token and padding (in older
    vocabularies the end token again); other towers get the special tokens of the file's
    post-processor.
    """

    def __init__(self, path: Path, text: TextConfig) -> None:
        self.path, self.text = path, text
        self.context_length = text.context_length
        self.is_canonical = not text.causal or text.end == _END
        self._encode, self.vocab_size, token = _read(path)
        if abs(self.vocab_size - text.vocab_size) > max(64, _MARGIN * text.vocab_size):
            raise UserError(
                f"{path.name} is a tokenizer of another vocabulary: it has {self.vocab_size} "
                f"tokens, the text tower {text.vocab_size}"
            )
        if self.is_canonical:
            self.prefix, self.suffix = (), (_END,)
            self.pad = 0 if token(0) == "<pad>" and token(_END) == "<eos>" else _END
            return
        plain, framed = self._encode("a", False), self._encode("a", True)
        start = next(
            (i for i in range(len(framed)) if framed[i : i + len(plain)] == plain), 0
        )
        self.prefix, self.suffix = (
            tuple(framed[:start]),
            tuple(framed[start + len(plain) :]),
        )
        if text.end is None or text.end not in self.suffix:
            raise UserError(
                f"{path.name} is a tokenizer of another model: it does not end a text with token "
                f"{text.end}, at which this text tower is read"
            )
        self.pad = next((i for i in range(8) if token(i) == "<pad>"), 0)

    def __reduce__(self) -> "tuple[type[PretrainedTokenizer], tuple[Path, TextConfig]]":
        """Copies and pickles read the file again."""
        return PretrainedTokenizer, (self.path, self.text)

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without special tokens or padding."""
        ids = self._encode(canonicalize(text) if self.is_canonical else text, False)
        unknown = [i for i in ids if i >= self.text.vocab_size]
        if unknown:
            raise UserError(
                f"text {text!r} holds token {unknown[0]}, which the model has not"
            )
        return ids


def require_tokenizers() -> None:
    """Raise if the extra that reads tokenizer files is missing: before weights are downloaded."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise UserError(
            "a model with a vocabulary of its own needs an extra: pip install 'cliquetta[siglip]'"
        ) from None


def find_tokenizer(find: Find, text: TextConfig) -> PretrainedTokenizer | None:
    """The tokenizer of a folder or repository in which ``find`` looks for a file; maybe none."""
    path = next(filter(None, map(find, FILES)), None)
    return None if path is None else PretrainedTokenizer(path, text)


Encode = Callable[
    [str, bool], list[int]
]  # of a text, with the file's special tokens or without


def _read(path: Path) -> tuple[Encode, int, Callable[[int], str]]:
    """Read a tokenizer: how to encode, the number of tokens, and the token of an id."""
    library = "tokenizers" if path.name.endswith(".json") else "sentencepiece"
    try:
        return (
            _read_json(path) if library == "tokenizers" else _read_sentencepiece(path)
        )
    except ImportError:
        message = (
            f"{path.name} needs the package {library}: pip install 'cliquetta[siglip]'"
        )
        raise UserError(message) from None
    except Exception as error:  # the libraries raise bare exceptions on a damaged file
        raise UserError(
            f"{path} is not a readable tokenizer: {first_line(error)}"
        ) from None


def _read_json(path: Path) -> tuple[Encode, int, Callable[[int], str]]:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(path))
    library.no_padding()
    library.no_truncation()

    def encode(text: str, special: bool) -> list[int]:
        return list(library.encode(text, add_special_tokens=special).ids)

    return encode, library.get_vocab_size(), lambda i: library.id_to_token(i) or ""


def _read_sentencepiece(path: Path) -> tuple[Encode, int, Callable[[int], str]]:
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_proto=path.read_bytes())
    size = int(library.get_piece_size())

    def encode(text: str, special: bool) -> list[int]:
        return list(library.encode(text))

    return encode, size, lambda i: str(library.id_to_piece(i)) if i < size else ""
