"""A killed preparation resumes to the same bytes and tokenizes nothing twice."""

import json
import os
import re
import shutil
import signal
import sys
from multiprocessing import get_context

import pytest

from gpt2.data import prepare as prepare_module
from gpt2.data import shards
from gpt2.data.prepare import prepare_dataset
from lib.console import run_main
from lib.errors import DataError, Problem

# Functions of a preparation before whose n-th call a process receives a signal.
PLACES: dict[str, tuple[object, str]] = {
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
    calls: list[object] = []

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
    said = build_dir / "said"
    text = said.read_text()
    said.unlink()
    return process.exitcode, text


@pytest.fixture
def tokenized(monkeypatch):
    """Ids of the documents that this process tokenizes."""
    seen: list[str] = []
    original = prepare_module._add

    def add(document, *rest):
        seen.append(document.id)
        return original(document, *rest)

    monkeypatch.setattr(prepare_module, "_add", add)
    return seen


@pytest.mark.parametrize(
    "kills",
    [
        [("writing", 45)],
        [("before checkpoint", 4), ("after checkpoint", 1)],
        [("before checkpoint", 1), ("renaming", 1)],
    ],
    ids=lambda kills: ", ".join(where for where, _ in kills),
)
def test_killed_and_resumed(kills, streamed, uninterrupted, pages, tokenized, tmp_path):
    assert len([name for name in uninterrupted if name.startswith("train-0")]) == 5
    for where, count in kills:
        code, said = interrupted(streamed(), tmp_path, where, count, signal.SIGKILL)
        assert code == -signal.SIGKILL, said
    (partial,) = (tmp_path / "data").glob(".*.partial")
    state = json.loads((partial / ".checkpoint.json").read_bytes())
    folder = prepare_dataset(streamed(), tmp_path)
    assert contents(folder) == uninterrupted
    # Documents before the checkpoint were not tokenized again.
    done = state["position"]["number"]
    assert done > 0 and tokenized == [page for page, _ in pages[done:]]
    assert [p.name for p in (tmp_path / "data").iterdir()] != [partial.name]
    assert not partial.exists()


@pytest.mark.slow
def test_resume_works_after_every_document(streamed, uninterrupted, pages, tmp_path, monkeypatch):
    """Checkpoint after every document, so that each position in row groups and files is covered."""
    monkeypatch.setattr(prepare_module, "CHECKPOINT_TOKENS", 1)
    original = prepare_module._add
    added: list[str] = []

    def stops(document, *rest):
        if len(added) % 9 == 8:
            added.append("")
            raise DataError(Problem("stopped", code="data.damaged"))
        added.append(document.id)
        return original(document, *rest)

    monkeypatch.setattr(prepare_module, "_add", stops)
    stopped = 0
    while not (made := list((tmp_path / "data").glob("finewebedu-*"))):
        try:
            prepare_dataset(streamed(), tmp_path)
        except DataError:
            stopped += 1
    assert stopped == len(pages) // 8
    assert contents(made[0]) == uninterrupted
    assert [page for page in added if page] == [page for page, _ in pages]


def test_ctrl_c_reports_how_to_resume(streamed, uninterrupted, tmp_path, capsys):
    code, said = interrupted(streamed(), tmp_path, "writing", 60, signal.SIGINT)
    assert code == 130 and "Traceback" not in said
    assert re.search("STOP .*[1-9].* tokens .*make data", said)
    capsys.readouterr()
    assert contents(prepare_dataset(streamed(), tmp_path)) == uninterrupted
    assert "DATA    resuming" in capsys.readouterr().err


def interrupted_after(count):
    """Return ``_add`` that raises KeyboardInterrupt after ``count`` documents."""
    original = prepare_module._add
    left = iter(range(count))

    def add(*given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(*given)

    return add


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("flipped", "train-00000.bin"),
        ("missing", "val-documents.jsonl"),
        ("cut", "val-documents.jsonl"),
    ],
)
def test_a_damaged_partial_data_set_is_not_resumed(
    name, damage, streamed, pages, tmp_path, monkeypatch, refused
):
    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "_add", interrupted_after(60))
        with pytest.raises(KeyboardInterrupt):
            prepare_dataset(streamed(), tmp_path)
    (partial,) = (tmp_path / "data").glob(".*.partial")
    content = (partial / name).read_bytes()
    if damage == "missing":
        (partial / name).unlink()
    else:
        (partial / name).write_bytes(content[:9] if damage == "cut" else b"\0" + content[1:])
    problem = refused("data.damaged", prepare_dataset, streamed(), tmp_path)
    assert problem.where == str(partial / name) and f"rm -r {partial}" in problem.next
    shutil.rmtree(partial)
    prepare_dataset(streamed(), tmp_path)
