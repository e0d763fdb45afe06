"""Locks, and files that are replaced, never follow a symbolic link."""

import os
from pathlib import Path

import pytest

from lib.errors import RunError
from lib.files import write_atomic
from lib.runner.locks import acquire_lock


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / ".lock"
    victim.write_text("of another program")
    path.symlink_to(victim)
    with pytest.raises(RunError) as caught, acquire_lock(path):
        pass
    assert caught.value.codes == ["file.symbolic-link"]
    assert victim.read_text() == "of another program"


def test_a_temporary_file_that_is_a_link_is_replaced(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("of another program")
    path.with_name(f".file.{os.getpid()}.tmp").symlink_to(victim)
    write_atomic(path, "new")
    assert (victim.read_text(), path.read_text()) == ("of another program", "new")
