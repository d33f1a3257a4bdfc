"""Tokenizers that come with a checkpoint: ``tokenizer.json``, or a SentencePiece model.

The libraries that read them are an extra of the package, and imported only here.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

from cliquetta.errors import UserError
from cliquetta.model.config import TextConfig
from cliquetta.model.tokenizer import TextTokenizer

JSON_FILE = "tokenizer.json"
FILES = (JSON_FILE, "spiece.model", "tokenizer.model")
"""Names of such files in a folder or repository; the first that is there is read."""

_MARGIN = 0.02
"""Share of the embeddings by which a vocabulary may differ: extra tokens, rounded-up sizes."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_END = 1
"""The end token of SigLIP's three vocabularies."""


def canonicalize(text: str) -> str:
    """``text`` as SigLIP's authors evaluate it: lower case, no punctuation, one space apart."""
    return " ".join(text.replace("_", " ").translate(_NO_PUNCTUATION).lower().split())


class PretrainedTokenizer(TextTokenizer):
    """The vocabulary in a file, with the special tokens that a text tower was trained with.

    With SigLIP's vocabularies that is canonicalised text, an end token and padding: a token of its
    own in Gemma's vocabulary (SigLIP 2), the end token again in the older ones. Other towers take
    the special tokens of the file's post-processor.
    """

    def __init__(self, path: Path, text: TextConfig) -> None:
        self.path, self.text = path, text
        self.context_length = text.context_length
        self.is_canonical = not text.causal or text.end == _END
        self._encode, self._vocab_size, token = _read(path)
        if abs(self._vocab_size - text.vocab_size) > max(64, _MARGIN * text.vocab_size):
            raise UserError(
                f"{path.name} is a tokenizer of another vocabulary: it has {self._vocab_size} "
                f"tokens, the text tower {text.vocab_size}"
            )
        if self.is_canonical:
            self.prefix, self.suffix = (), (_END,)
            self.pad = 0 if token(0) == "<pad>" and token(_END) == "<eos>" else _END
            return
        plain, whole = self._encode("a", False), self._encode("a", True)
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self.prefix, self.suffix = tuple(whole[:at]), tuple(whole[at + len(plain) :])
        if text.end is None or text.end not in self.suffix:
            raise UserError(
                f"{path.name} is a tokenizer of another model: it does not end a text with token "
                f"{text.end}, at which this text tower is read"
            )
        self.pad = next((i for i in range(8) if token(i) == "<pad>"), 0)

    def __reduce__(self) -> tuple[type[PretrainedTokenizer], tuple[Path, TextConfig]]:
        """Copies and pickles read the file again."""
        return PretrainedTokenizer, (self.path, self.text)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without special tokens or padding."""
        ids = self._encode(canonicalize(text) if self.is_canonical else text, False)
        unknown = [i for i in ids if i >= self.text.vocab_size]
        if unknown:
            raise UserError(f"text {text!r} holds token {unknown[0]}, which the model has not")
        return ids


def require_tokenizers() -> None:
    """Raise if the extra that reads tokenizer files is missing: before weights are downloaded."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise UserError(
            "a model with a vocabulary of its own needs an extra: pip install 'cliquetta[siglip]'"
        ) from None


def find_tokenizer(
    find: Callable[[str], Path | None], text: TextConfig
) -> PretrainedTokenizer | None:
    """The tokenizer of a folder or repository in which ``find`` looks for a file; maybe none."""
    for name in FILES:
        path = find(name)
        if path is not None:
            return PretrainedTokenizer(path, text)
    return None


Encode = Callable[[str, bool], list[int]]
"""Ids of a text, with or without the special tokens of the file."""


def _read(path: Path) -> tuple[Encode, int, Callable[[int], str]]:
    """Read a tokenizer: how to encode, the number of tokens, and the token of an id."""
    library = "tokenizers" if path.name.endswith(".json") else "sentencepiece"
    try:
        return _read_json(path) if library == "tokenizers" else _read_sentencepiece(path)
    except ImportError:
        raise UserError(
            f"{path.name} needs the package {library}: pip install 'cliquetta[siglip]'"
        ) from None
    except Exception as error:  # the libraries raise bare exceptions on a damaged file
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a readable tokenizer: {first}") from None


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
