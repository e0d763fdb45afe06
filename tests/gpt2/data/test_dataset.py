"""Data sets: damage is detected on opening, and shards read as one sequence."""

import json
import pickle
import shutil

import numpy as np
import pytest

from gpt2.data import shards
from gpt2.data.dataset import content_digest, manifest_digest, open_dataset
from gpt2.data.prepare import prepare_dataset
from gpt2.records.audit import _held_out
from lib.errors import DataError

pytestmark = pytest.mark.usefixtures("texts")


@pytest.fixture
def folder(config, tmp_path):
    """A prepared data set."""
    return prepare_dataset(config(), tmp_path)


def test_the_data_folder_may_be_in_the_home_folder(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shared = config(data_dir="~/.cache/kablate").folder(tmp_path / "build")
    assert shared == tmp_path / ".cache/kablate"
    assert config().folder(tmp_path / "build") == tmp_path / "build/data"


def test_a_flipped_byte_and_a_changed_manifest(folder, config, tmp_path, refused):
    for name in ("train-00000.bin", "train-documents.jsonl", "val-00000.bin"):
        before = (folder / name).read_bytes()
        content = bytearray(before)
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        problem = refused("data.damaged", open_dataset, config(), tmp_path)
        assert problem.where == str(folder / name) and "SHA-256" in problem.what
        assert f"rm -r {folder} && make data" in problem.next
        (folder / name).write_bytes(before)
    path = folder / "dataset.json"
    manifest = json.loads(path.read_text())
    manifest["unigram_entropy_nats"] += 0.5
    for content, is_sealed in ((json.dumps(manifest), True), ("{", False)):
        path.write_text(content)
        problem = refused("data.damaged", open_dataset, config(), tmp_path)
        assert ("seal" in problem.what) == is_sealed


@pytest.mark.parametrize("checked", [open_dataset, prepare_dataset])
def test_truncated_missing_and_added_files_are_listed_together(checked, folder, config, tmp_path):
    size = (folder / "train-00000.bin").stat().st_size
    with open(folder / "train-00000.bin", "r+b") as stream:
        stream.truncate(size - 2)
    (folder / "val-00000.bin").unlink()
    (folder / "train-00001.bin").write_bytes(b"\1\0")
    # Leftover of a kill between the last rename and the removal of the checkpoint.
    (folder / ".checkpoint.json").write_text("{}")
    with pytest.raises(DataError) as caught:
        checked(config(), tmp_path)
    assert caught.value.codes == ["data.unexpected-file", "data.damaged", "data.missing"]
    names = ("train-00001.bin", "train-00000.bin", "val-00000.bin")
    problems = caught.value.problems
    assert [problem.where for problem in problems] == [str(folder / name) for name in names]
    assert f"expected {size} bytes, got {size - 2}" in problems[1].what


def test_windows_cross_shards_in_another_process_too(prepared, folder, monkeypatch):
    """A pickled split contains paths only."""
    opened = prepared()
    tokens = opened.train.window(0, opened.train.n_tokens).tolist()
    shutil.rmtree(folder)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    again = prepared()
    assert again.digest != opened.digest
    assert len(list(folder.glob("train-*.bin"))) == -(-len(tokens) // 100) > 20
    again.train.window(0, 1)
    split = pickle.loads(pickle.dumps(again.train))
    assert "_maps" not in vars(split)
    rng = np.random.default_rng(0)
    for length in (0, 1, 99, 100, 101, 350):
        for offset in [0, 100, *rng.integers(0, len(tokens) - length, 20), len(tokens) - length]:
            window = split.window(int(offset), length)
            assert window.tolist() == tokens[offset : offset + length]


def test_a_data_set_is_found_beside_one_of_another_tokenizer(folder):
    """An audit looks for the data of a run by its digest."""
    manifest = json.loads((folder / "dataset.json").read_text())
    other = manifest | {"tokenizer": {"name": "gpt2", "digest": "0" * 64, "vocab_size": 50257}}
    other["digest"] = content_digest(other)
    other["seal"] = manifest_digest(other)
    shutil.copytree(folder, folder.with_name("a-first"))
    (folder.with_name("a-first") / "dataset.json").write_text(json.dumps(other))
    assert _held_out(manifest["digest"], folder.parent).n_tokens > 0
