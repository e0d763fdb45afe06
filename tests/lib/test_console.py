"""Lines on a terminal, and the exit of a command."""

import errno
import io
import json
import os
import sys
import warnings

import pytest

from lib import console
from lib.errors import EXIT_PREFLIGHT, ConfigError, Problem

LONG = f"ratio/00-baseline s1   {'word ' * 20}/a/path/{'x' * 80}"


def test_a_line_is_broken_between_words_on_a_terminal_only(monkeypatch, capsys):
    console.log("TRAIN", LONG)
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    console.log("TRAIN", LONG)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:8] for line in lines] == ["TRAIN   ", *[" " * 8] * (len(lines) - 1)]
    assert all(len(line) <= 80 for line in lines[:-1]) and lines[-1].strip() == LONG.split()[-1]
    assert " ".join(lines).split() == ["TRAIN", *LONG.split()]


@pytest.mark.parametrize(
    ("text", "columns", "folded"),
    [
        ("a\n\n   b  c\n", 8, "a\n\n   b  c\n"),
        (LONG, None, LONG),
        # A number stays with its unit.
        ("in 127.5 s of it", 9, "in\n127.5 s\nof it"),
        ("in 3 small steps", 9, "in 3\nsmall\nsteps"),
    ],
)
def test_lines_are_folded(text, columns, folded):
    assert console.folded(text, columns) == folded


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS])
def test_a_file_that_cannot_be_used_is_a_problem_with_a_code(number, monkeypatch, capsys):
    def main():
        raise OSError(number, os.strerror(number), "/tree/.config")

    monkeypatch.setenv("JSON", "1")
    with pytest.raises(SystemExit) as caught:
        console.run_main(main)
    assert caught.value.code == EXIT_PREFLIGHT
    out, err = capsys.readouterr()
    (problem,) = json.loads(out)["problems"]
    assert (problem["code"], problem["where"]) == ("file.input-output", "/tree/.config")
    assert f"/tree/.config: {os.strerror(number)} [file.input-output]" in err
    assert ("make O=FOLDER" in err) == (number != errno.ENOENT)


@pytest.mark.parametrize(
    ("statement", "code", "named"),
    [
        ("import nonesuch.part", "env.broken-package", "nonesuch cannot be imported"),
        ("raise MemoryError", "machine.no-memory", "out of memory"),
    ],
)
def test_a_package_or_memory_that_is_missing_is_a_problem(capsys, statement, code, named):
    with pytest.raises(SystemExit) as caught:
        console.run_main(lambda: exec(statement) or 0)
    assert caught.value.code == EXIT_PREFLIGHT
    first, *_ = capsys.readouterr().err.splitlines()
    assert named in first and f"[{code}]" in first


def test_only_colours_of_this_process_reach_the_terminal():
    word = console.painted("BETTER", "1", "32")
    text = f"a\tb\n{word} \x1b[31mred \x1b]0;t\x07 \u202e\u200f\x9b\r"
    escaped = "\\x1b[31mred \\x1b]0;t\\x07 \\u202e\\u200f\\x9b\\r"
    assert console.shown(text, colour=True) == f"a\tb\n\x1b[1;32mBETTER\x1b[0m {escaped}"
    assert console.shown(text, colour=False) == f"a\tb\nBETTER {escaped}"
    assert console.painted("", "1") == "" and console.painted("plain") == "plain"


def test_questions_and_tracebacks_are_escaped(monkeypatch, capsys):
    def fail():
        raise ConfigError(Problem("damaged", "a", "type: \x1b[2J", code="run.damaged"))

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    console.confirm("apply \x1b[2J\u202e?", yes=False)
    monkeypatch.setenv("V", "1")
    with pytest.raises(SystemExit):
        console.run_main(fail)
    shown = capsys.readouterr().err
    assert "apply \\x1b[2J\\u202e?" in shown and "\x1b" not in shown and "Traceback" in shown


@pytest.mark.parametrize(("verbose", "shown"), [("", 0), ("1", 1)])
def test_warnings_of_libraries_are_for_their_developers(monkeypatch, recwarn, verbose, shown):
    monkeypatch.setenv("V", verbose)
    monkeypatch.setattr(sys, "warnoptions", [])
    with pytest.raises(SystemExit):
        console.run_main(lambda: warnings.warn("kernel not used", stacklevel=1) or 0)
    assert len(recwarn) == shown
