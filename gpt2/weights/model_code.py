"""The files of code in an exported model: the modules of this tree that it imports, in one flat folder.

Imports become relative: transformers copies what ``from .name import`` names, and no folders. Those
that may fail (triton), of absent components and of absent packages raise ImportError.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from torch import nn

_PACKAGES = {"gpt2", "lib"}
# What an exported model may require; transformers needs numpy.
_INSTALLED = {"torch", "transformers", "numpy"} | sys.stdlib_module_names
# A process may load the program and several exports, and operators are registered for all of them.
_OPERATOR = re.compile(r'"kablate::(\w+)"')
# Hexadecimal, because a folder's name, part of the module's, may have blanks or letters such as ö.
_OWN_OPERATOR = r'"export_" + __name__.encode().hex() + "::\1"'


def model_files(entries: Iterable[str], built: set[type]) -> dict[str, str]:
    """Return name → text of the copies of ``entries`` and of all that a model of the classes ``built`` needs."""
    texts: dict[str, str] = {}
    pending = list(entries)
    while pending:
        if (module := pending.pop()) not in texts:
            texts[module], imported = _copy(module, built)
            pending += imported
    files = {f"{flat_name(module)}.py": text for module, text in sorted(texts.items())}
    assert len(files) == len(texts), f"two modules have one name: {sorted(texts)}"
    return files


def flat_name(module: str) -> str:
    """Return the name of the copy: nsa_options of ``gpt2.nsa.options``, nsa of ``gpt2.nsa.module``."""
    parts = [part for part in module.split(".") if part not in ("gpt2", "module")]
    following = [*parts[1:], ""]
    return "_".join(a for a, b in zip(parts, following, strict=True) if not b.startswith(a))


def _copy(module: str, built: set[type]) -> tuple[str, list[str]]:
    """Return the text of a module's copy, and the modules of the tree that the copy imports."""
    spec = find_spec(module)
    assert spec and spec.origin, module
    source = Path(spec.origin).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    expected = _imports_that_may_fail(tree)
    imported: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{module} has a relative import"
            names = [node.module]
        packages = {name.partition(".")[0] for name in names}
        is_deferred = node not in tree.body
        if not packages & _PACKAGES:
            if not packages <= _INSTALLED and node not in expected:
                assert is_deferred, f"{module} requires {packages}"
                _replace(lines, node, ["raise ImportError"])
        elif node in expected or (is_deferred and not _is_needed(node, built)):
            _replace(lines, node, ["raise ImportError"])
        else:
            imported += _make_relative(lines, node)
    return _OPERATOR.sub(_OWN_OPERATOR, "".join(lines)), imported


def _imports_that_may_fail(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes within ``try`` whose ImportError is handled."""
    return {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.Try)
        and any(each.type and ast.unparse(each.type) == "ImportError" for each in block.handlers)
        for statement in block.body
        for node in ast.walk(statement)
    }


def _is_needed(node: ast.Import | ast.ImportFrom, built: set[type]) -> bool:
    """Return whether an import has a name that is not the class of a component that is not built."""
    assert isinstance(node, ast.ImportFrom) and node.module
    values = vars(importlib.import_module(node.module))
    for alias in node.names:
        value = values.get(alias.name)
        is_component = isinstance(value, type) and issubclass(value, nn.Module)
        if not is_component or value in built:
            return True
    return False


def _make_relative(lines: list[str], node: ast.Import | ast.ImportFrom) -> list[str]:
    """Replace an import of the tree by one of the flat folder; return the modules that it imports."""
    assert isinstance(node, ast.ImportFrom) and node.module
    spec = find_spec(node.module)
    if spec and spec.submodule_search_locations is None:
        line = node.lineno - 1
        flat = f"from .{flat_name(node.module)} import"
        assert f"from {node.module} import" in lines[line]
        lines[line] = lines[line].replace(f"from {node.module} import", flat)
        return [node.module]
    statements, modules = [], []
    for alias in node.names:
        modules.append(f"{node.module}.{alias.name}")
        flat = flat_name(modules[-1])
        # The first form is the one that transformers looks for.
        statements.append(f"from .{flat} import __name__ as _")
        statements.append(f"from . import {flat} as {alias.asname or alias.name}")
    _replace(lines, node, statements)
    return modules


def _replace(lines: list[str], node: ast.stmt, statements: list[str]) -> None:
    """Replace the lines of a statement; their number stays, so that later ones keep their place."""
    assert node.end_lineno
    first, indent = node.lineno - 1, " " * node.col_offset
    lines[first : node.end_lineno] = [
        "".join(f"{indent}{statement}\n" for statement in statements),
        *[""] * (node.end_lineno - node.lineno),
    ]
