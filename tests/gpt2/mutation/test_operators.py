"""Operators change one node each, and only what affects a result."""

import ast

import pytest

from gpt2.mutation.operators import OPERATORS, Vocabulary, mutable_nodes, replacements
from gpt2.mutation.operators import replacement as replaced

FIELDS = """
class Shape:
    n_head: int = kconfig_field("N_HEAD")
    n_embd: int = kconfig_field("N_EMBD")
    name: str = kconfig_field("NAME")

def read(shape):
    return shape.n_head, shape.n_embd, shape.name
"""


def changes(text, vocabulary=""):
    """Return the texts of all faults of a statement, by operator."""
    known = Vocabulary()
    known.read(ast.parse(vocabulary))
    found = {}
    for number, node, _, _ in mutable_nodes(ast.parse(text)):
        for operator, index in replacements(node, known):
            tree = ast.parse(text)
            old = list(ast.walk(tree))[number]
            new = ast.fix_missing_locations(replaced(old, known, operator, index))
            found.setdefault(operator, []).append(ast.unparse(new))
    return found


@pytest.mark.parametrize(
    ("operator", "text", "expected"),
    [
        ("number", "x = 3", {"4", "2", "6", "0"}),
        ("number", "x = 0.5", {"1.0", "0.25", "1.5", "0.0"}),
        ("comparison", "a < b", {"a <= b", "a > b"}),
        ("arithmetic", "a * b", {"a / b"}),
        ("arithmetic", "a += b", {"a -= b"}),
        ("operand", "a * b", {"a", "b"}),
        ("bound", "x[a:]", {":", "a + 1:", "a - 1:"}),
        ("bound", "range(n)", {"range(n + 1)", "range(n - 1)", "range(1, n)"}),
        ("condition", "a and b", {"a or b", "a", "b"}),
        ("dropped", "model.eval()", {"pass"}),
        ("dropped", "state.step = 3", {"pass"}),
        ("argument", "f(a, b)", {"f(b, a)"}),
        ("argument", "f(a, lr=b)", {"f(a)"}),
        ("argument", "a, b = f()", {"(b, a)"}),
        ("stream", "stream_seed(s, f'init/{n}')", {"stream_seed(s, 'init/')"}),
        ("function", "max(a)", {"min(a)"}),
        ("function", "x.detach()", {"x"}),
        ("function", "torch.float64", {"torch.float32"}),
    ],
)
def test_an_operator_changes_a_node(operator, text, expected):
    assert expected <= set(changes(text)[operator])


def test_a_binding_and_a_field_are_confused_with_those_of_the_same_type():
    bound = changes('a: int = kconfig_field("N_HEAD")', FIELDS)["binding"]
    assert bound == ["kconfig_field('N_EMBD')"]
    assert changes("y = shape.n_head", FIELDS)["field"] == ["shape.n_embd"]


@pytest.mark.parametrize(
    "text",
    [
        '"""A text of 3 words."""',
        "x: Literal[3]",
        "raise ValueError(3 + n)",
        "assert n < 3",
        'records.line("TRAIN", str(n + 3))',
        'log("TRAIN", f"{n + 3}")',
    ],
)
def test_reports_errors_and_annotations_are_not_changed(text):
    assert changes(text).keys() <= {"dropped"}


def test_every_operator_is_in_the_documentation(request):
    text = (request.config.rootpath / "docs/check.md").read_text()
    table = text[text.index("## Measuring the checks") :]
    for name in OPERATORS:
        assert f"| {name}" in table or f", {name} |" in table, name


def test_an_argument_of_a_field_for_checks_alone_is_no_fault():
    field = "x: int = kconfig_field('X', small=scale, low=1)"
    texts = [text for group in changes(field).values() for text in group]
    assert "kconfig_field('X', small=scale)" in texts
    assert all("small=scale" in text for text in texts if "(" in text)
