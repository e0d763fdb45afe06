"""Pipes and links in place of files, and leftovers of killed processes."""

import os
import subprocess
import tempfile

import pytest

from lib.config.layers import read_file
from lib.files import (
    no_follow,
    remove_leftovers,
    sha256_file,
    size_bytes,
    temporary_path,
    write_atomic,
)
from lib.runner.local import LocalExecutor
from tests.errors import error_of


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_only_temporary_files_of_dead_processes_are_removed(tmp_path):
    dead = dead_process()
    live = {name: temporary_path(tmp_path / name).name for name in ("status.json", "link", "m.5.x")}
    old = {name: text.replace(f"-{os.getpid()}.", f"-{dead}.") for name, text in live.items()}
    left, outside = [old["status.json"], old["m.5.x"]], tmp_path / "x"
    outside.write_text("")
    (tmp_path / old["link"]).symlink_to(outside)
    # The process may be alive on another machine.
    kept = [live["status.json"], f".status.json.other_host-{dead}.tmp", ".name.tmp", "x"]
    for name in [*left, *kept]:
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_folders_of_killed_runners_are_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, live = (f"kablate-job-{process}-ab" for process in (dead_process(), os.getpid()))
    for name in (left, live):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rendezvous").write_text("")
    LocalExecutor((), {})
    assert [path.name for path in tmp_path.iterdir()] == [live]


def test_a_pipe_or_device_in_place_of_a_file_is_an_error_and_no_wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(OSError, match="not a regular file"):
            sha256_file(tmp_path / name)
        assert error_of(read_file, tmp_path / name, "config").codes == ["config.unreadable"]
    with pytest.raises(OSError):
        os.close(no_follow(tmp_path / "pipe", os.O_WRONLY))


def test_a_temporary_file_that_is_a_link_is_replaced_and_no_error_names_it(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("of another program")
    temporary_path(path).symlink_to(victim)
    write_atomic(path, "new")
    assert (victim.read_text(), path.read_text()) == ("of another program", "new")
    absent = tmp_path / "absent" / ".config"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(absent, "new")
    assert caught.value.filename == str(absent)


def test_files_that_vanish_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("1234")
    assert size_bytes(tmp_path) == 4
    found = [(str(tmp_path / "folder"), [], ["vanished", "file"])]
    monkeypatch.setattr(os, "walk", lambda folder: found)
    assert size_bytes(tmp_path) == 4
