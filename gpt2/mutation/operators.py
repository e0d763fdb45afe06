"""Operators that change one node of a module's syntax tree, as a slip of a programmer would.

Each operator yields the replacements of a node. Most are those of mutmut and of cosmic-ray (numbers,
comparisons, arithmetic, conditions, dropped statements); the others are the faults of this kind of
program: a wrong binding, stream, type or field, swapped arguments, and bounds off by one.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

Operator = Callable[[ast.AST, "Vocabulary"], Iterator[ast.AST]]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPPOSITES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
_ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# Names of functions, methods and types that are confused in both directions.
_PAIRS = """
    min max, any all, floor ceil, sum mean, amin amax, argmin argmax, add_ sub_, mul_ div_, cos sin,
    exp log, sigmoid tanh, tril triu, zeros ones, zeros_like ones_like, double float,
    clamp_min clamp_max, sorted list, fsum prod, float64 float32, train eval, float16 bfloat16
"""
_OTHER_NAMES = {
    name: other
    for pair in _PAIRS.split(",")
    for name, other in (pair.split(), reversed(pair.split()))
} | {"bfloat16": "float32", "round": "int"}
_DTYPES = ("float64", "float32", "bfloat16", "float16")
# Methods that return a changed copy of their object: the program also runs without the call.
_CHAINED = re.compile(
    r"double|float|detach|clone|abs|sqrt|square|log|exp|copy|to|neg|flip|cumsum|softmax|unsqueeze"
    r"|squeeze|contiguous|eval"
)
_STREAMS = ("data", "sample", "dropout", "numpy", "python", "init")
# Calls that only report: their arguments do not affect the result.
_REPORTS = ("Problem", "line", "log", "timing", "progress", "beat", "warn", "debug", "field")
# Argument of fields that is a part of the checks.
_CHECK_RULE = "small"
_CONTEXTS = re.compile(r"no_grad|autocast|fork_rng|exchange|clock|lock|main_first")


@dataclass
class Vocabulary:
    """Names in the source that a fault may confuse with each other."""

    # Field → other fields of the same class and type.
    fields: dict[str, set[str]] = field(default_factory=dict)
    # Symbol → other symbols bound by the same class to fields of the same type.
    symbols: dict[str, set[str]] = field(default_factory=dict)
    # Indexed object → the keys used anywhere.
    keys: dict[str, set[str]] = field(default_factory=dict)
    # Last part of an object's name → the attributes used anywhere.
    attributes: dict[str, set[str]] = field(default_factory=dict)

    def read(self, tree: ast.Module) -> None:
        """Add the names of a module."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._read_class(node)
            elif isinstance(node, ast.Attribute):
                self.attributes.setdefault(_last_part(node.value), set()).add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                key = node.slice.value
                if isinstance(key, str):
                    self.keys.setdefault(ast.unparse(node.value), set()).add(key)

    def _read_class(self, node: ast.ClassDef) -> None:
        names: dict[str, list[str]] = {}
        bound: dict[str, list[str]] = {}
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                kind = ast.unparse(member.annotation)
                names.setdefault(kind, []).append(member.target.id)
                if symbol := _bound_symbol(member.value):
                    bound.setdefault(kind, []).append(symbol)
        for groups, others in ((names, self.fields), (bound, self.symbols)):
            for group in groups.values():
                for name in group:
                    others.setdefault(name, set()).update(set(group) - {name})


def replacements(node: ast.AST, vocabulary: Vocabulary) -> Iterator[tuple[str, int]]:
    """Yield operator and number of every replacement of ``node``."""
    for name, operator in OPERATORS.items():
        yield from ((name, number) for number, _ in enumerate(operator(node, vocabulary)))


def replacement(node: ast.AST, vocabulary: Vocabulary, operator: str, number: int) -> ast.AST:
    """Return one of the replacements of ``node``."""
    return list(OPERATORS[operator](node, vocabulary))[number]


def mutable_nodes(tree: ast.Module) -> Iterator[tuple[int, ast.AST, ast.stmt, str]]:
    """Yield the nodes that affect what the module computes.

    Yields the number in ``ast.walk``, the node, its statement, and the name of its function, "" for
    the body of a module or class. Excluded are annotations, docstrings, errors and reports.
    """
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    for node, statement, function in _visit(tree, None, "", ""):
        if statement is not None:
            yield numbers[id(node)], node, statement, function


def _visit(
    node: ast.AST, statement: ast.stmt | None, function: str, scope: str
) -> Iterator[tuple[ast.AST, ast.stmt | None, str]]:
    """Yield ``node`` and the nodes below it, each with its statement and function."""
    if _is_excluded(node):
        return
    if isinstance(node, ast.stmt):
        statement = node
    yield node, statement, function
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "decorator_list"):
            continue
        inner, path = function, scope
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and name == "body":
            path = f"{scope}.{node.name}".lstrip(".")
            inner = path if isinstance(node, _FUNCTIONS) else function
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _visit(child, statement, inner, path)


def _is_excluded(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _called(node) in _REPORTS
    if isinstance(node, ast.FunctionDef):
        # Rules of small forms are parts of the checks.
        return any("SmallForm" in ast.dump(each) for each in node.args.args)
    if isinstance(node, ast.keyword):
        return node.arg == _CHECK_RULE
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)


def _called(node: ast.Call) -> str:
    """Return the last part of the name of the called function."""
    return _last_part(node.func)


def _last_part(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _bound_symbol(node: ast.expr | None) -> str:
    """Return the symbol of a call of ``kconfig_field``; "" for another node."""
    if isinstance(node, ast.Call) and _called(node) == "kconfig_field" and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
    return ""


def _with(node: ast.AST, **changes: object) -> ast.AST:
    """Return a node that shares all but the changed fields with ``node``."""
    return ast.copy_location(type(node)(**{**dict(ast.iter_fields(node)), **changes}), node)


def _numbers(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        candidates: tuple[float, ...] = (value + 1, value - 1, 2 * value, 0)
        yield from (ast.Constant(n) for n in dict.fromkeys(candidates) if n != value)
    elif isinstance(value, float):
        candidates = (2.0 * value, 0.5 * value, value + 1.0, 0.0)
        yield from (ast.Constant(x) for x in dict.fromkeys(candidates) if x != value)


def _comparisons(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            for table in (_COMPARISONS, _OPPOSITES):
                if type(operator) in table:
                    ops = [*node.ops[:i], table[type(operator)](), *node.ops[i + 1 :]]
                    yield _with(node, ops=ops)


def _arithmetic(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield _with(node, op=_ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand


def _operands(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield one operand of an operation, as if the other were missing."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
        yield node.left
        yield node.right


def _bounds(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield slices and ranges that are one longer or shorter, or that miss a bound."""
    if isinstance(node, ast.Slice):
        for side in ("lower", "upper"):
            bound = dict(ast.iter_fields(node))[side]
            if bound is not None:
                yield _with(node, **{side: None})
                yield from (_with(node, **{side: shifted}) for shifted in _shifted(bound))
    if isinstance(node, ast.Call) and _called(node) == "range":
        last = min(1, len(node.args) - 1)
        for shifted in _shifted(node.args[last]):
            yield _with(node, args=[*node.args[:last], shifted, *node.args[last + 1 :]])
        if len(node.args) == 1:
            yield _with(node, args=[ast.Constant(1), node.args[0]])


def _shifted(bound: ast.expr) -> Iterator[ast.expr]:
    for operator in (ast.Add(), ast.Sub()):
        yield ast.BinOp(bound, operator, ast.Constant(1))


def _conditions(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.IfExp):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        yield _with(node, test=ast.Constant(True))
        yield _with(node, test=ast.Constant(False))
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield node.values[0]
        yield node.values[-1]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    if isinstance(node, ast.comprehension) and node.ifs:
        yield _with(node, ifs=[])


def _dropped(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield nothing in place of a statement, of the body of a loop, or of a context."""
    is_stored = isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    )
    if isinstance(node, ast.Expr | ast.AugAssign) or is_stored:
        yield ast.Pass()
    if isinstance(node, ast.For):
        yield _with(node, iter=ast.Tuple([], ast.Load()))
    if isinstance(node, ast.With) and _is_plain_context(node):
        yield ast.If(ast.Constant(True), node.body, [])
    if isinstance(node, ast.FunctionDef) and _CONTEXTS.search(
        " ".join(map(ast.unparse, node.decorator_list))
    ):
        yield _with(node, decorator_list=[])
    if isinstance(node, ast.Continue):
        yield ast.Break()


def _is_plain_context(node: ast.With) -> bool:
    """Return whether the body runs without the context."""
    names = [item.optional_vars for item in node.items]
    return not any(names) and bool(_CONTEXTS.search(ast.unparse(node.items[0])))


def _arguments(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield calls with swapped arguments or without a named one, and swapped targets."""
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store) and len(node.elts) == 2:
        yield _with(node, elts=node.elts[::-1])
    if not isinstance(node, ast.Call):
        return
    for i, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
        starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        if not starred and ast.dump(one) != ast.dump(other):
            yield _with(node, args=[*node.args[:i], other, one, *node.args[i + 2 :]])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is None or keyword.arg == _CHECK_RULE:
            continue
        rest = node.keywords[i + 1 :]
        yield _with(node, keywords=[*node.keywords[:i], *rest])
        if (
            rest
            and rest[0].arg not in (None, _CHECK_RULE)
            and ast.dump(keyword.value) != ast.dump(rest[0].value)
        ):
            pair = [
                ast.keyword(keyword.arg, rest[0].value),
                ast.keyword(rest[0].arg, keyword.value),
            ]
            yield _with(node, keywords=[*node.keywords[:i], *pair, *rest[1:]])


def _bindings(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield bindings to another symbol of the same class and type."""
    if isinstance(node, ast.Call) and (symbol := _bound_symbol(node)):
        for other in sorted(vocabulary.symbols.get(symbol, ())):
            yield _with(node, args=[ast.Constant(other), *node.args[1:]])


def _streams(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield random streams of another name, or of one name for all members."""
    if not (isinstance(node, ast.Call) and _called(node) == "stream_seed" and len(node.args) == 2):
        return
    seed, stream = node.args
    if isinstance(stream, ast.Constant):
        others: list[str] = [name for name in _STREAMS if name != stream.value]
        yield from (_with(node, args=[seed, ast.Constant(name)]) for name in others)
    elif isinstance(stream, ast.JoinedStr):
        fixed = [part for part in stream.values if isinstance(part, ast.Constant)]
        yield from (_with(node, args=[seed, part]) for part in fixed[:1])
    yield _with(node, args=[ast.Constant(0), stream])


def _fields(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield another field of the same class and type, or another key of the same mapping."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        used = vocabulary.attributes.get(_last_part(node.value), set())
        for other in sorted(vocabulary.fields.get(node.attr, set()) & used):
            yield _with(node, attr=other)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        for other in sorted(vocabulary.keys.get(ast.unparse(node.value), set())):
            if other != node.slice.value:
                yield _with(node, slice=ast.Constant(other))


def _functions(node: ast.AST, vocabulary: Vocabulary) -> Iterator[ast.AST]:
    """Yield the opposite function, another type, and the object of a method that changes it."""
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES and node.attr in _OTHER_NAMES:
        yield _with(node, attr=_OTHER_NAMES[node.attr])
    if not isinstance(node, ast.Call):
        return
    name = _called(node)
    if isinstance(node.func, ast.Name) and name in _OTHER_NAMES:
        yield _with(node, func=ast.Name(_OTHER_NAMES[name], ast.Load()))
    if isinstance(node.func, ast.Attribute):
        if name in _OTHER_NAMES:
            yield _with(node, func=_with(node.func, attr=_OTHER_NAMES[name]))
        if _CHAINED.fullmatch(name):
            yield node.func.value


OPERATORS: Mapping[str, Operator] = {
    "number": _numbers,
    "comparison": _comparisons,
    "arithmetic": _arithmetic,
    "operand": _operands,
    "bound": _bounds,
    "condition": _conditions,
    "dropped": _dropped,
    "argument": _arguments,
    "binding": _bindings,
    "stream": _streams,
    "field": _fields,
    "function": _functions,
}
