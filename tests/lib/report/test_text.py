"""The words of verdicts, and a study on a terminal: what it must not hide, and what fits."""

import io
import re
from typing import Any

import pytest

from lib.console import shown
from lib.report.columns import to_markdown, to_terminal, training_text, verdicts_to_terminal
from lib.report.declarations import VerdictPlan
from lib.report.render import fitting_rows, shortened
from lib.report.statistics import VerdictRule
from lib.report.study import read_study
from lib.report.text import p_cell
from tests.lib.report.documents import document_of

BASE = (3.0, 3.25, 2.875, 3.125, 3.0625)
STEPS = {
    "base": BASE,
    "wide": (2.903, 3.148, 2.776, 3.025, 2.9615),
    "none": (3.004, 3.247, 2.88, 3.124, 3.0645),
}


@pytest.fixture
def document(make_study) -> dict[str, Any]:
    """Return a study of a step that is 0.1 nats better, and one without an effect."""
    plan = VerdictPlan(VerdictRule("shared"))
    return document_of(read_study("demo", make_study(STEPS), plan=plan))


def test_a_comparison_whose_own_interval_contains_0_shows_the_p_of_that_test(document):
    wide, none = document["verdicts"]
    low, high = none["interval_95"]
    p = none["p_own"]
    assert low < 0 < high and none["p_adjusted"] == 1.0 and 0.05 < p < 0.9
    assert p_cell(none) == f"own {p:.2g}" and p_cell(wide) == f"{wide['p_adjusted']:.2g}"
    lines = [line.split() for line in verdicts_to_terminal(document).splitlines()]
    assert lines[1][-2:] == [f"{wide['p_adjusted']:.2g}", "BETTER"]
    assert lines[2][-3:] == ["own", f"{p:.2g}", "INCONCLUSIVE"]
    text = to_markdown(document)
    assert f"| own {p:.2g} |" in text and "own: the comparison's own" in " ".join(text.split())
    # A p that a test gave is shown as it is: a corrected p of 1, and the p of the band.
    assert [p_cell(none | each) for each in ({"gated": False}, {"verdict": "EQUIVALENT"})] == [
        "1"
    ] * 2
    assert p_cell(wide | {"p_of_word": 1e-300}) == "<1e-12"


def test_the_terminal_says_what_no_word_can_be_read_without(document):
    assert "NOISE" not in to_terminal(document, 80)
    failed = document["verdicts"][0] | {"role": "a/a", "step": "base-aa", "name": "base-aa vs base"}
    document |= {
        "noise": [{"comparison": "wide vs base", "factor": 31.0}],
        "aa_steps": [failed],
        "repeats": {"base-again": {"1": 0.004}},
        "left_out": ["a: b"],
        "notes": ["demo/00-base s1: stale"],
    }
    for verdict in document["verdicts"]:
        verdict["remarks"] = ["rule changed after results: alpha", *verdict["remarks"]]
    document["verdicts"][0]["excluded"] = ["wide s3: damaged"]
    text = " ".join(to_terminal(document, 80).split())
    for part in (
        "NOISE wide vs base: 31 times",
        "A/A step failed: base-aa",
        "REPEAT base-again differs by up to 4.0e-03",
        "left out: a: b",
        "s1: stale",
        "rule changed after results: alpha (all)",
    ):
        assert part in text, part
    text = " ".join(to_markdown(document).split())
    assert "- not counted: wide s3: damaged (wide vs base)" in text
    quiet = document | {"aa_steps": [], "aa_failed": True}
    assert "A/A step failed at an earlier look" in to_terminal(quiet, 80)


# A terminal.


@pytest.mark.parametrize("width", [80, 132])
def test_every_line_fits_and_colours_mark_the_verdict_and_the_best_row(make_study, width):
    steps = {"base": (3.0, 3.2, 3.1), "wide": (2.901, 3.102, 3.003)}
    steps |= {"golden-gate-cross": (3.001, 3.202, 3.103), "later": [None]}
    runs = make_study(steps)
    table = read_study("demo", runs, is_stale=lambda record: record.planned in runs[3:5])
    document = document_of(table, left_out=["x" * 40 + " is impossible"])
    plain, text = (shown(to_terminal(document, width), colour=colour) for colour in (False, True))
    lines = plain.splitlines()
    assert max(map(len, lines)) <= width and lines == [line.rstrip() for line in lines]
    assert not re.search(r"[|#]|\x1b", plain)
    end = 1 + len(document["rows"])
    assert lines[0].startswith("step ") and lines[end] == ""
    assert "BETTER" in plain and "2 golden-gate-cross" in plain
    assert ("params" in lines[0]) == (width == 132)
    notes = "\n".join(lines[end:])
    assert "is impossible" in notes and notes.count("stale") == 1
    # The legend, and remarks on single comparisons, are in table.md.
    assert "Rule" not in notes and "normal model" not in notes
    assert re.sub(r"\x1b\[[\d;]+m", "", text) == plain
    (best,) = (line for line in text.splitlines() if line.startswith("\x1b[1m"))
    assert "1 wide" in best and "\x1b[1;32mBETTER" in best and best.endswith("\x1b[0m")


SERIES = {
    # The loss before the first step has no place on a logarithmic scale.
    "evaluation": {"at": [0, 1000, 10_000, 100_000], "mean": [9.0, 5.5, 4.0, 2.5]},
    "sample": {
        "seed": 3,
        "text": "".join(f"line {i} \x1b[31m" + "x " * 60 + "\n" for i in range(9)),
    },
}


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", "█▅▁"), ("ascii", "@+_")])
def test_a_training_ends_with_its_curve_and_ten_lines_of_its_sample(monkeypatch, encoding, blocks):
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    curve, scale, heading, *sample = training_text(SERIES, 80).splitlines()
    top, middle, low = blocks
    # Each evaluation holds until the next one: half of a decade of two, and the last point.
    assert curve == f"val loss 5.5000 {top * 20}{middle * 19}{low} 2.5000"
    assert scale.split() == ["after", "1k", "to", "100k", "tokens,", "log", "scale"]
    assert heading == "Sample, seed 3:" and len(sample) == 10
    assert max(map(len, sample)) <= 80 and "\\x1b[31m" in sample[0] and "\x1b" not in sample[0]


def test_a_training_without_evaluations_or_sample_ends_with_nothing():
    for evaluation in (None, {"at": [0, 5], "mean": [2.0, 1.0]}):
        assert training_text({"evaluation": evaluation, "sample": None}, 80) == ""
    # 7 (61/7) is below 61 in floating point.
    two = {"evaluation": {"at": [7, 61], "mean": [2.0, 1.0]}, "sample": None}
    assert training_text(two, 80).splitlines()[0].endswith("█▁ 1.0000")


def test_columns_are_chosen_by_their_importance_and_titles_cut_to_the_room():
    columns = {"a": ["1234"], "bb": ["1"], "c": ["12345678"]}
    for width, headings in ((None, "a bb c"), (14, "a c"), (13, "bb c"), (3, "c")):
        shown, texts = fitting_rows(columns, ["c", "a", "bb"], width)
        assert " ".join(shown) == headings
        assert list(texts) == [columns[heading][0] for heading in shown]
    columns = {"title": ["a title of twenty-one"], "a": ["12345678"], "b": ["1"]}
    assert fitting_rows(columns, ["a", "title", "b"], 28)[1] == ("a title of…", "12345678", "1")
    assert fitting_rows(columns, ["a", "title", "b"], 32)[1] == (*columns["title"], "12345678")
    # Between words.
    titles = ["MLP at 2.5 times attention", "both, share 20 %", "GPT-2"]
    assert shortened(titles, 10) == ["MLP at…", "both…", "GPT-2"]
    assert shortened(titles, 12) == ["MLP at 2.5…", "both, share…", "GPT-2"]
    assert shortened(["reciprocal"], 5) == ["reci…"]
