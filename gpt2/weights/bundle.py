"""One Python file with the definitions that some entry points need, copied from the modules of the tree.

An exported model loads without the program, so the code of its components travels with it. Copying
the source keeps one implementation of each mechanism. A definition is a function, a class or a
constant at the top level of a module. A part that is imported from the tree within ``try`` and
``except ImportError`` is not copied: its import raises. Methods that no copied code names are left out, and so are the
defaults of fields bound to Kconfig symbols: the options of a model are stored beside the file. Of a
table from types of options to what they build, the entries of copied types are copied.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lib.project import ROOT

_PACKAGES = ("gpt2.", "lib.")
# Methods that torch and Python call.
_CALLED_BY_TORCH = {"forward", "backward", "setup_context", "reset_parameters", "extra_repr"}
_BINDINGS = {"kconfig_field", "component_field"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Operators are registered by name for the whole process, which may load the program as well.
_NAMESPACE, _BUNDLED_NAMESPACE = "kablate::", "kablate_bundle::"


@dataclass(frozen=True)
class Definition:
    """A top-level statement of a module; ``name`` is unique in the module."""

    module: str
    name: str
    node: ast.stmt = field(compare=False)


@dataclass(frozen=True)
class _Reference:
    """A name or ``module.name`` in the source, and what it refers to."""

    node: ast.expr
    target: Definition


class SourceModule:
    """The definitions of one module, and the names that it imports."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = ROOT / Path(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.source = path.read_bytes()
        self.tree = ast.parse(self.source)
        self.definitions: dict[str, Definition] = {}
        # Statements for their effect, such as the registration of an operator.
        self.effects: list[Definition] = []
        # Name → (module, name in it), or (module, "") for a module.
        self.imports: dict[str, tuple[str, str]] = {}
        self.external: dict[str, str] = {}
        lines = self.source.splitlines(keepends=True)
        self.line_starts = [0]
        for line in lines:
            self.line_starts.append(self.line_starts[-1] + len(line))
        for statement in self.tree.body:
            self._define(statement)
        # Imports that may fail, of parts that a copied model does without.
        self.optional = {
            inner
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Try) and _handles_import_error(node)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(self.tree):
            if node not in self.optional:
                self._import(node)

    def offset(self, line: int, column: int = 0) -> int:
        """Return the byte offset of a position of the syntax tree."""
        return self.line_starts[line - 1] + column

    def start(self, node: ast.stmt) -> int:
        """Return the offset of a statement's first line, decorators and comments above included."""
        decorators = node.decorator_list if isinstance(node, _Function | ast.ClassDef) else []
        line = min([node.lineno, *(d.lineno for d in decorators)])
        lines = self.source.splitlines()
        while line > 1 and lines[line - 2].lstrip().startswith(b"#"):
            line -= 1
        return self.offset(line)

    def end(self, node: ast.stmt) -> int:
        """Return the offset behind a statement's last line."""
        assert node.end_lineno is not None
        return self.offset(node.end_lineno + 1)

    def _define(self, node: ast.stmt) -> None:
        if isinstance(node, _Function | ast.ClassDef) and node.name != "_":
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            if isinstance(node, _Function | ast.Expr) and not _is_text(node):
                self.effects.append(Definition(self.name, f"effect {node.lineno}", node))
            return
        definition = Definition(self.name, names[0], node)
        self.definitions |= dict.fromkeys(names, definition)

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith(_PACKAGES), f"{self.name}: import {alias.name}"
                name = alias.asname or alias.name.partition(".")[0]
                self.external[name] = f"import {alias.name}" + (
                    f" as {alias.asname}" if alias.asname else ""
                )
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level
            for alias in node.names:
                name = alias.asname or alias.name
                if not f"{node.module}.".startswith(_PACKAGES):
                    renamed = f" as {alias.asname}" if alias.asname else ""
                    self.external[name] = f"from {node.module} import {alias.name}{renamed}"
                elif _is_module(f"{node.module}.{alias.name}"):
                    self.imports[name] = (f"{node.module}.{alias.name}", "")
                else:
                    self.imports[name] = (node.module, alias.name)


@cache
def source_module(name: str) -> SourceModule:
    """Return the parsed module ``name`` of the tree."""
    return SourceModule(name)


def bundle(entries: Sequence[type], classes: Sequence[type], header: str) -> str:
    """Return the text of a module with ``entries``, ``classes`` and everything that they need.

    All methods of ``entries`` are copied: a library calls them. ``header`` is the docstring of the
    module.
    """
    needed = _Needed()
    for each in (*entries, *classes):
        definition = source_module(each.__module__).definitions[each.__name__]
        needed.add(definition)
        if each in entries:
            methods = [n for n in ast.walk(definition.node) if isinstance(n, _Function)]
            needed.attributes |= {method.name for method in methods}
    needed.complete()
    return needed.text(header)


class _Needed:
    """Definitions reached from the entry points, and the attributes that they name."""

    def __init__(self) -> None:
        self.definitions: dict[Definition, None] = {}
        # With the names of the definitions: what decides whether a part of a statement is copied.
        self.attributes = set(_CALLED_BY_TORCH)
        self.imports: set[str] = set()
        # Names in annotations, which are never evaluated.
        self.types: set[str] = set()

    def add(self, definition: Definition) -> None:
        self.definitions.setdefault(definition)
        self.attributes.add(definition.name)

    def complete(self) -> None:
        """Add what the definitions refer to, until nothing is missing."""
        size = -1
        while size != (size := len(self.definitions) + len(self.attributes) + len(self.imports)):
            for definition in list(self.definitions):
                self._follow(definition)
            for module in {d.module for d in self.definitions}:
                for effect in source_module(module).effects:
                    if any(r.target in self.definitions for r in self._subjects(effect)):
                        self.add(effect)

    def _follow(self, definition: Definition) -> None:
        module = source_module(definition.module)
        nodes = list(_nodes(definition.node, self.attributes))
        self.attributes |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        for reference in self.references(definition):
            self.add(reference.target)
        annotations = list(self._annotations(definition))
        names = {n.id for n in (*nodes, *annotations) if isinstance(n, ast.Name)}
        self.imports |= {module.external[n] for n in names & module.external.keys()}
        self.types |= {
            n for n in names if n in module.definitions or module.imports.get(n, ("", ""))[1]
        }

    def _annotations(self, definition: Definition) -> Iterator[ast.AST]:
        """Yield the nodes of the annotations in the copied part of a definition."""
        for node in _nodes(definition.node, self.attributes):
            roots: list[ast.expr | None] = []
            if isinstance(node, _Function):
                arguments = [a for a in ast.walk(node.args) if isinstance(a, ast.arg)]
                roots = [node.returns, *(a.annotation for a in arguments)]
            elif isinstance(node, ast.AnnAssign):
                roots = [node.annotation]
            for root in filter(None, roots):
                yield from ast.walk(root)

    def references(self, definition: Definition) -> Iterator[_Reference]:
        """Yield the references to definitions of the tree in the copied part of ``definition``."""
        module = source_module(definition.module)
        inner: set[ast.AST] = set()
        for node in _nodes(definition.node, self.attributes):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                imported, name = module.imports.get(node.value.id, ("", "?"))
                if imported and not name:
                    inner.add(node.value)
                    yield _Reference(node, _resolve(imported, node.attr))
            elif isinstance(node, ast.Name) and node not in inner:
                if node.id in module.imports:
                    yield _Reference(node, _resolve(*module.imports[node.id]))
                elif node.id in module.definitions:
                    target = module.definitions[node.id]
                    if target.node is not definition.node:
                        yield _Reference(node, target)

    def _subjects(self, effect: Definition) -> list[_Reference]:
        """Return the references that decide whether a statement is needed for its effect."""
        node = effect.node
        if isinstance(node, _Function):
            within = {n for d in node.decorator_list for n in ast.walk(d)}
        else:
            assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            within = {n for argument in node.value.args for n in ast.walk(argument)}
        return [r for r in self.references(effect) if r.node in within]

    # Text of the module.

    def text(self, header: str) -> str:
        """Return the text of the bundled module."""
        names = self._unique_names()
        parts = [self._copied(definition, names) for definition in self._ordered()]
        absent = sorted(self.types - {name for _, name in names})
        imports = _grouped(
            {*self.imports, "from typing import TYPE_CHECKING", "from typing import Any"}
        )
        if absent:
            imports += ["", "if TYPE_CHECKING:", "    # Parts that this model does not have."]
            imports += [f"    {name} = Any" for name in absent]
        future = "from __future__ import annotations"
        head = "\n".join([f'"""{header}"""', "", future, "", *imports])
        return f"{head}\n\n\n" + "\n\n".join(parts)

    def _ordered(self) -> list[Definition]:
        """Return the definitions so that each stands behind those that its execution needs."""
        ordered: dict[Definition, None] = {}
        visiting: set[Definition] = set()

        def visit(definition: Definition) -> None:
            if definition in ordered or definition in visiting:
                return
            visiting.add(definition)
            runs = not isinstance(definition.node, _Function | ast.ClassDef)
            immediate = None if runs else _executed(definition.node)
            for reference in self.references(definition):
                if immediate is None or reference.node in immediate:
                    visit(reference.target)
                    if runs:
                        # A call runs the bodies of what it refers to.
                        for inner in self.references(reference.target):
                            visit(inner.target)
            visiting.discard(definition)
            ordered.setdefault(definition)

        position = {
            module: i for i, module in enumerate(dict.fromkeys(d.module for d in self.definitions))
        }
        for definition in sorted(
            self.definitions, key=lambda d: (-position[d.module], d.node.lineno)
        ):
            visit(definition)
        return list(ordered)

    def _unique_names(self) -> dict[tuple[str, str], str]:
        """Return the bundled name of each name of each module."""
        taken: set[str] = set()
        # A dot becomes an underscore: the function may have a local name like the last part.
        dotted = {
            r.target
            for definition in self.definitions
            for r in self.references(definition)
            if isinstance(r.node, ast.Attribute)
        }
        names: dict[tuple[str, str], str] = {}
        for definition in self.definitions:
            module = source_module(definition.module)
            for name, other in module.definitions.items():
                if other == definition:
                    tail = definition.module.replace(".module", "").rpartition(".")[2]
                    qualified = definition in dotted or name in taken
                    unique = f"{tail}_{name}" if qualified else name
                    assert unique not in taken, f"{definition.module}.{name}: no unique name"
                    taken.add(unique)
                    names[definition.module, name] = unique
        return names

    def _copied(self, definition: Definition, names: dict[tuple[str, str], str]) -> str:
        """Return the source of a definition with bundled names."""
        module, node = source_module(definition.module), definition.node
        edits = list(_left_out(module, node, self.attributes))
        removed = [(start, end) for start, end, _ in edits]
        for reference in self.references(definition):
            name = names[reference.target.module, _referred(module, reference)]
            edits.append((*_span(module, reference.node), name))
        own = names.get((definition.module, definition.name), definition.name)
        if own != definition.name:
            start = module.source.index(definition.name.encode(), module.offset(node.lineno))
            edits.append((start, start + len(definition.name.encode()), own))
            edits += [
                (*_span(module, n), own)
                for n in _nodes(node, self.attributes)
                if isinstance(n, ast.Name) and n.id == definition.name
            ]
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and str(inner.value).startswith(_NAMESPACE):
                text = str(inner.value).replace(_NAMESPACE, _BUNDLED_NAMESPACE)
                edits.append((*_span(module, inner), repr(text)))
        first, last = module.start(node), module.end(node)
        copied = b""
        for start, end, new in sorted(set(edits)):
            inside = any(a <= start and end <= b and (a, b) != (start, end) for a, b in removed)
            if inside or start < first:
                continue
            copied += module.source[first:start] + new.encode()
            first = end
        return (copied + module.source[first:last]).decode()


def _nodes(
    node: ast.AST, attributes: set[str], bound: frozenset[str] = frozenset()
) -> Iterator[ast.AST]:
    """Yield the copied nodes of a statement in order: no annotation, no local name."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Name) and node.id in bound:
        return
    yield node
    children: list[ast.AST] = []
    if isinstance(node, _Function | ast.Lambda):
        outer: list[ast.AST] = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        if isinstance(node, _Function):
            outer += node.decorator_list
        for child in outer:
            yield from _nodes(child, attributes, bound)
        bound |= _local_names(node)
        children += node.body if isinstance(node, _Function) else [node.body]
    elif isinstance(node, ast.AnnAssign):
        value = [] if node.value is None or _is_binding(node) else [node.value]
        children = [node.target, *value]
        if table := _table(node):
            entries = zip(table.keys, table.values, strict=True)
            kept = [each for each in entries if _is_kept_entry(each[0], attributes)]
            children = [node.target, *(part for each in kept for part in each if part)]
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.ClassDef):
        children = [c for c in children if _is_kept(c, attributes)]
    for child in children:
        yield from _nodes(child, attributes, bound)


def _local_names(node: _Function | ast.Lambda) -> frozenset[str]:
    arguments = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    body = node.body if isinstance(node, _Function) else [node.body]
    stored = {
        n.id
        for statement in body
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    inner = {n.name for s in body for n in ast.walk(s) if isinstance(n, _Function)}
    return frozenset(arguments | stored | inner)


def _executed(node: ast.stmt) -> set[ast.AST]:
    """Return the nodes that run when a function or class is defined, without bodies of functions."""
    nodes: set[ast.AST] = set()

    def visit(each: ast.AST) -> None:
        nodes.add(each)
        for child in ast.iter_child_nodes(each):
            if not (isinstance(each, _Function) and child in each.body):
                visit(child)

    visit(node)
    return nodes


def _is_kept(node: ast.AST, attributes: set[str]) -> bool:
    """Return whether a statement of a class is copied: all but methods that nothing names."""
    if not isinstance(node, _Function):
        return True
    return node.name in attributes or (node.name.startswith("__") and node.name.endswith("__"))


def _is_binding(node: ast.AnnAssign) -> bool:
    call = node.value
    return (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _BINDINGS
    )


def _table(node: ast.AST) -> ast.Dict | None:
    """Return the value of a constant with the type ``dict[type[…], …]``."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
        return node.value if ast.unparse(node.annotation).startswith("dict[type[") else None
    return None


def _is_kept_entry(key: ast.expr | None, attributes: set[str]) -> bool:
    assert isinstance(key, ast.Name), "a type is a name"
    return key.id in attributes


def _left_out(
    module: SourceModule, node: ast.stmt, attributes: set[str]
) -> Iterator[tuple[int, int, str]]:
    """Yield the edits that remove methods, imports of the tree, and defaults of bound fields."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.ClassDef):
            for statement in inner.body:
                if not _is_kept(statement, attributes):
                    yield module.start(statement), module.end(statement), ""
        elif isinstance(inner, ast.ImportFrom):
            if f"{inner.module}.".startswith(_PACKAGES):
                if inner in module.optional:
                    yield (*_span(module, inner), "raise ImportError")
                else:
                    yield module.offset(inner.lineno), module.end(inner), ""
        elif isinstance(inner, ast.AnnAssign) and _is_binding(inner):
            _, start = _span(module, inner.annotation)
            _, end = _span(module, inner)
            yield start, end, ""
        elif table := _table(inner):
            ends = [_span(module, key)[0] for key in table.keys[1:] if key]
            ends.append(_span(module, table)[1] - 1)
            for key, end in zip(table.keys, ends, strict=True):
                if key and not _is_kept_entry(key, attributes):
                    yield _span(module, key)[0], end, ""


def _handles_import_error(node: ast.Try) -> bool:
    return any(isinstance(h.type, ast.Name) and h.type.id == "ImportError" for h in node.handlers)


def _span(module: SourceModule, node: ast.expr | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = module.offset(node.lineno, node.col_offset)
    return start, module.offset(node.end_lineno, node.end_col_offset)


def _referred(module: SourceModule, reference: _Reference) -> str:
    """Return the name of a reference in the module that defines it."""
    node = reference.node
    if isinstance(node, ast.Attribute):
        return node.attr
    assert isinstance(node, ast.Name)
    return module.imports[node.id][1] if node.id in module.imports else node.id


def _resolve(module: str, name: str) -> Definition:
    """Return the definition of ``module.name``, through modules that import it."""
    source = source_module(module)
    if name in source.definitions:
        return source.definitions[name]
    return _resolve(*source.imports[name])


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _grouped(imports: set[str]) -> list[str]:
    """Return import statements, those from one module as one statement."""
    whole = sorted(line for line in imports if line.startswith("import "))
    names: dict[str, list[str]] = {}
    for line in sorted(imports - set(whole)):
        module, _, name = line.removeprefix("from ").partition(" import ")
        names.setdefault(module, []).append(name)
    return whole + [f"from {module} import {', '.join(each)}" for module, each in names.items()]
