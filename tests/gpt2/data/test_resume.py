"""A killed preparation resumes to the same bytes and tokenizes nothing twice."""

import json
import os
import re
import signal
import sys
from multiprocessing import get_context

import pytest

from gpt2.data import prepare as prepare_module
from gpt2.data import shards
from gpt2.data.prepare import prepare_dataset
from lib.console import run_main

# Functions of a preparation before whose n-th call a process receives a signal.
PLACES = {
    "writing": (shards.SplitWriter, "add"),
    "before checkpoint": (prepare_module, "write_json"),
    "after checkpoint": (shards.SplitWriter, "add_document"),
    "renaming": (prepare_module.os, "rename"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shards and checkpoints after a few documents."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", 2000)
    monkeypatch.setattr(prepare_module, "CHECKPOINT_TOKENS", 900)


@pytest.fixture
def uninterrupted(streamed, pages, tmp_path, monkeypatch):
    """Files of an uninterrupted preparation in another folder."""
    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "CHECKPOINT_TOKENS", 1 << 30)
        return contents(prepare_dataset(streamed(data_dir="other"), tmp_path))


def contents(folder):
    """File name → content."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def prepare_until(config, build_dir, where, count, by):
    """Prepare, and receive a signal at that call; standard error goes to ``build_dir/said``."""
    os.dup2(os.open(build_dir / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    owner, name = PLACES[where]
    original = getattr(owner, name)
    calls = []

    def dying(*given, **named):
        calls.append(given)
        if len(calls) == count:
            for file in (given[0]._shard, given[0]._index) if where == "writing" else ():
                file and file._stream.flush()
            os.kill(os.getpid(), by)
        return original(*given, **named)

    setattr(owner, name, dying)
    run_main(lambda: 0 if prepare_dataset(config, build_dir) else 1)


def interrupted(config, build_dir, where, count, by):
    """Prepare in a process that is signalled at that call; return exit code and stderr."""
    process = get_context("fork").Process(
        target=prepare_until, args=(config, build_dir, where, count, by)
    )
    process.start()
    process.join()
    return process.exitcode, (build_dir / "said").read_text()


@pytest.fixture
def tokenized(monkeypatch):
    """Ids of the documents that this process tokenizes."""
    seen = []
    original = shards.SplitWriter.add_document

    def add(writer, document, *rest):
        seen.append(document.id)
        return original(writer, document, *rest)

    monkeypatch.setattr(shards.SplitWriter, "add_document", add)
    return seen


# Ctrl-C says what is saved; the others are kills.
@pytest.mark.parametrize(
    "stops",
    [
        [("writing", 45, signal.SIGINT)],
        [("before checkpoint", 4, signal.SIGKILL), ("after checkpoint", 1, signal.SIGKILL)],
        [("before checkpoint", 1, signal.SIGKILL), ("renaming", 1, signal.SIGKILL)],
    ],
    ids=lambda stops: ", ".join(where for where, *_ in stops),
)
def test_stopped_and_resumed(stops, streamed, uninterrupted, pages, tokenized, tmp_path, capsys):
    assert len([name for name in uninterrupted if name.startswith("train-0")]) == 5
    for where, count, by in stops:
        code, said = interrupted(streamed(), tmp_path, where, count, by)
        assert code == (130 if by == signal.SIGINT else -by), said
        if by == signal.SIGINT:
            assert re.search("STOP .*[1-9].* tokens .*make data", said) and "Traceback" not in said
    (partial,) = (tmp_path / "data").glob(".*.partial")
    state = json.loads((partial / ".checkpoint.json").read_bytes())
    capsys.readouterr()
    assert contents(prepare_dataset(streamed(), tmp_path)) == uninterrupted
    assert "DATA    resuming" in capsys.readouterr().err
    # Documents before the checkpoint were not tokenized again.
    done = state["position"]["number"]
    assert done > 0 and tokenized == [page for page, _ in pages[done:]]
    assert not partial.exists()


@pytest.mark.parametrize("where", ["writing", "after checkpoint", "renaming"])
def test_a_killed_preparation_of_texts_starts_over(where, config, texts, tmp_path):
    expected = contents(prepare_dataset(config(data_dir="other"), tmp_path))
    count = 1 if where == "renaming" else 5
    code, said = interrupted(config(), tmp_path, where, count, signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    (partial,) = (tmp_path / "data").glob(".*.partial")
    assert contents(prepare_dataset(config(), tmp_path)) == expected and not partial.exists()


def test_a_damaged_partial_data_set_is_not_resumed(streamed, pages, tmp_path, monkeypatch, refused):
    original, left = shards.SplitWriter.add_document, iter(range(60))

    def add(*given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(*given)

    with monkeypatch.context() as patched:
        patched.setattr(shards.SplitWriter, "add_document", add)
        with pytest.raises(KeyboardInterrupt):
            prepare_dataset(streamed(), tmp_path)
    (partial,) = (tmp_path / "data").glob(".*.partial")
    index = partial / "val-documents.jsonl"
    damages = {partial / "train-00000.bin": lambda old: b"\0" + old[1:], index: lambda old: old[:9]}
    for path, damage in damages.items():
        before = path.read_bytes()
        path.write_bytes(damage(before))
        problem = refused("data.damaged", prepare_dataset, streamed(), tmp_path)
        assert problem.where == str(path) and f"rm -r {partial}" in problem.next
        path.write_bytes(before)
    index.unlink()
    assert refused("data.damaged", prepare_dataset, streamed(), tmp_path).where == str(index)
