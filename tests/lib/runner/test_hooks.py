"""Commands after a run."""

import json
import shlex
import sys

import pytest

from lib.errors import ConfigError
from lib.runner.hooks import command_words, start_command
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunStatus, State

SAVE = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"


@pytest.fixture
def run(tmp_path) -> Run[None]:
    return Run("demo", RunVariant("ra", number=5), 1, None, tmp_path / "ra")


def test_a_command_reads_the_run_and_no_shell_expands_it(tmp_path, run, capsys):
    message = "$(touch pwned) `touch pwned` '; touch pwned"
    file = tmp_path / "a $HOME; b"
    words = command_words(shlex.join([sys.executable, "-c", SAVE, str(file)]), "ON_FAIL_CMD")
    start_command(words, run, RunStatus(State.FAILED, 1, message, 3, 8))
    record = json.loads(file.read_text())
    assert (record["run"], record["state"], record["message"]) == (run.label, "failed", message)
    assert record["directory"] == str(run.path) and record["iteration"] == 3
    assert not list(tmp_path.rglob("pwned")) and capsys.readouterr().err == ""


def test_a_command_that_fails_or_hangs_is_a_warning_without_its_arguments(run, capsys, monkeypatch):
    monkeypatch.setattr("lib.runner.hooks._LIMIT_SECONDS", 0.2)
    for words in (["false"], ["/nonesuch"], ["sh", "-c", "sleep 9 # a token"]):
        start_command(words, run, RunStatus(State.SUCCESS))
    text = capsys.readouterr().err
    assert [line.split()[0] for line in text.splitlines()] == ["WARN"] * 3
    assert "exit code 1" in text and "no end after" in text and "token" not in text


@pytest.mark.parametrize(
    ("text", "code"),
    [("nonesuch-program x", "config.no-such-program"), ("a 'b", "config.malformed")],
)
def test_an_unusable_command_is_refused_before_training(text, code):
    with pytest.raises(ConfigError) as caught:
        command_words(text, "ON_DONE_CMD")
    assert (caught.value.codes, caught.value.problems[0].where) == ([code], "ON_DONE_CMD")
    assert command_words("", "ON_DONE_CMD") == []
