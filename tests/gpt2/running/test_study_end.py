"""The command after a study: once for each make that trained a run, whatever ended it."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from gpt2.running.study_end import command_at_end
from lib.errors import PreflightError, Problem, RunError
from lib.report.study import VERDICTS_FILE
from lib.runner.hooks import command_words
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
DOCUMENT = {"study": "demo", "title": "$(touch pwned)"}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return a command that appends what it reads to a file."""
    words = [sys.executable, "-c", APPEND, str(tmp_path / "read")]
    return command_words(shlex.join(words), "ON_STUDY_DONE_CMD")


def read(tmp_path: Path) -> list[dict]:
    file = tmp_path / "read"
    text = file.read_text() if file.exists() else ""
    # One document each, pretty printed.
    return [json.loads(each) for each in text.split("\n\n") if each.strip()]


def end(folder: Path, state: State) -> None:
    run = RunDir(folder / "a-s1-00000000")
    run.path.mkdir(parents=True, exist_ok=True)
    write_status(run, RunStatus(state))


@pytest.mark.parametrize("state", [State.SUCCESS, State.FAILED, State.INTERRUPTED])
def test_it_is_started_once_whatever_the_runs_became(tmp_path, words, state):
    folder = tmp_path / "demo"
    folder.mkdir()
    # Of an earlier make: as after Ctrl-C, with which nothing is written.
    (folder / VERDICTS_FILE).write_text('{"study": "earlier"}\n')
    with command_at_end(words, folder, lambda: DOCUMENT):
        end(folder, state)
    (document,) = read(tmp_path)
    assert document.items() >= DOCUMENT.items() and not list(tmp_path.rglob("pwned"))


def test_it_reads_the_document_that_was_written(tmp_path, words):
    folder = tmp_path / "demo"
    with command_at_end(words, folder, lambda: pytest.fail("computed again")):
        end(folder, State.SUCCESS)
        (folder / VERDICTS_FILE).write_text('{"study": "written"}\n')
    assert read(tmp_path) == [{"study": "written"}]


@pytest.mark.parametrize(("error", "times"), [(PreflightError, 0), (RunError, 1)])
def test_an_error_is_not_hidden_and_starts_it_if_a_run_had_begun(tmp_path, words, error, times):
    folder = tmp_path / "demo"
    with pytest.raises(error), command_at_end(words, folder, lambda: DOCUMENT):
        if error is RunError:
            end(folder, State.FAILED)
        raise error(Problem("the disk is full", code="disk.write-failed"))
    assert len(read(tmp_path)) == times


def test_a_make_that_trains_nothing_does_not_start_it(tmp_path, words):
    folder = tmp_path / "demo"
    end(folder, State.SUCCESS)
    with command_at_end(words, folder, lambda: DOCUMENT):
        (folder / "table.md").touch()
    assert read(tmp_path) == []


@pytest.mark.parametrize("text", ["false", "sleep 9", "/bin/sh -c 'exec 0<&-; exit 3'"])
def test_a_command_that_fails_or_hangs_is_a_warning(tmp_path, capsys, monkeypatch, text):
    monkeypatch.setattr("lib.runner.hooks._LIMIT_SECONDS", 0.2)
    folder = tmp_path / "demo"
    with command_at_end(shlex.split(text), folder, lambda: {"rows": "x" * 10**6}):
        end(folder, State.SUCCESS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARN") and "demo" in line


def test_a_document_that_cannot_be_made_is_a_warning(tmp_path, words, capsys):
    def damaged():
        raise RunError(Problem("damaged", code="run.damaged"))

    folder = tmp_path / "demo"
    with command_at_end(words, folder, damaged):
        end(folder, State.SUCCESS)
    assert "WARN" in capsys.readouterr().err and read(tmp_path) == []
