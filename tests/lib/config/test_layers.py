"""Tests of the parser: every line is either parsed exactly or rejected with its file and line."""

import pytest

from lib.config.layers import Assignment, parse_command_line_settings, parse_text, read_file
from tests.errors import error_of


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("CONFIG_A=y", "y"),
        ("CONFIG_A=12", "12"),
        ("# CONFIG_A is not set", "n"),
        ('CONFIG_A=""', ""),
        ('CONFIG_A=" two  words "', " two  words "),
        (r'CONFIG_A="say \"hi\" \\ done"', r'say "hi" \ done'),
        ("CONFIG_A=\"# $(shell id) `id` 'é漢'\"", "# $(shell id) `id` 'é漢'"),
        ("CONFIG_A=y \t\r", "y"),
    ],
)
def test_reads_a_value_as_data(line, value):
    layer = parse_text(f"# a comment\n\n{line}\n", "fragment", "f")
    assert layer.assignments == (Assignment("A", value, "f:3"),)
    assert layer.label == "fragment" and not layer.problems


@pytest.mark.parametrize(
    "line",
    [
        *("CONFIG_A = y", "CONFIG_A =y", "CONFIG_A= y", " CONFIG_A=y", "A=y", "CONFIG_A"),
        "CONFIG_A=",
        *("CONFIG_A=y # why", 'CONFIG_A="x" # why', 'CONFIG_A="x', r'CONFIG_A="x\"'),
        *(r'CONFIG_A="C:\new"', 'CONFIG_A="x"y"', "CONFIG_A=two words", 'CONFIG_A=x"y"'),
        *("#CONFIG_A is not set", "# CONFIG_A is not set, as"),
    ],
)
def test_rejects_what_only_looks_like_an_assignment(line):
    layer = parse_text(f"CONFIG_OK=1\n{line}\n", "defconfig", "f")
    (problem,) = layer.problems
    assert (problem.where, problem.code) == ("f:2", "config.malformed")
    assert repr(line) in problem.what
    assert [a.name for a in layer.assignments] == ["OK"]


def test_all_bad_lines_are_listed_and_a_separator_stays_in_its_line():
    """U+2028 ends a line for str.splitlines, which would make two assignments of one value."""
    layer = parse_text("CONFIG_A = 1\nCONFIG_B=2\nnonsense\nCONFIG_C=\n", "defconfig", "f")
    assert len(layer.problems) == 3
    layer = parse_text('CONFIG_A="x\u2028CONFIG_B=y"', "defconfig", "f")
    assert [a.name for a in layer.assignments] == ["A"]


@pytest.mark.parametrize(
    ("content", "where", "code"),
    [
        (b"CONFIG_A=y\nCONFIG_B=\xff\n", "defconfigs/f:2", "not-utf8"),
        (None, "defconfigs/f", "unreadable"),
    ],
)
def test_a_file_must_exist_and_be_utf8(tmp_path, content, where, code):
    if content:
        (tmp_path / "f").write_bytes(content)
    (problem,) = error_of(read_file, tmp_path / "f", "defconfig", "defconfigs/f").problems
    assert (problem.where, problem.code) == (where, f"config.{code}")


@pytest.mark.parametrize(
    "setting",
    [
        "CONFIG_A=1 B=y C=\"two words\" D='$(id) `x` é'",
        ["A=1", "B=y", "C=two words", "D=$(id) `x` é"],
    ],
)
def test_set_is_split_as_a_shell_would(setting):
    layer = parse_command_line_settings(setting)
    values = {a.name: a.value for a in layer.assignments}
    assert values == {"A": "1", "B": "y", "C": "two words", "D": "$(id) `x` é"}
    assert layer.label == "command line" and {a.where for a in layer.assignments} == {"SET"}


@pytest.mark.parametrize(
    ("setting", "code", "part"),
    [
        ('A="1', "config.unterminated-quotes", ""),
        ("A", "config.malformed", "'A'"),
        ("=1", "config.malformed", "'=1'"),
        ("A-B=1", "config.malformed", "'A-B=1'"),
    ],
)
def test_set_rejects_a_malformed_assignment(setting, code, part):
    (problem,) = parse_command_line_settings(setting).problems
    assert (problem.where, problem.code) == ("SET", code) and part in problem.what


@pytest.mark.parametrize("comment", ["# a\rCONFIG_A=y", "# \x1b[2K", "# a\u2028CONFIG_A=y", "#\0"])
def test_a_comment_that_hides_a_line_is_refused(comment):
    layer = parse_text(f"{comment}\n", "defconfig", "f")
    (problem,) = layer.problems
    assert problem.code == "config.invalid-character" and problem.where == "f:1"


def test_line_ends_of_windows_and_tabs_are_no_hidden_characters():
    assert not parse_text("#\ta comment\r\nCONFIG_A=y\r\n", "defconfig", "f").problems
