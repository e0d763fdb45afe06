"""What the documents name exists: make's targets and variables, symbols, files.

Read are the code spans and code blocks of Markdown files. A word that stands for something else
(NAME, <study>, *.py) is left alone.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from lib.errors import Problem

_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
# A call of make, up to the end of the command or to the two blanks before a remark.
_MAKE = re.compile(r"(?<![\w./-])make((?: (?:\w+=\"[^\"]*\"|[^\s`&|;#()]+))*)")
_SETTING = re.compile(r"(\w+)=")
_SYMBOL = re.compile(r"(?<![\w$/.<-])(?:CONFIG_)?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?![\w.>-])")
_WORD = re.compile(r"[^\s`\"'(),;:=|]+")
_SUFFIXES = (".py", ".md", ".txt", ".toml", ".json", ".jsonl", ".csv", ".yaml", "/")
_PLACEHOLDER = re.compile(r"\b(?:NAME|FRAG(?:MENT)?|DIR|PATH|PATTERN)\b|[<>*…]|\.\.\.")


@dataclass(frozen=True)
class Known:
    """All that a document may name."""

    # make's targets, those for defconfigs and their combinations left out.
    targets: Set[str]
    # Defconfigs and fragments.
    configurations: Set[str]
    # Variables of make and of the environment, Kconfig symbols.
    names: Set[str]
    # Files and folders of the tree, by path and by name, and the files of a run.
    paths: Set[str]
    # What programs write beside them; what is in such a folder is not looked at.
    written: Set[str]


def check(path: Path, text: str, known: Known) -> Iterator[Problem]:
    """One problem for each name that does not exist."""
    # A continued line is one command; the number of lines stays.
    text = re.sub(r" *\\\n *(.*)", r" \1\n", text)
    for code in _CODE.finditer(text):
        for number, line in enumerate(code[0].split("\n"), text.count("\n", 0, code.start()) + 1):
            for what in (*_calls(line, known), *_symbols(line, known), *_paths(line, known)):
                yield Problem(what, f"{path}:{number}")


def _calls(line: str, known: Known) -> Iterator[str]:
    for call in _MAKE.finditer(line):
        words = re.findall(r"\w+=\"[^\"]*\"|\S+", call[1])
        for word in words:
            setting = _SETTING.match(word)
            if setting and setting[1] not in known.names:
                yield f"make has no variable {setting[1]}"
            if not setting and not word.startswith("-") and not _is_target(word, known):
                yield f"make has no target {word}"


def _is_target(word: str, known: Known) -> bool:
    if word in known.targets or _PLACEHOLDER.search(word):
        return True
    name = word.removeprefix("defconfig-")
    return name != word and set(name.split("+")) <= known.configurations


def _symbols(line: str, known: Known) -> Iterator[str]:
    for symbol in _SYMBOL.finditer(line):
        if symbol[1] not in known.names:
            yield f"there is no symbol or variable {symbol[1]}"


def _paths(line: str, known: Known) -> Iterator[str]:
    for word in map(str, _WORD.findall(line)):
        word = word.removeprefix("./").rstrip(".")
        is_path = word.endswith(_SUFFIXES) and not word.startswith(("/", "~", "-", "$", "+"))
        written = word.split("/")[0] in known.written or _PLACEHOLDER.search(word)
        if is_path and not written and word.rstrip("/") not in known.paths:
            yield f"there is no file or folder {word}"
