"""Tests of the architecture rules: each finds its violations; the tree itself has none."""

import ast

import pytest

from tests import rules

LONG = "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("rule", "bad"),
    [
        (rules.long_functions, LONG),
        (rules.long_functions, "class A:\n    async " + LONG.replace("\n", "\n    ").rstrip()),
        (rules.dynamic_attributes, "hasattr(config, 'x')"),
        (rules.dynamic_attributes, "getattr(config, 'x', None)"),
        (rules.locale_encodings, "run.status.read_text()"),
        (rules.locale_encodings, "open(path, mode='w')"),
        (rules.locale_encodings, "subprocess.run(words, text=True)"),
    ],
)
def test_finds_what_is_forbidden(rule, bad):
    assert len(list(rule(ast.parse(bad)))) == 1


def test_imports_of_functions_count_only_where_they_matter():
    text = (
        "import a.b\nfrom c import d\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import e\ndef f():\n    import g\nclass A:\n    import h\n"
    )
    tree = ast.parse(text)
    assert {"a.b", "c", "c.d", "e", "g", "h"} <= rules.imports(tree)
    loaded = rules.imports(tree, at_import=True)
    assert {"a.b", "c", "c.d", "h"} <= loaded and not {"e", "g"} & loaded
    trees = {name: ast.parse("") for name in ("a", "a.b", "c", "e", "g")}
    assert rules.import_graph({**trees, "f": tree})["f"] == {"a.b", "c", "e", "g"}
