"""Reads ``CONFIG_NAME=value`` lines and ``SET="A=1 B=y"``, and refuses what only looks like them.

A file is data: nothing in a value is expanded. Inside quotes ``\\"`` and ``\\\\`` are the only
escapes; kconfiglib would drop any other backslash in silence.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from lib.errors import ConfigError, Problem
from lib.kconfig.layers import Assignment, Layer

PREFIX = "CONFIG_"
_NAME = re.compile(r"[A-Za-z0-9_]+")
_ASSIGNMENT = re.compile(r"CONFIG_([A-Za-z0-9_]+)=(.*)", re.DOTALL)
_NOT_SET = re.compile(r"# CONFIG_([A-Za-z0-9_]+) is not set")
_ALMOST_NOT_SET = re.compile(r"\s*#\s*(CONFIG_\w+)\s+is\s+not\s+set\b")
_STRING = re.compile(r'"((?:[^"\\]|\\["\\])*)"(.*)', re.DOTALL)
_STRING_WITH_ANY_ESCAPE = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_COMMENT_BEHIND = "comment behind a value; give it a line of its own"


def read_file(path: Path, label: str, shown: str = "") -> Layer:
    """The assignments of a ``.config``, defconfig or fragment; ``shown`` names it in errors.

    Malformed lines become the layer's ``problems``, so that they are listed with all the others.
    Raises ConfigError when the file cannot be read at all or is not UTF-8.
    """
    shown = shown or str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(Problem(f"cannot read it: {error.strerror}", shown)) from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(Problem("not UTF-8 text", f"{shown}:{line}")) from None
    return parse_text(text, label, shown)


def parse_text(text: str, label: str, shown: str) -> Layer:
    """The assignments in the text of a configuration file that errors call ``shown``."""
    assignments, problems = [], []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{shown}:{number}"
        try:
            found = _parse_line(line.rstrip(" \t\r"))
        except ValueError as error:
            problems.append(Problem(str(error), where))
            continue
        if found:
            name, value, quoted = found
            assignments.append(Assignment(name, value, where, quoted))
    return Layer(label, tuple(assignments), tuple(problems))


def parse_set(text_or_words: str | Sequence[str]) -> Layer:
    """The layer of ``SET="A=1 B=y"``: one text, split as a shell would, or words split already."""
    words: Sequence[str]
    try:
        words = shlex.split(text_or_words) if isinstance(text_or_words, str) else text_or_words
    except ValueError:
        return Layer("command line", (), (Problem("unterminated quotes", "SET"),))
    assignments, problems = [], []
    for word in words:
        name, equals, value = word.partition("=")
        name = name.removeprefix(PREFIX)
        if equals and _NAME.fullmatch(name):
            assignments.append(Assignment(name, value, "SET"))
        else:
            what = f"{word!r} is not NAME=value, written without spaces around '='"
            problems.append(Problem(what, "SET"))
    return Layer("command line", tuple(assignments), tuple(problems))


def _parse_line(line: str) -> tuple[str, str, bool] | None:
    """Name, value and whether it was quoted; None for a comment. ValueError says what is wrong."""
    if not line or line.lstrip().startswith("#"):
        return _parse_comment(line)
    match = _ASSIGNMENT.fullmatch(line)
    if not match:
        raise ValueError(_what_is_malformed(line))
    name, value = match.groups()
    if value[:1].isspace():
        raise ValueError(f"spaces around '='; write {PREFIX}{name}={value.strip()}")
    quoted = value.startswith('"')
    try:
        return name, _parse_string(value) if quoted else _parse_bare(value), quoted
    except ValueError as error:
        raise ValueError(f"{PREFIX}{name}: {error}") from None


def _parse_comment(line: str) -> tuple[str, str, bool] | None:
    match = _NOT_SET.fullmatch(line)
    if match:
        return match.group(1), "n", False
    almost = _ALMOST_NOT_SET.match(line)
    if almost:
        raise ValueError(f"malformed line; write '# {almost.group(1)} is not set' and no more")
    return None


def _what_is_malformed(line: str) -> str:
    name, equals, value = (part.strip() for part in line.partition("="))
    if equals and _NAME.fullmatch(name):
        if not name.startswith(PREFIX):
            return f"malformed line; write {PREFIX}{name}={value}"
        if line[0].isspace():
            return f"space before {name}"
        return f"spaces around '='; write {name}={value}"
    return f"malformed line {line!r}; neither {PREFIX}NAME=value nor a comment"


def _parse_string(value: str) -> str:
    match = _STRING.fullmatch(value)
    if not match:
        if _STRING_WITH_ANY_ESCAPE.match(value):
            raise ValueError(r"a backslash in a string is written \\, and a quote \"")
        raise ValueError("unterminated quotes")
    text, rest = match.groups()
    if rest.lstrip().startswith("#"):
        raise ValueError(_COMMENT_BEHIND)
    if rest:
        raise ValueError(r"text behind the closing quote; a quote inside a string is written \"")
    return re.sub(r"\\(.)", r"\1", text)


def _parse_bare(value: str) -> str:
    if not value:
        raise ValueError("no value behind '='")
    if "#" in value:
        raise ValueError(_COMMENT_BEHIND)
    if '"' in value or any(character.isspace() for character in value):
        raise ValueError(f"malformed value {value}; a string stands in quotes")
    return value
