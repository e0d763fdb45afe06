"""Preparation: the split, its manifest, and the state after a crash or on a full disk."""

import hashlib
import math
import random
import resource
import shutil
import time
from collections import Counter
from multiprocessing import get_context

import pytest

from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.prepare import prepare_dataset


def contents(folder):
    """File name → SHA-256 of every file in ``folder``."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


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


def start(config, build_dir, downloads):
    """Prepare the plays in another process."""
    (build_dir / "data").mkdir(parents=True, exist_ok=True)
    link = build_dir / "data" / "downloads"
    if not link.exists():
        link.symlink_to(downloads)
    process = get_context("fork").Process(target=prepare_dataset, args=(config, build_dir))
    process.start()
    return process


def ended(build_dir, *processes):
    """Return the files of the only data set when the processes have ended."""
    for process in processes:
        process.join()
        assert process.exitcode == 0
    (folder,) = (build_dir / "data").glob("shakespeare-byte-*")
    return contents(folder)


def test_killed_or_concurrent_preparations_give_the_same_bytes(config, downloads, tmp_path):
    settings = config(dataset="shakespeare", custom_path="", val_fraction=0.1)
    pair = [start(settings, tmp_path / "pair", downloads) for _ in range(2)]
    expected = ended(tmp_path / "pair", *pair)
    assert not list((tmp_path / "pair" / "data").glob(".*partial"))

    data = tmp_path / "killed" / "data"
    killed_while_writing = 0
    # Two moments during writing, and the moment at which the data set appears.
    for awaited in (".*partial/*", ".*partial/*", "shakespeare-*"):
        process = start(settings, tmp_path / "killed", downloads)
        while process.is_alive() and not list(data.glob(awaited)):
            time.sleep(0.0005)
        if awaited != "shakespeare-*":
            time.sleep(random.uniform(0, 0.1))
        process.kill()
        process.join()
        killed_while_writing += bool(list(data.glob(".*partial")))
        for folder in data.glob("shakespeare-*"):
            assert contents(folder) == expected
            shutil.rmtree(folder)
    assert killed_while_writing
    again = start(settings, tmp_path / "killed", downloads)
    assert ended(tmp_path / "killed", again) == expected
