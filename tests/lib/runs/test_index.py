"""The index of runs returns what the files contain, whatever happens to them or to the index."""

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lib.runs import index
from lib.runs.index import RunIndex
from lib.runs.run_dir import RunDir

RUNS = 3


class Reader:
    """Reads one number from the file ``value`` of each run, and counts the reads."""

    def __init__(self, folder: Path, storable: bool = True) -> None:
        self.folder = folder
        self.storable = storable
        self.reads = 0

    def read_all(
        self, command: str = "number", shared: Sequence[str] = (), settings: str = ""
    ) -> list[Mapping[str, Any]]:
        """Read every run through an index as a new command would."""
        runs: RunIndex[Mapping[str, Any]] = RunIndex(
            self.folder, command, dict, dict, shared=shared, settings=settings
        )
        paths = sorted(path for path in self.folder.iterdir() if path.is_dir())
        values = [runs.read(RunDir(path), lambda: ["value"], self._reader(path)) for path in paths]
        runs.save()
        return values

    def _reader(self, path: Path) -> Callable[[], tuple[Mapping[str, Any], bool]]:
        def read() -> tuple[Mapping[str, Any], bool]:
            self.reads += 1
            return {"run": path.name, "value": [int((path / "value").read_text())]}, self.storable

        return read


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_NEW_ENTRIES", 1)
    # Files that were just written are settled.
    monkeypatch.setattr(index, "RACY_NS", -(10**12))
    for number in range(RUNS):
        path = tmp_path / "study" / f"run-{number}"
        path.mkdir(parents=True)
        (path / "value").write_text("7")
    return Reader(tmp_path / "study")


def index_file(reader: Reader) -> Path:
    (path,) = (reader.folder.parent / "cache/kablate/runs").iterdir()
    return path


def test_a_second_command_reads_no_file(reader: Reader) -> None:
    values = reader.read_all()
    assert reader.read_all() == values
    assert reader.reads == RUNS
    assert reader.read_all("another") == values
    assert reader.read_all(settings="another") == values
    assert reader.reads == 3 * RUNS


def test_equal_values_of_a_shared_field_are_stored_once(reader: Reader) -> None:
    values = reader.read_all(shared=["value"])
    again = reader.read_all(shared=["value"])
    assert again == values and reader.reads == RUNS
    assert len({id(value["value"]) for value in again}) == 1
    assert index_file(reader).read_text().count("[7]") == 1


def test_other_values_of_a_shared_field_are_stored_too(reader: Reader) -> None:
    for number in range(RUNS):
        (reader.folder / f"run-{number}/value").write_text(str(number % 2))
    values = reader.read_all(shared=["value"])
    assert values == reader.read_all(shared=["value"])
    assert reader.reads == RUNS


def edited(path: Path) -> None:
    (path / "value").write_text("123")


def edited_with_its_size_and_time(path: Path) -> None:
    old = os.stat(path / "value")
    # The clock of the file system advances in ticks of some milliseconds.
    time.sleep(0.012)
    (path / "value").write_text("8")
    os.utime(path / "value", ns=(old.st_atime_ns, old.st_mtime_ns))


def replaced(path: Path) -> None:
    (path / "new").write_text("8")
    old = os.stat(path / "value")
    os.utime(path / "new", ns=(old.st_atime_ns, old.st_mtime_ns))
    os.replace(path / "new", path / "value")


def gained_a_file(path: Path) -> None:
    (path / "other").touch()


def moved(path: Path) -> None:
    path.rename(path.with_name("run-9"))


@pytest.mark.parametrize(
    "change", [edited, edited_with_its_size_and_time, replaced, gained_a_file, moved]
)
def test_a_changed_run_is_read_again(reader: Reader, change: Callable[[Path], None]) -> None:
    reader.read_all()
    change(reader.folder / "run-1")
    expected = Reader(reader.folder).read_all("not indexed before")
    assert reader.read_all() == expected
    assert reader.reads == RUNS + 1


def test_a_run_that_may_still_change_is_not_stored(reader: Reader) -> None:
    reader.storable = False
    reader.read_all()
    reader.read_all()
    assert reader.reads == 2 * RUNS
    assert not (reader.folder.parent / "cache").exists()


def test_a_file_that_was_written_just_now_is_not_stored(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the same tick of the clock would leave size and times as they are."""
    monkeypatch.setattr(index, "RACY_NS", 10**12)
    reader.read_all()
    reader.read_all()
    assert reader.reads == 2 * RUNS


def test_a_few_new_runs_are_not_written(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_NEW_ENTRIES", RUNS + 1)
    reader.read_all()
    assert not (reader.folder.parent / "cache").exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"[7]") + 1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def writable_by_all(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    "damage", [flip, truncate, empty, folder, link, fifo, writable_by_all, Path.unlink]
)
def test_an_index_that_cannot_be_trusted_is_dropped(
    reader: Reader, damage: Callable[[Path], None]
) -> None:
    values = reader.read_all()
    damage(index_file(reader))
    assert reader.read_all() == values
    assert reader.reads == 2 * RUNS


def test_an_index_of_other_code_is_dropped(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read_all()
    monkeypatch.setattr(index, "_code_digest", lambda: b"other")
    reader.read_all()
    assert reader.reads == 2 * RUNS


def test_only_the_user_can_read_the_index_and_no_link_is_followed(reader: Reader) -> None:
    reader.read_all()
    path = index_file(reader)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    victim = reader.folder.parent / "victim"
    victim.write_text("victim")
    path.unlink()
    path.symlink_to(victim)
    reader.read_all()
    assert victim.read_text() == "victim"
    assert not path.is_symlink()


@pytest.mark.parametrize("cache", ["a file", "no home", "a full disk"])
def test_without_a_cache_folder_every_file_is_read_without_a_word(
    reader: Reader, cache: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = reader.folder / "run-0/value" if cache == "a file" else "relative"
    if cache == "a full disk":
        place = reader.folder.parent

        def fail(*arguments: object, **options: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("lib.runs.index.write_atomic", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    values = reader.read_all()
    assert reader.read_all() == values
    assert reader.reads == 2 * RUNS
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("V", "1")
    reader.read_all()
    assert (cache == "no home") == (capfd.readouterr().err == "")
