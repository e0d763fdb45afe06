"""Tests of the name rules: wrong names are found; the tree itself has none."""

import ast

import pytest

from tests.names import KnownNames, known_names, wrong_in_document, wrong_in_module

KNOWN = KnownNames(
    targets={"all", "plan", "why"},
    configurations={"gpt2-124m", "cpu"},
    names={"STEPS", "SYM", "SET", "N_LAYER", "O"},
    paths={"lib/config/field.py", "binding.py", "gpt2", "status.json"},
    written={"results"},
    tests={"test_a_rule"},
    identifiers={"f", "count", "OtherClass", "other_name"},
)


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("`make paln`", "target", "paln"),
        ("`make && make paln`", "target", "paln"),
        ("```\nmake plan STEP=3\n```", "variable", "STEP"),
        ("```\nmake plan \\\n  STEP=1\n```\n", "variable", "STEP"),
        ("`make defconfig-gpt2-124m+gpu`", "target", "defconfig-gpt2-124m+gpu"),
        ('`make all SET="N_LAYERS=4"`', "symbol", "N_LAYERS"),
        ("`CONFIG_N_LAYERS`", "symbol", "N_LAYERS"),
        ("`lib/bindings.py`", "path", "lib/bindings.py"),
        ("see `lib/nothing/`", "path", "lib/nothing/"),
        ("`test_a_rule`, `test_no_rule`", "test", "test_no_rule"),
    ],
)
def test_a_wrong_name_is_found(text, kind, name):
    line = 2 if "```" in text else 1
    assert list(wrong_in_document(text, KNOWN)) == [(line, kind, name)]


@pytest.mark.parametrize(
    ("prose", "kind", "name"),
    [
        ("See ``symbol``.", "identifier", "symbol"),
        ("See ``symbol(name)``.", "identifier", "symbol"),
        ("See ``lib.config.field.from_symbol``.", "identifier", "lib.config.field.from_symbol"),
        ("Raises DoesNotFit.", "identifier", "DoesNotFit"),
        ("Like gone_name, not like other_name.", "identifier", "gone_name"),
        ("See ``lib/absent.py``.", "path", "lib/absent.py"),
        ("Written by ``make paln``.", "target", "paln"),
    ],
)
def test_a_wrong_name_in_a_docstring_or_comment_is_found(prose, kind, name):
    docstring = f'"""Bind fields.\n\n{prose}\n"""\n\ndef f(count):\n    return count\n'
    comment = f"def f(count):\n    return count\n# {prose}\n"
    for source in (docstring, comment):
        assert list(wrong_in_module(source, ast.parse(source), KNOWN)) == [(3, kind, name)]


def test_the_tree_knows_its_own_names():
    known = known_names()
    assert {"all", "plan", "clean"} <= known.targets
    assert {"gpt2-ratio-small", "quick"} <= known.configurations
    assert {"JOBS", "N_LAYER", "MODEL_SIZE_TINY", "OPTIMIZER"} <= known.names
    assert {"lib/errors.py", "lib/config", "CODEX.md", "summary.json"} <= known.paths
    assert {"status.json", "checkpoints", "per_query.csv"} <= known.paths
