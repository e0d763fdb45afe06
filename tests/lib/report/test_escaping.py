"""Text of runs and studies is text in every rendering: nothing is executed, hidden or reordered."""

import csv
import io
import re
from typing import Any

import pytest

from lib.console import shown
from lib.report.columns import to_csv, to_latex, to_markdown, to_terminal, verdicts_to_terminal
from lib.report.render import TableSection, csv_table, latex_text, markdown_table, markdown_text
from lib.report.study import read_study
from tests.lib.report.documents import document_of

# Red text, a bell, a title of the window, C1, reversed order, a line separator, and a new line.
CONTROL = "\x1b[31m\x07\x1b]0;title\x07\x9b2J\u202e\u2066\u2028\n\r"
HOSTILE = (
    f"=1+1{CONTROL}<img src=x onerror=alert(1)>[link](javascript:x)`code`|**b**&lt;$x$"
    "~~s~~ \\input{x} 50% a_b #1 {y} ^ www.evil.com https://evil.com"
)
# Words that the document uses as marks, and text of the program.
MARKS = {"verdict", "role", "variance", "control", "note", "is_short", "unit", "against"}


def hostile(value: Any, key: str = "") -> Any:
    """Return a document whose texts begin with the hostile one, except marks and names."""
    if isinstance(value, dict):
        return {name: hostile(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [hostile(each, key) for each in value]
    if isinstance(value, str) and key not in MARKS:
        return HOSTILE + value
    return value


@pytest.fixture
def document(make_study) -> dict[str, Any]:
    """Return a document with words, labels, notes, sections and origins, all hostile."""
    runs = make_study({"base": (3.01, 3.02, 3.03), "wide": (2.91, 2.92, 2.93)})
    document = document_of(read_study("demo", runs, label_by=["torch"]), left_out=["a: b"])
    section = TableSection("Speed", ("run", "step ms"), [("a", "1.0")], is_short=True)
    document |= {"sections": [vars(section)], "notes": ["a note"], "same_documents": ["other"]}
    return hostile(document)


def test_no_control_character_reaches_a_rendering(document):
    renderings = [to_markdown(document), to_csv(document), to_latex(document)]
    renderings += [shown(to_terminal(document, 80), colour=False), verdicts_to_terminal(document)]
    for text in renderings:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", text)
        assert "\\x1b" in text or "textbackslash{}x1b" in text


def test_markdown_has_no_tag_link_code_formula_or_further_cell(document):
    text = to_markdown(document)
    plain = re.sub(r"\\[\\`*_<\[\]|~$#&:.>]", "", text)
    assert "img" in plain
    for mark in (r"<[A-Za-z/!?]", r"\]\(", "`", r"\*\*", "~~", r"\$", "&lt;", "://", r"www\."):
        assert not re.search(mark, plain), mark
    grids = [line for line in plain.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in grids if "state" in line or "done" in line}) == 1
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if re.match(r"#{1,2} ", line)
    ]


def test_a_cell_of_csv_is_no_formula(document):
    cells = [cell for row in csv.reader(io.StringIO(to_csv(document))) for cell in row]
    assert any(cell.startswith("'=1+1") for cell in cells)
    for cell in cells:
        assert not cell or cell[0] not in "=+-@\t\r" or float(cell)
    # Only formulas are marked.
    for text in ("=1", "+x", "-x", "@x", "\tx", "\rx", " =1", "＝1", "-", "1=2"):
        _, row = csv.reader(io.StringIO(csv_table(["a"], [[text]])))
        assert (row[0][0] == "'") == (text != "1=2")
    assert csv_table(["a"], [["-0.5"], [-0.5], ["+1e-3"]]) == "a\n-0.5\n-0.5\n+1e-3\n"


def test_latex_has_no_command_of_the_text(document):
    text = to_latex(document)
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    # Each command, and each escaped special, is one that the renderings write.
    allowed = r"\\(textbackslash|textasciitilde|textasciicircum|ensuremath|Delta|pm|\\|[{}$&#%_]"
    allowed += r"|begin|end|toprule|midrule|bottomrule|texttt)"
    for line in lines:
        rest = re.sub(allowed, "", line)
        assert "\\" not in rest and not re.search(r"[$#%^~]", rest), line
    assert r"\textbackslash{}input\{x\} 50\% a\_b \#1" in text
    assert text.count("\\\\\n") == 1 + len(document["rows"])


def test_text_keeps_its_meaning():
    assert markdown_text("ra_mla -0.01 [-0.02, +0.01] (<1e-12)") == (
        "ra_mla -0.01 [-0.02, +0.01] (<1e-12)"
    )
    assert [markdown_text(text) for text in ("# a", "- a", "1. a", "> a", "_a_")] == [
        *("\\# a", "\\- a", "1\\. a", "\\> a", "\\_a\\_"),
    ]
    assert markdown_table(("#", "x"), [("1", "a|b\nc")], left=(1,)) == (
        "|  # | x      |\n| -: | ------ |\n|  1 | a\\|b c |\n"
    )
    assert latex_text("a--b … é 語") == r"a-{}-b … é \texttt{U+8A9E}"
