"""The words of verdicts: p of the test that was made, and what the terminal must not hide."""

import math
import statistics
from typing import Any

import pytest

from lib.report.columns import to_markdown, to_terminal, verdicts_to_terminal
from lib.report.declarations import VerdictPlan
from lib.report.statistics import VerdictRule
from lib.report.study import read_study
from lib.report.text import p_cell
from tests.lib.report.documents import document_of
from tests.lib.report.test_columns import t_tail

BASE = (3.0, 3.25, 2.875, 3.125, 3.0625)
NOISE = {"none": (0.004, -0.003, 0.005, -0.001, 0.002), "wide": (0.003, -0.002, 0.001, 0.0, -0.001)}


@pytest.fixture
def document(make_run) -> dict[str, Any]:
    """Return a study of a step that is 0.1 nats better, and one without an effect."""
    runs = []
    for i, base in enumerate(BASE):
        runs.append(make_run("base", base, seed=i + 1, number=0))
        for number, (slug, gain) in enumerate((("wide", 0.1), ("none", 0.0)), 1):
            loss = base - gain + NOISE[slug][i]
            runs.append(make_run(slug, loss, seed=i + 1, parent="base", number=number))
    return document_of(read_study("demo", runs, plan=VerdictPlan(VerdictRule("shared"))))


def test_a_comparison_whose_own_interval_contains_0_shows_the_p_of_that_test(document) -> None:
    wide, none = document["verdicts"]
    low, high = none["interval_95"]
    assert low < 0 < high and none["p_adjusted"] == 1.0
    noise = NOISE["none"]
    t = statistics.fmean(noise) / statistics.stdev(noise) * math.sqrt(5)
    p = 2 * t_tail(t, 4)
    assert 0.05 < p < 0.9 and none["p_own"] == pytest.approx(p)
    assert p_cell(none) == f"own {p:.2g}" and p_cell(wide) == f"{wide['p_adjusted']:.2g}"
    lines = [line.split() for line in verdicts_to_terminal(document).splitlines()]
    assert lines[1][-2:] == [f"{wide['p_adjusted']:.2g}", "BETTER"]
    assert lines[2][-3:] == ["own", f"{p:.2g}", "INCONCLUSIVE"]
    text = to_markdown(document)
    assert f"| own {p:.2g} |" in text and "own: the comparison's own" in " ".join(text.split())


@pytest.mark.parametrize("change", [{"gated": False}, {"verdict": "EQUIVALENT"}])
def test_a_p_that_a_test_gave_is_shown_as_it_is(document, change) -> None:
    """Also a corrected p of 1, and the p of the band."""
    none = document["verdicts"][1] | change
    assert p_cell(none) == "1"


def test_the_terminal_says_what_no_word_can_be_read_without(document) -> None:
    assert "NOISE" not in to_terminal(document, 80)
    failed = document["verdicts"][0] | {"role": "a/a", "step": "base-aa", "name": "base-aa vs base"}
    changed = document | {
        "noise": [{"comparison": "wide vs base", "factor": 31.0}],
        "aa_steps": [failed],
        "repeats": {"base-again": {"1": 0.004}},
        "left_out": ["a: b"],
        "notes": ["demo/00-base s1: stale"],
    }
    for verdict in changed["verdicts"]:
        verdict["remarks"] = ["rule changed after results: alpha", *verdict["remarks"]]
    text = " ".join(to_terminal(changed, 80).split())
    for part in (
        "NOISE wide vs base: 31 times",
        "A/A step failed: base-aa",
        "REPEAT base-again differs by up to 4.0e-03",
        "left out: a: b",
        "s1: stale",
        "rule changed after results: alpha (all)",
    ):
        assert part in text, part
    quiet = changed | {"aa_steps": [], "aa_failed": True}
    assert "A/A step failed at an earlier look" in to_terminal(quiet, 80)


def test_a_seed_that_does_not_count_is_named_beside_the_words(document) -> None:
    document["verdicts"][0]["excluded"] = ["wide s3: damaged"]
    text = " ".join(to_markdown(document).split())
    assert "- not counted: wide s3: damaged (wide vs base)" in text
