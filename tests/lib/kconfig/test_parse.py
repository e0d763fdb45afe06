"""Every line is either read exactly or refused with its file and line."""

import pytest

from lib.errors import ConfigError
from lib.kconfig import Assignment, parse_set, parse_text, read_file


def problems(text: str) -> list[str]:
    return [str(problem) for problem in parse_text(text, "defconfig", "f").problems]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("CONFIG_A=y", "y"),
        ("CONFIG_A=12", "12"),
        ("# CONFIG_A is not set", "n"),
        ('CONFIG_A=""', ""),
        ('CONFIG_A=" two  words "', " two  words "),
        (r'CONFIG_A="say \"hi\" \\ done"', r'say "hi" \ done'),
        (
            "CONFIG_A=\"# no comment = $(shell id) `id` 'é漢'\"",
            "# no comment = $(shell id) `id` 'é漢'",
        ),
        ("CONFIG_A=y \t\r", "y"),
    ],
)
def test_reads_a_value_as_data(line: str, value: str) -> None:
    layer = parse_text(f"# a comment\n\n{line}\n", "fragment", "f")
    assert layer.assignments == (Assignment("A", value, "f:3"),)
    assert layer.label == "fragment" and not layer.problems


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("CONFIG_A = y", "spaces around '='; write CONFIG_A=y"),
        ("CONFIG_A =y", "spaces around '='; write CONFIG_A=y"),
        ("CONFIG_A= y", "spaces around '='; write CONFIG_A=y"),
        (" CONFIG_A=y", "space before CONFIG_A"),
        ("A=y", "malformed line; write CONFIG_A=y"),
        ("CONFIG_A", "malformed line 'CONFIG_A'; neither CONFIG_NAME=value nor a comment"),
        ("CONFIG_A=", "CONFIG_A: no value behind '='"),
        ("CONFIG_A=y # why", "CONFIG_A: comment behind a value; give it a line of its own"),
        ('CONFIG_A="x" # why', "CONFIG_A: comment behind a value; give it a line of its own"),
        ('CONFIG_A="x', "CONFIG_A: unterminated quotes"),
        (r'CONFIG_A="x\"', "CONFIG_A: unterminated quotes"),
        (r'CONFIG_A="C:\new"', r"CONFIG_A: a backslash in a string is written \\, and a quote \""),
        (
            'CONFIG_A="x"y"',
            r"CONFIG_A: text behind the closing quote; a quote inside a string is written \"",
        ),
        ("CONFIG_A=two words", "CONFIG_A: malformed value two words; a string stands in quotes"),
        ("#CONFIG_A is not set", "malformed line; write '# CONFIG_A is not set' and no more"),
        ("# CONFIG_A is not set, as", "malformed line; write '# CONFIG_A is not set' and no more"),
    ],
)
def test_refuses_what_only_looks_like_an_assignment(line: str, what: str) -> None:
    layer = parse_text(f"CONFIG_OK=1\n{line}\n", "defconfig", "f")
    assert [str(problem) for problem in layer.problems] == [f"f:2: {what}"]
    assert [a.name for a in layer.assignments] == ["OK"]


def test_all_bad_lines_are_listed() -> None:
    assert len(problems("CONFIG_A = 1\nCONFIG_B=2\nnonsense\nCONFIG_C=\n")) == 3


def test_a_separator_that_is_no_newline_stays_in_its_line() -> None:
    """U+2028 ends a line for str.splitlines, which would make two assignments of one value."""
    layer = parse_text('CONFIG_A="x\u2028CONFIG_B=y"', "defconfig", "f")
    assert [a.name for a in layer.assignments] == ["A"]


def test_a_file_must_be_utf8(tmp_path) -> None:
    (tmp_path / "f").write_bytes(b"CONFIG_A=y\nCONFIG_B=\xff\n")
    with pytest.raises(ConfigError, match="^defconfigs/f:2: not UTF-8 text$"):
        read_file(tmp_path / "f", "defconfig", "defconfigs/f")


def test_a_missing_file_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="absent: cannot read it: No such file"):
        read_file(tmp_path / "absent", "fragment")


@pytest.mark.parametrize(
    "setting",
    ["A=1 B=y C=\"two words\" D='$(id) `x` é'", ["A=1", "B=y", "C=two words", "D=$(id) `x` é"]],
)
def test_set_is_split_as_a_shell_would(setting) -> None:
    layer = parse_set(setting)
    values = {a.name: a.value for a in layer.assignments}
    assert values == {"A": "1", "B": "y", "C": "two words", "D": "$(id) `x` é"}
    assert layer.label == "command line" and {a.where for a in layer.assignments} == {"SET"}


def test_set_takes_names_as_files_spell_them() -> None:
    assert parse_set("CONFIG_A=1").assignments == (Assignment("A", "1", "SET"),)


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ('A="1', "SET: unterminated quotes"),
        ("A", "SET: 'A' is not NAME=value, written without spaces around '='"),
        ("=1", "SET: '=1' is not NAME=value, written without spaces around '='"),
        ("A-B=1", "SET: 'A-B=1' is not NAME=value, written without spaces around '='"),
    ],
)
def test_set_refuses_what_is_no_assignment(setting: str, what: str) -> None:
    assert [str(problem) for problem in parse_set(setting).problems] == [what]
