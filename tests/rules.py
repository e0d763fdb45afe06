"""Architecture rules: each function takes a parsed module and yields the violations."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_SCRIPT_LINES = 80

_FUNCTION_STRING = re.compile(r"[a-z_]\w*(?:\.[a-z_]\w*)+:[A-Za-z_]\w*")
# Functions that read or write text.
_TEXT_CALLS = ("open", "read_text", "write_text", "run", "Popen", "check_output")
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
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name == "hasattr" or (name == "getattr" and len(call.args) > 2):
            yield f"{call.lineno}: {name}"


def sys_path_edits(tree: ast.Module) -> Iterator[str]:
    """Yield statements that change ``sys.path``."""
    for node in nodes(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            target = next((t for t in targets if "sys.path" in ast.unparse(t)), None)
        if target is not None and ast.unparse(target).split("[")[0] == "sys.path":
            yield f"{target.lineno}: sys.path is changed"


def module_commands(tree: ast.Module) -> Iterator[str]:
    """Yield commands that run a module with this interpreter, reserved for ``lib.project``."""
    for node in nodes(tree):
        if isinstance(node, ast.List):
            words = [ast.unparse(word) for word in node.elts]
            if words[:1] == ["sys.executable"] and "'-m'" in words:
                yield f"{node.lineno}: sys.executable -m"


def unsafe_loading(tree: ast.Module) -> Iterator[str]:
    """Yield calls of ``torch.load`` that could unpickle any object."""
    for call in calls(tree):
        keywords = map(ast.unparse, call.keywords)
        if ast.unparse(call.func) == "torch.load" and "weights_only=True" not in keywords:
            yield f"{call.lineno}: torch.load without weights_only=True"


def writes_to_stdout(tree: ast.Module) -> Iterator[str]:
    """Yield writes to stdout that do not escape the control characters of files."""
    for call in calls(tree):
        name = ast.unparse(call.func)
        if re.match(r"sys\.(__)?stdout.*\.write", name):
            yield f"{call.lineno}: {name}"


def uncoded_problems(tree: ast.Module) -> Iterator[str]:
    """Yield calls of ``Problem`` without an error code."""
    for call in calls(tree):
        is_problem = isinstance(call.func, ast.Name) and call.func.id == "Problem"
        # **fields contains the code.
        if is_problem and not {keyword.arg for keyword in call.keywords} & {"code", None}:
            yield f"{call.lineno}: a Problem without a code"


def locale_encodings(tree: ast.Module) -> Iterator[str]:
    """Yield text files and pipes whose encoding depends on the locale."""
    for call in calls(tree):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        is_method = isinstance(call.func, ast.Attribute)
        # The encoding is the first argument of Path.read_text.
        is_text = (name == "read_text" and is_method and not call.args) or name == "write_text"
        is_text |= "text" in named
        if name == "open" and isinstance(call.func, ast.Name):
            mode = call.args[1] if len(call.args) > 1 else named.get("mode", ast.Constant("r"))
            is_text = not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
        if is_text and name in _TEXT_CALLS and "encoding" not in named:
            yield f"{call.lineno}: {name} without encoding"


def function_strings(tree: ast.Module) -> Iterator[str]:
    """Yield strings of the form ``package.module:function``, which no tool can follow."""
    for node in nodes(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _FUNCTION_STRING.fullmatch(node.value)
        ):
            yield f"{node.lineno}: {node.value}"


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
        if not isinstance(child, _FUNCTIONS) and not _is_type_checking(child):
            yield child
            yield from _statements(child)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a module; cached, because walking takes longer than the rules."""
    return tuple(ast.walk(tree))


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield every call of a module."""
    return (node for node in nodes(tree) if isinstance(node, ast.Call))
