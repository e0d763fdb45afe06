"""Problems and the errors that carry them."""

import pytest

from lib.errors import ConfigError, Problem, nearest


def test_an_error_lists_its_problems_with_codes():
    where = Problem("N_HEAD: expected 2, got 3", ".config:7", "make menuconfig", code="config.x")
    error = ConfigError(where, Problem("no run", code="run.not-found"))
    assert error.codes == ["config.x", "run.not-found"]
    assert str(error).splitlines() == [
        ".config:7: N_HEAD: expected 2, got 3 [config.x]",
        "        make menuconfig",
        "no run [run.not-found]",
    ]


def test_control_characters_are_escaped_and_long_values_are_cut():
    problem = Problem(f"got '\x1b[2J\u202e\r\x07' and {'9' * 5000}", "a\0b", code="config.x")
    text = str(problem)
    assert text.isprintable() and len(text) < 500
    assert "\\x1b[2J" in text and text.startswith("a\\x00b: ")
    assert str(Problem("two\nlines é漢", code="config.x")) == "two lines é漢 [config.x]"


@pytest.mark.parametrize("code", ["", "config", "config.", "Config.x", "config.Not_kebab", "a b.c"])
def test_a_malformed_code_is_a_defect(code):
    with pytest.raises(AssertionError):
        Problem("what", code=code)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "; nearest: SEED") for name in ("SEDE", "sede")),
        ("STEPZ", "; nearest: steps"),
        ("X", ""),
    ],
)
def test_the_nearest_names_are_found_in_any_case(name, text):
    assert nearest(name, ["SEED", "steps", "LABEL_BY"]) == text
