"""Faults planted in the product's code, and the findings of ``make check`` that must catch them.

A fault is a table of a TOML file of this folder: its ``file`` has the text ``old``, or each text of a
list, exactly once, and the fault has ``new`` in its place. ``caught_by`` has each check that must
fail, with the property of one of its findings, and regular expressions for names and numbers in it.
"""

import ast
import importlib
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from gpt2.study.study_file import STUDIES, read_study
from lib.config.field import SymbolValue
from lib.project import ROOT


@dataclass(frozen=True)
class Mutant:
    """One fault, and the checks that must fail."""

    name: str
    caught_by: Mapping[str, list[str]]
    file: str
    old: str | list[str]
    new: str | list[str]
    step: str = "baseline"
    defconfig: str = "gpt2-ratio-ablation"
    # Symbols on top of the defconfig.
    settings: Mapping[str, SymbolValue] = field(default_factory=dict)
    # Part of every test run, not only of the long one.
    quick: bool = False

    def plant(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        """Replace the code of the functions, or the study, in which ``old`` stands."""
        text = ROOT.joinpath(self.file).read_text(encoding="utf-8")
        places, wrong = [], text
        for old, new in zip(*map(_listed, (self.old, self.new)), strict=True):
            assert text.count(old) == 1, f"{self.file} has {text.count(old)} times {old!r}"
            places.append(text[: text.index(old)].count("\n") + 1 + old.startswith("\n"))
            wrong = wrong.replace(old, new)
        if self.file.endswith(".toml"):
            study = folder / Path(self.file).name
            study.write_text(wrong, encoding="utf-8")
            patch.setitem(STUDIES, study.stem, read_study(study))
            return
        module = importlib.import_module(self.file.removesuffix(".py").replace("/", "."))
        planted = compile(wrong, str(ROOT / self.file), "exec")
        for line in places:
            function, code = module, planted
            for name in _names(ast.parse(text), line):
                function, code = vars(function)[name], _inner(code, name)
            patch.setattr(_plain(function), "__code__", code)


def planted_faults() -> list[Mutant]:
    """Return the faults of all files of this folder."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    tables = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    return [Mutant(name, **fault) for table in tables for name, fault in table.items()]


def _listed(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def _names(module: ast.Module, line: int) -> list[str]:
    """Return the names of the classes around a line, and of the outermost function."""
    names: list[str] = []
    node: Any = module
    while not isinstance(node, ast.FunctionDef):
        named = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        (node,) = (n for n in named if n.lineno <= line <= (n.end_lineno or 0))
        names.append(node.name)
    return names


def _inner(code: CodeType, name: str) -> CodeType:
    (found,) = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return found


def _plain(function: Any) -> Any:
    """Return the function of a property, a static method or behind decorators."""
    for wrapper in ("fget", "__func__"):
        function = getattr(function, wrapper, function)
    return inspect.unwrap(function)
