"""Check that names in documents exist: make targets and variables, symbols, files.

Only code spans and code blocks of Markdown files are checked. Placeholders (NAME, <study>, *.py)
are skipped.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from lib.errors import Problem

_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
# A make command, up to its end or to the two spaces before a remark.
_MAKE = re.compile(r"(?<![\w./-])make((?: (?:\w+=\"[^\"]*\"|[^\s`&|;#()]+))*)")
_SETTING = re.compile(r"(\w+)=")
_SYMBOL = re.compile(r"(?<![\w$/.<-])(?:CONFIG_)?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?![\w.>-])")
_WORD = re.compile(r"[^\s`\"'(),;:=|]+")
_SUFFIXES = (".py", ".md", ".txt", ".toml", ".json", ".jsonl", ".csv", ".yaml", "/")
_PLACEHOLDER = re.compile(r"\b(?:NAME|FRAG(?:MENT)?|DIR|PATH|PATTERN)\b|[<>*…]|\.\.\.")


@dataclass(frozen=True)
class Known:
    """Names that a document may mention."""

    # make targets, except those for defconfigs and their combinations.
    targets: Set[str]
    # Defconfigs and fragments.
    configurations: Set[str]
    # Variables of make, environment variables, and Kconfig symbols.
    names: Set[str]
    # Files and folders of the tree (by path and by name), and the files of a run.
    paths: Set[str]
    # Generated files and folders; the contents of such folders are not checked.
    written: Set[str]


def check(path: Path, text: str, known: Known) -> Iterator[Problem]:
    """Yield one problem for each name that does not exist."""
    # Join continued lines into one command without changing the number of lines.
    text = re.sub(r" *\\\n *(.*)", r" \1\n", text)
    for code in _CODE.finditer(text):
        for number, line in enumerate(code[0].split("\n"), text.count("\n", 0, code.start()) + 1):
            where = f"{path}:{number}"
            for word in _variables(line, known):
                yield Problem(f"unknown make variable {word}", where, code="style.unknown-variable")
            for word in _targets(line, known):
                yield Problem(f"unknown make target {word}", where, code="style.unknown-target")
            for word in _symbols(line, known):
                what = f"unknown symbol or variable {word}"
                yield Problem(what, where, code="style.unknown-symbol")
            for word in _paths(line, known):
                yield Problem(f"no such file or folder {word}", where, code="style.unknown-path")


def _words(line: str) -> Iterator[str]:
    """Yield the arguments of every make command in ``line``."""
    for call in _MAKE.finditer(line):
        yield from re.findall(r"\w+=\"[^\"]*\"|\S+", call[1])


def _variables(line: str, known: Known) -> Iterator[str]:
    settings = (match[1] for match in map(_SETTING.match, _words(line)) if match)
    return (name for name in settings if name not in known.names)


def _targets(line: str, known: Known) -> Iterator[str]:
    for word in _words(line):
        if not _SETTING.match(word) and not word.startswith("-") and not _is_target(word, known):
            yield word


def _is_target(word: str, known: Known) -> bool:
    if word in known.targets or _PLACEHOLDER.search(word):
        return True
    name = word.removeprefix("defconfig-")
    return name != word and set(name.split("+")) <= known.configurations


def _symbols(line: str, known: Known) -> Iterator[str]:
    for symbol in _SYMBOL.finditer(line):
        if symbol[1] not in known.names:
            yield symbol[1]


def _paths(line: str, known: Known) -> Iterator[str]:
    for word in map(str, _WORD.findall(line)):
        word = word.removeprefix("./").rstrip(".")
        is_path = word.endswith(_SUFFIXES) and not word.startswith(("/", "~", "-", "$", "+"))
        written = word.split("/")[0] in known.written or _PLACEHOLDER.search(word)
        if is_path and not written and word.rstrip("/") not in known.paths:
            yield word
