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
        (rules.sys_path_edits, "import sys\nsys.path.insert(0, '.')"),
        (rules.sys_path_edits, "import sys\nsys.path += ['.']"),
        (rules.sys_path_edits, "import sys\nsys.path[0:0] = ['.']"),
        (rules.sys_path_edits, "import sys\ndel sys.path[0]"),
        (rules.unsafe_loading, "torch.load(path)"),
        (rules.unsafe_loading, "torch.load(path, weights_only=False)"),
        (rules.module_commands, "import sys\nx = [sys.executable, '-P', '-m', 'json', 'a']"),
        (rules.writes_to_stdout, "import sys\nsys.stdout.write('x')"),
        (rules.writes_to_stdout, "import sys\nsys.__stdout__.buffer.write(b'x')"),
        (rules.uncoded_problems, "Problem('x', next='y')"),
        (rules.function_strings, "pool.run('gpt2.train:run')"),
    ],
)
def test_finds_what_is_forbidden(rule, bad):
    assert len(list(rule(ast.parse(bad)))) == 1


def test_imports_of_functions_count_only_where_they_matter():
    tree = ast.parse(
        "import a.b\nfrom c import d\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import e\ndef f():\n    import g\nclass A:\n    import h\n"
    )
    assert {"a.b", "c", "c.d", "e", "g", "h"} <= rules.imports(tree)
    loaded = rules.imports(tree, at_import=True)
    assert {"a.b", "c", "c.d", "h"} <= loaded
    assert not {"e", "g"} & loaded


def test_import_graph_contains_deferred_imports():
    sources = {
        "a": "",
        "a.options": "def f():\n    from a import module",
        "a.module": "from a.options import X\ndef f():\n    import b",
        "b": "if TYPE_CHECKING:\n    from a import NAME\nimport torch",
    }
    graph = rules.import_graph({name: ast.parse(text) for name, text in sources.items()})
    assert graph == {
        "a": set(),
        "a.options": {"a.module"},
        "a.module": {"a.options", "b"},
        "b": {"a"},
    }
