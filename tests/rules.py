"""Architecture rules: each function takes a parsed module and yields the violations.

ruff has the others: pyproject.toml.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_SCRIPT_LINES = 80

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def long_functions(tree: ast.Module) -> Iterator[str]:
    """Yield functions of more than ``MAX_FUNCTION_LINES`` lines, docstring included."""
    for node in nodes(tree):
        if isinstance(node, _FUNCTIONS):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def dynamic_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield ``hasattr`` and ``getattr`` with a default: a missing attribute should be an error."""
    for call in calls(tree):
        name = ast.unparse(call.func)
        if name == "hasattr" or (name == "getattr" and len(call.args) > 2):
            yield f"{call.lineno}: {name}"


def locale_encodings(tree: ast.Module) -> Iterator[str]:
    """Yield text files and pipes whose encoding depends on the locale."""
    for call in calls(tree):
        name = ast.unparse(call.func).rpartition(".")[2]
        options = {keyword.arg for keyword in call.keywords}
        # The encoding is the first argument of Path.read_text.
        is_text = name == "write_text" or (name == "read_text" and not call.args)
        is_text |= name in ("run", "Popen", "check_output") and "text" in options
        if ast.unparse(call.func) == "open":
            modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
            is_text = not any("b" in ast.unparse(mode) for mode in modes)
        if is_text and "encoding" not in options:
            yield f"{call.lineno}: {name} without encoding"


def import_graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the modules that each module imports, also in functions and under TYPE_CHECKING."""
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        imported: set[str] = set()
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                # An imported name is a module, or defined by the module.
                full_names = (f"{node.module}.{alias.name}" for alias in node.names)
                imported |= {full if full in trees else node.module for full in full_names}
        graph[name] = imported & trees.keys() - {name}
    return graph


def imports(tree: ast.Module, *, at_import: bool = False) -> set[str]:
    """Return the absolute names that a module imports.

    ``at_import`` skips imports inside functions. ``from a.b import c`` yields both ``a.b`` and
    ``a.b.c``, because c may be a module.
    """
    names: set[str] = set()
    for node in _statements(tree) if at_import else nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield everything that runs when a module is imported: no function bodies."""
    for child in ast.iter_child_nodes(node):
        is_type_checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not isinstance(child, _FUNCTIONS) and not is_type_checking:
            yield child
            yield from _statements(child)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a module; cached, because walking takes longer than the rules."""
    return tuple(ast.walk(tree))


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield every call of a module."""
    return (node for node in nodes(tree) if isinstance(node, ast.Call))
