"""Lines on a terminal."""

import sys

import pytest

from lib import console
from lib.errors import ConfigError

LONG = f"ratio/00-baseline s1   {'word ' * 20}/a/path/{'x' * 80}"


def test_a_line_is_broken_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_lines_that_fit_are_left_alone() -> None:
    text = "a\n\n   b  c\n"
    assert console.folded(text, 8) == text and console.folded(LONG, None) == LONG


def test_a_number_stays_with_its_unit() -> None:
    assert console.folded("in 127.5 s of it", 9) == "in\n127.5 s\nof it"
    assert console.folded("in 3 small steps", 9) == "in 3\nsmall\nsteps"


def test_misuse_of_an_option_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        console.CommandLine().parse_args(["--nonesuch"])
    assert caught.value.codes == ["usage.invalid-argument"]
