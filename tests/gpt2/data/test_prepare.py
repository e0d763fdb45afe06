"""Preparation: tokens and names, reuse, several at once, and full disks."""

import math
import resource
import shutil
from collections import Counter
from multiprocessing import get_context

import pytest

from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.prepare import prepare_dataset


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tokens_documents_and_entropy(prepared, texts):
    dataset = prepared()
    seen = []
    for split in (dataset.train, dataset.val):
        position = 0
        for document in split.documents:
            expected = [*texts[document.id].encode(), 256]
            assert document.offset == position
            assert split.window(position, document.length).tolist() == expected
            position += document.length
            seen.append(document.id)
        assert position == split.n_tokens
    assert sorted(seen) == sorted(texts)
    counts = Counter(dataset.train.window(0, dataset.train.n_tokens).tolist())
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    assert dataset.unigram_entropy == pytest.approx(entropy, abs=1e-8)


def test_folder_names_the_content(config, texts, tmp_path):
    folder = dataset_folder(config(), tmp_path)
    assert folder.parent == tmp_path / "data" and folder.name.startswith("custom-byte-")
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "texts", moved / "words")
    assert dataset_folder(config(custom_path="words"), moved).name == folder.name
    names = {
        dataset_folder(config(**change), tmp_path).name[-8:]
        for change in ({}, {"val_fraction": 0.2}, {"tokenizer": "gpt2"})
    }
    (tmp_path / "texts" / "00.txt").write_text("changed")
    assert len(names | {dataset_folder(config(), tmp_path).name[-8:]}) == 4


def test_a_data_set_is_reused_or_without_manifest_prepared_again(config, texts, tmp_path, refused):
    folder = prepare_dataset(config(), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert prepare_dataset(config(), tmp_path) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    written = contents(folder)
    (folder / "dataset.json").unlink()
    (folder / "train-00000.bin").write_bytes(b"half")
    assert "make data" in refused("data.missing", open_dataset, config(), tmp_path).next
    prepare_dataset(config(), tmp_path)
    assert contents(folder) == written


def test_full_and_read_only_disks(config, texts, tmp_path, refused):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        full = refused("disk.write-failed", prepare_dataset, config(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "data").iterdir()] == [".lock"]
    assert "File too large" in full.what
    read_only = config(data_dir="/proc/data")
    assert "DATA_DIR" in refused("disk.write-failed", prepare_dataset, read_only, tmp_path).next


def test_concurrent_preparations_give_one_data_set(config, texts, tmp_path):
    with get_context("fork").Pool(3) as pool:
        pool.starmap(prepare_dataset, [(config(), tmp_path)] * 3, chunksize=1)
    (folder,) = (tmp_path / "data").glob("*custom*")
    assert contents(folder) == contents(prepare_dataset(config(data_dir="other"), tmp_path))
