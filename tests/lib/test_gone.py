"""Names that are gone: each kind is answered from the table of the document."""

import re

import pytest

from lib import console, gone
from lib.config.explain import explain_value
from lib.config.layers import ConfigLayer, parse_command_line_settings, parse_text
from lib.config.tree import KconfigTree
from lib.project import ROOT
from tests.errors import error_of
from tests.source import MAKE_TARGETS, MAKE_VARIABLES

TABLE = """# Title

## Removed

Text.

| kind | gone | off | use |
|---|---|---|---|
| symbol | OLD_FLAG, OLD_OTHER | n | `NEW_FLAG` or `A\\|B` |
| symbol | OLD_TEXT | `""` | `NEW_TEXT` |
| symbol | OLD_SIZE | | |
| symbol | OLD_NOTE | any | `make ls` |
| symbol | AREA_OLD_* | | `NEW_*` |
| symbol | AREA_* | | the name without AREA_ |
| variable | OLD_ONE | | `NEW_ONE=` |
| option | --old | | `--new` |
| script | tool.py random | | `make randconfig` |

## Next

| symbol | NOT_THIS | n | |
"""


@pytest.fixture
def tree():
    """Return the small tree."""
    return KconfigTree(ROOT / "tests/lib/config/fixtures/tree")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Replace the document by one with a row of each kind."""
    path = tmp_path / "table.md"
    path.write_text(TABLE)
    monkeypatch.setattr(gone, "_TABLE", path)
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)
    gone.removed_names.cache_clear()
    yield
    gone.removed_names.cache_clear()


def test_the_removed_symbols_have_the_values_that_may_be_dropped(table):
    symbols = dict(OLD_FLAG="n", OLD_OTHER="n", OLD_TEXT='""', OLD_SIZE=None, OLD_NOTE="any")
    assert gone.removed_symbols() == symbols | {"AREA_OLD_*": None, "AREA_*": None}
    without = [("OLD_FLAG", "n"), ("OLD_TEXT", ""), ("OLD_NOTE", "7")]
    assert all(gone.is_without_effect(*pair) for pair in without)
    acting = [("OLD_FLAG", "y"), ("OLD_TEXT", "a"), ("OLD_SIZE", ""), ("OLD_SIZE", "0"), ("X", "n")]
    assert not any(gone.is_without_effect(*pair) for pair in acting)


@pytest.mark.parametrize(
    ("kind", "name", "answer"),
    [
        ("symbol", "OLD_OTHER", "is gone: use NEW_FLAG or A|B (docs/former-system.md)"),
        ("symbol", "OLD_SIZE", "is gone (docs/former-system.md)"),
        ("symbol", "AREA_OLD_ONE", "is gone: use NEW_* (docs/former-system.md)"),
        ("symbol", "AREA_ONE", "is gone: use the name without AREA_ (docs/former-system.md)"),
        ("variable", "OLD_FLAG", "is gone: use NEW_FLAG or A|B (docs/former-system.md)"),
        ("option", "--old-one", "is gone: use NEW_ONE= (docs/former-system.md)"),
        # A variable is no name of a pattern of symbols, and another section is no table of names.
        ("variable", "AREA_ONE", ""),
        ("symbol", "NOT_THIS", ""),
    ],
)
def test_an_answer_names_what_to_use(table, kind, name, answer):
    assert gone.gone(kind, name) == answer


def test_an_option_of_a_command(table):
    command = console.CommandLine()
    command.add_argument("--name", required=True)
    (problem,) = error_of(command.parse_args, ["--old", "--name=a"]).problems
    assert problem.what.startswith("--old: is gone: use --new") and problem.code == "usage.gone"
    # A missing option is not nearest to itself.
    assert error_of(command.parse_args, []).problems[0].what.endswith("required: --name")


def test_a_symbol_is_answered_with_file_and_line(table, tree):
    layer = parse_text("CONFIG_N_LAYER=4\nCONFIG_OLD_FLAG=y\n", "defconfig", "file")
    (problem,) = error_of(tree.resolve, [layer]).problems
    assert problem.where == "file:2" and problem.code == "config.gone"
    assert problem.what.startswith("OLD_FLAG=y: is gone: use NEW_FLAG")
    error = error_of(tree.resolve, [parse_command_line_settings("OLD_NOTE=1 OLD_SIZE=1")])
    assert error.codes == ["config.gone-off", "config.gone"]
    error = error_of(explain_value, tree, tree.resolve([]), "CONFIG_OLD_FLAG=y")
    assert error.codes == ["config.gone"] and "OLD_FLAG: is gone: use NEW_FLAG" in str(error)


def test_adapt_drops_a_value_without_effect(table, tree):
    text = tree.config_text([])
    layer = parse_text(f"{text}# CONFIG_OLD_FLAG is not set\nCONFIG_OLD_OTHER=y\n", "config", "c")
    adapted, (off, acting) = tree.adapt(layer)
    assert (off.code, acting.code) == ("config.gone-off", "config.gone")
    assert tree.config_text([adapted]) == text


def test_the_design_that_a_run_records_is_named_and_has_no_effect():
    symbols = {"ABLATION_DESIGN": "fractional", "ABLATION_FOLD": "RECIPROCAL"}
    symbols |= {"VERDICT_SIMPLE_EFFECTS": True}
    error = error_of(KconfigTree().resolve, [ConfigLayer.of("constants", "run", symbols)])
    assert error.codes == ["config.gone-off"] * 3
    assert "ABLATION_DESIGN_FRACTIONAL=y: is gone: use" in str(error)
    earlier = parse_command_line_settings("GPT2_MAX_ITERS=1")
    (problem,) = error_of(KconfigTree().resolve, [earlier]).problems
    assert "GPT2_MAX_ITERS=1: is gone: use the same name without GPT2_" in problem.what


def test_the_table_of_the_tree_has_no_name_that_exists():
    tree = KconfigTree()
    known = {
        "symbol": {info.name for info in tree.symbols()} | set(tree.kconf.named_choices),
        "target": MAKE_TARGETS,
        "variable": MAKE_VARIABLES,
        "option": set(),
        "script": {path.name for path in (ROOT / "scripts").iterdir()},
    }
    rows = gone.removed_names()
    assert {kind for kind, _ in rows} == known.keys()
    for (kind, name), (off, _) in rows.items():
        assert name not in known[kind], name
        assert re.fullmatch(r"[\w.*-]+( [\w.-]+)?", name) and not (off and kind != "symbol")
