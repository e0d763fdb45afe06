"""Tests of the whitespace rules: every reported problem is fixed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.project import ROOT
from lib.style import check
from lib.style.check import _vague_words, text_files


@pytest.mark.parametrize(
    ("name", "bad", "good", "where", "code"),
    [
        ("a.py", "x = 1 \n", "x = 1\n", "a.py:1", "trailing-whitespace"),
        ("a.md", "a\n\nb\t\n", "a\n\nb\n", "a.md:3", "trailing-whitespace"),
        ("a.md", "a\r\n", "a\n", "a.md:1", "trailing-whitespace"),
        ("a.md", "a", "a\n", "a.md", "end-of-file"),
        ("a.md", "a\n\n\n", "a\n", "a.md", "end-of-file"),
        ("a.py", "if x:\n\ty()\n", "if x:\n    y()\n", "a.py:2", "tab"),
        (
            "Kconfig.a",
            "config A\n        bool\n",
            "config A\n\tbool\n",
            "Kconfig.a:2",
            "indentation",
        ),
        ("Kconfig", "\thelp\n                a\n", "\thelp\n\t\ta\n", "Kconfig:2", "indentation"),
    ],
)
def test_found_and_fixed(name, bad, good, where, code):
    found = list(check.check_whitespace(Path(name), bad))
    assert [(problem.where, problem.code) for problem in found] == [(where, f"style.{code}")]
    assert check.fix_whitespace(Path(name), bad) == good
    assert list(check.check_whitespace(Path(name), good)) == []


def test_what_is_right_stays():
    for name, text in (("a.py", "x = 1\n"), ("Kconfig", "\thelp\n\t  text\n"), ("empty.md", "")):
        assert check.fix_whitespace(Path(name), text) == text
        assert list(check.check_whitespace(Path(name), text)) == []


def test_the_vague_word_is_found_in_any_case():
    text = "A fine\nCOMPRE" + "HENSIVE list\n"
    assert [p.where for p in _vague_words(Path("a.md"), text)] == ["a.md:2"]


@pytest.fixture
def tree(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def test_text_files_are_those_git_would_take(tree):
    (tree / ".gitignore").write_text("ignored\n")
    (tree / "ignored").write_text("x")
    (tree / "binary").write_bytes(b"\0\1")
    (tree / "a.md").write_text("a\r\n")
    (tree / "link.md").symlink_to("a.md")
    found = {path.name: text for path, text in text_files(tree)}
    assert found == {".gitignore": "ignored\n", "a.md": "a\r\n"}


def test_without_git_there_is_one_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        list(text_files(tmp_path))
    assert caught.value.codes == ["git.failed"]


@pytest.mark.parametrize(
    ("tool", "bad"), [("black", "x=1\n"), ("ruff", "import os\n"), ("mypy", "def f(): ...\n")]
)
def test_a_tool_reports_problems_of_the_tree(tree, tool, bad):
    shutil.copy(ROOT / "pyproject.toml", tree)
    for folder in ("gpt2", "lib", "scripts"):
        (tree / folder).mkdir()
        (tree / folder / "a.py").write_text("")
    assert check.run_tool(tool, tree) == ""
    (tree / "lib" / "a.py").write_text(bad)
    assert "lib/a.py" in check.run_tool(tool, tree)
