"""Data sets: damage is detected on opening, and shards read as one sequence."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.data import shards
from gpt2.data.dataset import (
    content_digest,
    data_folder,
    manifest_digest,
    open_dataset,
)
from gpt2.data.options import DataOptions
from gpt2.data.prepare import prepare_dataset
from gpt2.records.audit import _held_out
from lib.errors import DataError

Settings = Callable[..., DataOptions]
pytestmark = pytest.mark.usefixtures("texts")


def flip(path: Path, position: int) -> None:
    """Flip one bit of the byte at ``position``."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture
def folder(config: Settings, tmp_path: Path) -> Path:
    """A prepared data set."""
    return prepare_dataset(config(), tmp_path)


def test_the_data_folder_may_be_in_the_home_folder(
    config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shared = data_folder(config(data_dir="~/.cache/kablate"), tmp_path / "build")
    assert shared == tmp_path / ".cache/kablate"
    assert data_folder(config(), tmp_path / "build") == tmp_path / "build/data"


FILES = ["train-00000.bin", "train-documents.jsonl", "val-00000.bin", "val-documents.jsonl"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte(name: str, folder: Path, config: Settings, tmp_path: Path) -> None:
    flip(folder / name, (folder / name).stat().st_size // 2)
    with pytest.raises(DataError) as caught:
        open_dataset(config(), tmp_path)
    assert caught.value.codes == ["data.damaged"]
    (problem,) = caught.value.problems
    assert problem.where == str(folder / name) and "SHA-256" in problem.what
    assert f"rm -r {folder} && make data" in problem.next
    assert caught.value.exit_code == 3


def test_truncated_and_missing_are_listed_together(
    folder: Path, config: Settings, tmp_path: Path
) -> None:
    size = (folder / "train-00000.bin").stat().st_size
    with open(folder / "train-00000.bin", "r+b") as stream:
        stream.truncate(size - 2)
    (folder / "val-00000.bin").unlink()
    for checked in (open_dataset, prepare_dataset):
        with pytest.raises(DataError) as caught:
            checked(config(), tmp_path)
        assert caught.value.codes == ["data.damaged", "data.missing"]
        truncated, missing = caught.value.problems
        assert truncated.where == str(folder / "train-00000.bin")
        assert f"expected {size} bytes, got {size - 2}" in truncated.what
        assert missing.where == str(folder / "val-00000.bin")


def test_an_added_shard(folder: Path, config: Settings, tmp_path: Path) -> None:
    added = folder / "train-00001.bin"
    added.write_bytes(b"\1\0")
    digest = hashlib.sha256(b"\1\0").hexdigest()
    for checked in (open_dataset, prepare_dataset):
        with pytest.raises(DataError) as caught:
            checked(config(), tmp_path)
        assert caught.value.codes == ["data.unexpected-file"]
        (problem,) = caught.value.problems
        assert problem.where == str(added) and digest in problem.what
    added.unlink()
    # Leftover of a kill between the last rename and the removal of the checkpoint.
    (folder / ".checkpoint.json").write_text("{}")
    open_dataset(config(), tmp_path)


def test_every_byte_of_the_manifest_counts(folder: Path, config: Settings, tmp_path: Path) -> None:
    path = folder / "dataset.json"
    manifest = json.loads(path.read_text())
    manifest["unigram_entropy_nats"] += 0.5
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError) as caught:
        open_dataset(config(), tmp_path)
    assert caught.value.codes == ["data.damaged"] and "seal" in str(caught.value)
    path.write_text("{")
    with pytest.raises(DataError) as caught:
        open_dataset(config(), tmp_path)
    assert caught.value.codes == ["data.damaged"] and "seal" not in str(caught.value)


def test_no_data(config: Settings, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset(config(), tmp_path)
    assert caught.value.codes == ["data.missing"]
    (problem,) = caught.value.problems
    assert "custom" in problem.what and "byte" in problem.what and "make data" in problem.next


def test_model_with_too_small_a_vocabulary(folder: Path, config: Settings, tmp_path: Path) -> None:
    open_dataset(config(), tmp_path, vocab_size=257)
    with pytest.raises(DataError) as caught:
        open_dataset(config(), tmp_path, vocab_size=256)
    assert caught.value.codes == ["data.vocabulary-too-large"]
    assert "257" in str(caught.value) and "256" in str(caught.value)


def test_windows_cross_shards(
    folder: Path, config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_dataset(config(), tmp_path)
    whole, digest = opened.train, opened.digest
    tokens = whole.window(0, whole.n_tokens).tolist()
    shutil.rmtree(folder)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    prepare_dataset(config(), tmp_path)
    opened = open_dataset(config(), tmp_path)
    split = opened.train
    assert opened.digest != digest
    assert len(list(folder.glob("train-*.bin"))) == -(-len(tokens) // 100) > 20
    rng = np.random.default_rng(0)
    for length in (0, 1, 99, 100, 101, 350):
        for offset in [0, 100, *rng.integers(0, len(tokens) - length, 20), len(tokens) - length]:
            window = split.window(int(offset), length)
            assert window.tolist() == tokens[offset : offset + length]


def test_a_pickled_split_contains_paths_only(
    folder: Path, config: Settings, tmp_path: Path
) -> None:
    split = open_dataset(config(), tmp_path).train
    tokens = split.window(0, split.n_tokens)
    sent = pickle.dumps(split)
    assert len(sent) < 1000 < 2 * split.n_tokens
    assert np.array_equal(pickle.loads(sent).window(0, split.n_tokens), tokens)


def test_a_data_set_is_found_beside_one_of_another_tokenizer(
    folder: Path, config: Settings, tmp_path: Path
) -> None:
    """An audit looks for the data of a run by its digest."""
    other = json.loads((folder / "dataset.json").read_text())
    other["tokenizer"] = {"name": "gpt2", "digest": "0" * 64, "vocab_size": 50257}
    other["digest"] = content_digest(other)
    other["seal"] = manifest_digest(other)
    shutil.copytree(folder, folder.with_name("a-first"))
    (folder.with_name("a-first") / "dataset.json").write_text(json.dumps(other))
    digest = json.loads((folder / "dataset.json").read_text())["digest"]
    run = SimpleNamespace(data=config())
    assert _held_out(digest, run, tmp_path).n_tokens > 0
