"""Problems and the errors that carry them; every code of the product is well-formed."""

import ast
import re

import pytest

from lib.errors import ConfigError, Problem, nearest
from lib.project import ROOT

CODE = re.compile(r"[a-z]+(-[a-z]+)*\.[a-z0-9]+(-[a-z0-9]+)*")


def test_an_error_lists_its_problems_with_codes() -> None:
    where = Problem("N_HEAD: expected 2, got 3", ".config:7", "make menuconfig", code="config.x")
    error = ConfigError(where, Problem("no run", code="run.not-found"))
    assert error.codes == ["config.x", "run.not-found"]
    assert str(error).splitlines() == [
        ".config:7: N_HEAD: expected 2, got 3 [config.x]",
        "        make menuconfig",
        "no run [run.not-found]",
    ]


def test_control_characters_are_escaped_and_long_values_are_cut() -> None:
    problem = Problem(f"got '\x1b[2J\u202e\r\x07' and {'9' * 5000}", "a\0b", code="config.x")
    text = str(problem)
    assert text.isprintable() and len(text) < 500
    assert "\\x1b[2J" in text and text.startswith("a\\x00b: ")
    assert str(Problem("two\nlines\té漢", code="config.x")) == "two\nlines\té漢 [config.x]"


@pytest.mark.parametrize("code", ["", "config", "config.", "Config.x", "config.Not_kebab", "a b.c"])
def test_a_malformed_code_is_a_defect(code: str) -> None:
    with pytest.raises(AssertionError):
        Problem("what", code=code)


def test_every_code_of_the_product_is_well_formed() -> None:
    """Most problems are raised in few of the tests, so that an assertion is not enough."""
    codes = []
    for path in (
        path for room in ("gpt2", "lib", "scripts") for path in (ROOT / room).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem":
                values = [word.value for word in node.keywords if word.arg in ("code", None)]
                assert values, f"{path}:{node.lineno}: no code"
                codes += [(path, value) for value in values if isinstance(value, ast.Constant)]
    malformed = [f"{path}: {v.value}" for path, v in codes if not CODE.fullmatch(str(v.value))]
    assert len(codes) > 150 and malformed == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SEDE", "; nearest: SEED"),
        ("sede", "; nearest: SEED"),
        ("STEPZ", "; nearest: steps"),
        ("X", ""),
    ],
)
def test_the_nearest_names_are_found_in_any_case(name: str, text: str) -> None:
    assert nearest(name, ["SEED", "steps", "LABEL_BY"]) == text
