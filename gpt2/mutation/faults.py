"""Faults: where an operator changes the code that training and evaluation run through."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

from gpt2.mutation.operators import Vocabulary, mutable_nodes, replacement, replacements
from lib.errors import ConfigError, Problem

# Area → the files of which it consists, as a pattern; the first match counts.
AREAS: Mapping[str, str] = {
    "attention": r"gpt2/attention/|gpt2/zero_linear|gpt2/kv_cache",
    "nsa": r"gpt2/nsa/",
    "mlp": r"gpt2/mlp/",
    "model": r"gpt2/(model|loss|execution|shape)\.py",
    "optimizer": r"lib/optim/(?!schedule)",
    "schedule": r"lib/optim/schedule|gpt2/training/budget",
    "pruning": r"lib/pruning/",
    "data": r"gpt2/data/",
    "evaluation": (
        r"gpt2/(evaluate|generate)\.py|gpt2/training/per_query|gpt2/training/finish"
        r"|lib/runs/documents"
    ),
    "steps": r"gpt2/study/",
    "binding": r"gpt2/config\.py|lib/config/|lib/env/options",
    "resume": r"lib/runs/(checkpoint|rng|seeds)|gpt2/training/(state|setup)|gpt2/weights/",
    "training": (
        r"gpt2/train\.py|gpt2/training/(step|session|metrics)|lib/env/(machine|process_group|ranks)"
    ),
}
# Excluded: the formulas and tools of the checks, and code that only the configurator runs.
_EXCLUDED = re.compile(
    r"(^|/)(reference|checks|small_form)\.py$|gpt2/nsa/(validate|needle)|lib/config/(commands|check|dotconfig|layers)"
)
# Statistics of mechanisms, which trackers and reports show: no loss and no verdict rests on them.
_OBSERVES = re.compile(r"(^|[._])(statistics|selected_blocks)($|[._])")
# Sizes of the chunks in which a result is computed, which change its rounding and its speed alone,
# and constants of small forms, which are parts of the checks.
_EXCLUDED_CONSTANTS = re.compile(r"(CHUNK|BLOCK)_(BYTES|ELEMENTS|ROWS)$|^_SMALL_")
# Modules that matter although no function of theirs is executed: fields and steps.
_DECLARATIONS = re.compile(r"/(options|config|shape)\.py$|gpt2/study/")
# A fault location in AREA=: a file, with or without a line.
_LOCATION = re.compile(r"(?P<path>[\w/]+\.py)(:(?P<line>\d+))?")
# Path → line → names of the cases that execute the line in a function.
Coverage = Mapping[str, Mapping[int, Sequence[str]]]


@dataclass(frozen=True)
class Fault:
    """One change of one node."""

    area: str
    path: str
    line: int
    function: str
    operator: str
    # Of the node in ast.walk, and of the replacement among those of the operator.
    node: int
    number: int
    # Cases that execute the line or, outside of functions, the module; all for declarations.
    cases: tuple[str, ...]

    @property
    def location(self) -> str:
        """Return file and line."""
        return f"{self.path}:{self.line}"


class SourceTree:
    """Parsed modules of the areas, and the faults that may be planted in them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.paths = sorted(
            str(path.relative_to(root))
            for folder in ("gpt2", "lib")
            for path in (root / folder).rglob("*.py")
            if area_of(str(path.relative_to(root)))
        )

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """Return the syntax tree of every module."""
        texts = ((path, (self._root / path).read_text(encoding="utf-8")) for path in self.paths)
        return {path: ast.parse(text) for path, text in texts}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the fields, symbols, keys and attributes in all modules that faults may swap."""
        vocabulary = Vocabulary()
        for tree in self.modules.values():
            vocabulary.read(tree)
        return vocabulary

    def faults(self, coverage: Coverage, every_case: Sequence[str]) -> Iterator[Fault]:
        """Yield every fault on a line that a case executes."""
        for path, tree in self.modules.items():
            lines = coverage.get(path, {})
            users = sorted({case for cases in lines.values() for case in cases})
            for number, node, statement, function in mutable_nodes(tree):
                outside = users or (every_case if _DECLARATIONS.search(path) else ())
                cases = lines.get(statement.lineno, ()) if function else outside
                if cases and not (_OBSERVES.search(function) or _is_excluded_constant(statement)):
                    yield from self._at(path, number, node, statement, function, tuple(cases))

    def _at(
        self,
        path: str,
        number: int,
        node: ast.AST,
        statement: ast.stmt,
        function: str,
        cases: tuple[str, ...],
    ) -> Iterator[Fault]:
        for operator, index in replacements(node, self.vocabulary):
            yield Fault(
                area=area_of(path),
                path=path,
                line=vars(node).get("lineno", statement.lineno),
                function=function,
                operator=operator,
                node=number,
                number=index,
                cases=cases,
            )

    def described(self, fault: Fault) -> tuple[str, str]:
        """Return the changed text before and after."""
        node = list(ast.walk(self.modules[fault.path]))[fault.node]
        new = replacement(node, self.vocabulary, fault.operator, fault.number)
        return _shortened(node), _shortened(ast.fix_missing_locations(new))

    def planted(self, fault: Fault) -> CodeType:
        """Return the code of the fault's module with the fault."""
        file = self._root / fault.path
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        old = nodes[fault.node]
        new = replacement(old, self.vocabulary, fault.operator, fault.number)
        changed = _Replacement(old, ast.copy_location(new, old)).visit(tree)
        return compile(ast.fix_missing_locations(changed), str(file), "exec")

    def is_same_code(self, fault: Fault) -> bool:
        """Return whether the compiled module is the same with the fault as without it."""
        file = self._root / fault.path
        code = compile(ast.parse(file.read_text(encoding="utf-8")), str(file), "exec")
        return _instructions(code) == _instructions(self.planted(fault))


class _Replacement(ast.NodeTransformer):
    """Replacement of one node of a tree."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old = old
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        """Return the new node in place of the old one."""
        return self._new if node is self._old else self.generic_visit(node)


def _is_excluded_constant(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    return any(isinstance(t, ast.Name) and _EXCLUDED_CONSTANTS.search(t.id) for t in targets)


def _instructions(code: CodeType) -> list[Any]:
    """Return instructions, constants and names of a code object, without its lines."""
    inner = [_instructions(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return [code.co_code, inner, code.co_names, code.co_varnames]


def _shortened(node: ast.AST) -> str:
    """Return the first line of a node's source."""
    if isinstance(node, ast.comprehension):
        tests = " ".join(f"if {ast.unparse(test)}" for test in node.ifs)
        return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)} {tests}".strip()
    first, *rest = ast.unparse(node).splitlines() or [""]
    return first if len(first) <= 100 and not rest else f"{first[:100]} …"


def area_of(path: str) -> str:
    """Return the area of a file; "" if no faults are planted in it."""
    if _EXCLUDED.search(path):
        return ""
    return next((area for area, pattern in AREAS.items() if re.match(pattern, path)), "")


def in_area(faults: Sequence[Fault], selection: str) -> list[Fault]:
    """Return the faults of the selected areas, files or lines; all for an empty selection.

    Raises ConfigError for an unknown area, and for a location without a fault.
    """
    chosen: list[Fault] = []
    for word in selection.replace(",", " ").split() or list(AREAS):
        location = _LOCATION.fullmatch(word)
        if location is None and word not in AREAS:
            what = f"unknown area {word!r} (available: {', '.join(AREAS)}, or FILE.py:LINE)"
            advice = "type: make mutation-test AREA=attention"
            raise ConfigError(Problem(what, "AREA", advice, code="usage.unknown-area"))
        if location is None:
            chosen += [fault for fault in faults if fault.area == word]
            continue
        path, line = location["path"], int(location["line"] or 0)
        there = [f for f in faults if f.path == path and line in (0, f.line)]
        if not there:
            what = f"{word}: no executed line where a fault can be planted"
            raise ConfigError(Problem(what, "AREA", code="usage.no-fault"))
        chosen += there
    return chosen


def draw(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Draw ``count`` different faults, the same for the same tree and seed.

    Areas take turns. In an area, a function is drawn first, then an operator, then a fault, so that
    long functions and frequent operators do not dominate. A node is changed once by an operator.
    """
    random = Random(seed)
    by_area: dict[str, dict[str, list[Fault]]] = {}
    for fault in faults:
        place = f"{fault.path}:{fault.function}"
        by_area.setdefault(fault.area, {}).setdefault(place, []).append(fault)
    drawn: list[Fault] = []
    while by_area and len(drawn) < count:
        for area in list(by_area):
            places = by_area[area]
            place = random.choice(sorted(places))
            operator = random.choice(sorted({fault.operator for fault in places[place]}))
            fault = random.choice([f for f in places[place] if f.operator == operator])
            drawn.append(fault)
            left = [f for f in places[place] if (f.node, f.operator) != (fault.node, operator)]
            places[place] = left
            if not left:
                del places[place]
            if not places:
                del by_area[area]
            if len(drawn) == count:
                break
    return drawn
