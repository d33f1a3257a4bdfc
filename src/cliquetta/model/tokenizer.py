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
# Merges of OpenAI's vocabulary: 49408 = 2 * 256 bytes + 48894 merges + 2 specials.
MERGES = 48894

_VOCABULARY = 2 * 256 + MERGES + 2
# Id of OpenAI's end-of-text token.
CLIP_END = _VOCABULARY - 1
# A fine-tuning may have added a few words.
_ADDED = 1024
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
    """Clean a text as the vocabulary was learnt: mended, unescaped, single spaces, lower case."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    spaced: str = _BLANKS.sub(" ", text.strip())
    return spaced.strip().lower()


@lru_cache(maxsize=1)
def _byte_symbols() -> tuple[str, ...]:
    """Return the character of each byte: itself in printable Latin-1, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return tuple(
        chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)
    )


@lru_cache(maxsize=1)
def _all_merges() -> tuple[tuple[str, str], ...]:
    """Read OpenAI's merges, the first learnt first."""
    path = files("cliquetta.model") / "data" / "bpe_simple_vocab_16e6.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode("utf-8")

    # The first line is a header.
    lines = text.split("\n")[1 : MERGES + 1]

    # A merge is two symbols that become one.
    return tuple((left, right) for left, right in map(str.split, lines))


class TextTokenizer(ABC):
    """Texts as rows of ``context_length`` ids: the text's between special tokens, padding."""

    context_length: int
    # Special tokens before a text.
    prefix: tuple[int, ...]
    # Special tokens after it.
    suffix: tuple[int, ...]
    # Fills the rest of a row.
    pad: int
    vocab_size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without special tokens or padding."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Make rows of ids (N, context_length), int64; refuse a text that does not fit by name."""
        texts = [texts] if isinstance(texts, str) else texts
        shape = (len(texts), self.context_length)
        rows = torch.full(shape, self.pad, dtype=torch.int64)
        for row, text in zip(rows, texts, strict=True):
            # Special tokens around the text's, padding behind.
            ids = [*self.prefix, *self.encode(text), *self.suffix]
            if len(ids) > self.context_length:
                excerpt = text if len(text) <= 80 else text[:77] + "..."
                raise UserError(
                    f"text {excerpt!r} takes {len(ids)} tokens with start and end, the model's "
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

        self.context_length = context_length
        self.merges = merges
        self._byte_symbols = _byte_symbols()

        learnt = _all_merges()[:merges]
        self._ranks = {pair: rank for rank, pair in enumerate(learnt)}

        # Symbols sort by code point, which puts the bytes that stand for themselves
        # first.
        symbols = sorted(self._byte_symbols)
        symbols += [symbol + _WORD_END for symbol in symbols]
        symbols += [left + right for left, right in learnt]
        symbols += [START, END]
        self._ids = {symbol: id for id, symbol in enumerate(symbols)}

        # Words repeat: their ids are kept.
        self._word = lru_cache(maxsize=_CACHED_WORDS)(self._encode_word)
        self.vocab_size = len(symbols)
        self.start = self._ids[START]
        self.end = self._ids[END]

        self.prefix = (self.start,)
        self.suffix = (self.end,)

    def __reduce__(self) -> "tuple[type[Tokenizer], tuple[int, int]]":
        """Copy and pickle the settings only; tables and cache are built again."""
        return Tokenizer, (self.context_length, self.merges)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without start, end or padding."""
        ids: list[int] = []
        for piece in _PIECE.findall(clean(text)):
            ids += self._word(piece)
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """Return the ids of one piece: its bytes, joined by the earliest merge until none fits."""
        if word in (START, END):
            return (self._ids[word],)
        parts = [self._byte_symbols[byte] for byte in word.encode("utf-8")]
        parts[-1] += _WORD_END
        no_rank = len(self._ranks)

        # One pair at a time, which is the same as all equal ones: no two merges give
        # one symbol.
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, no_rank) for pair in pairwise(parts)]
            earliest = min(ranks)
            if earliest == no_rank:
                break
            first = ranks.index(earliest)

            joined = parts[first] + parts[first + 1]
            parts[first : first + 2] = [joined]
        return tuple(self._ids[part] for part in parts)


# --- tokenizer.json or a SentencePiece model, read by an extra of the package --------------------


# Looks for a file by its name, in a folder or repository.
Find = Callable[[str], Path | None]
# In a folder or repository; the first that is there is read.
FILES = ("tokenizer.json", "spiece.model", "tokenizer.model")
# Share of the embeddings by which a vocabulary may differ: extra tokens, rounded-up
# sizes.
_MARGIN = 0.02
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The end token of SigLIP's three vocabularies.
_END = 1


def canonicalize(text: str) -> str:
    """Write a text as SigLIP's authors do: lower case, no punctuation, single spaces."""
    words = text.replace("_", " ").translate(_NO_PUNCTUATION)
    return " ".join(words.lower().split())


class PretrainedTokenizer(TextTokenizer):
    """Vocabulary in a file, with the special tokens that a text tower was trained with.

    SigLIP's towers read canonicalised text, an end token and padding (in older
    vocabularies the end token again); other towers get the special tokens of the file's
    post-processor.
    """

    def __init__(self, path: Path, text: TextConfig) -> None:
        self.path = path
        self.text = text
        self.context_length = text.context_length
        self.is_canonical = not text.causal or text.end == _END
        self._encode, self.vocab_size, token = _read(path)

        # A tokenizer of another model would give other words, unseen.
        if abs(self.vocab_size - text.vocab_size) > max(64, _MARGIN * text.vocab_size):
            raise UserError(
                f"{path.name} is a tokenizer of another vocabulary: it has {self.vocab_size} "
                f"tokens, the text tower {text.vocab_size}"
            )

        if self.is_canonical:
            self.prefix = ()
            self.suffix = (_END,)
            has_pad = token(0) == "<pad>" and token(_END) == "<eos>"
            self.pad = 0 if has_pad else _END
            return

        # Special tokens stand before and after the ids of a word.
        word = self._encode("a", False)
        row = self._encode("a", True)
        size = len(word)
        starts = (i for i in range(len(row)) if row[i : i + size] == word)
        start = next(starts, 0)
        self.prefix = tuple(row[:start])
        self.suffix = tuple(row[start + size :])

        if text.end is None or text.end not in self.suffix:
            raise UserError(
                f"{path.name} is a tokenizer of another model: it does not end a text with token "
                f"{text.end}, at which this text tower is read"
            )
        self.pad = next((i for i in range(8) if token(i) == "<pad>"), 0)

    def __reduce__(self) -> "tuple[type[PretrainedTokenizer], tuple[Path, TextConfig]]":
        """Copy and pickle what is needed to read the file again."""
        return PretrainedTokenizer, (self.path, self.text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without special tokens or padding."""
        canonical = canonicalize(text) if self.is_canonical else text
        ids = self._encode(canonical, False)
        for id in ids:
            if id >= self.text.vocab_size:
                raise UserError(
                    f"text {text!r} holds token {id}, which the model has not"
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
    """Read the tokenizer of a folder or repository in which ``find`` looks, if there is one."""
    for name in FILES:
        path = find(name)
        if path is not None:
            return PretrainedTokenizer(path, text)
    return None


# Encodes a text, with the file's special tokens or without.
Encode = Callable[[str, bool], list[int]]


def _read(path: Path) -> tuple[Encode, int, Callable[[int], str]]:
    """Read a tokenizer: how to encode, the number of tokens, and the token of an id."""
    is_json = path.name.endswith(".json")
    library = "tokenizers" if is_json else "sentencepiece"
    try:
        return _read_json(path) if is_json else _read_sentencepiece(path)
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
    """Read a file of the tokenizers library."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(path))
    library.no_padding()
    library.no_truncation()

    def encode(text: str, special: bool) -> list[int]:
        return list(library.encode(text, add_special_tokens=special).ids)

    return encode, library.get_vocab_size(), lambda i: library.id_to_token(i) or ""


def _read_sentencepiece(path: Path) -> tuple[Encode, int, Callable[[int], str]]:
    """Read a SentencePiece model."""
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_proto=path.read_bytes())
    size = int(library.get_piece_size())

    def encode(text: str, special: bool) -> list[int]:
        return list(library.encode(text))

    return encode, size, lambda i: str(library.id_to_piece(i)) if i < size else ""
