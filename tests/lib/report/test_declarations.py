"""The file of declarations: what is appended when, what is read, and what is noticed if it is changed."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from lib.errors import ConfigError, RunError
from lib.report.declarations import (
    DECLARATIONS_FILE,
    Look,
    VerdictPlan,
    looks_of,
    read_declarations,
)
from lib.report.judge import declare, judge
from lib.report.options import LookPlan
from lib.report.statistics import VerdictRule
from lib.report.verdicts import SeedOutcome, VerdictWord
from tests.lib.report.documents import family_of

BETTER = VerdictWord.BETTER
FAMILY = family_of({"base": "", "wide": "base", "gate": "base"})
SHIFTS = {"base": 0.0, "wide": -1.0, "gate": 0.0}
NOISE = (0.0, 0.011, -0.007, 0.004, -0.012, 0.009)


def outcomes(seeds=(1, 2, 3), **times):
    """Return the outcomes of three arms; those of the gate are noise."""
    return {
        arm: [
            SeedOutcome(s, 3 + s / 10 + shift + NOISE[(s + 2 * number) % 6], **times) for s in seeds
        ]
        for number, (arm, shift) in enumerate(SHIFTS.items())
    }


def plan_of(folder, n=3, **fields):
    known = read_declarations(folder)
    return VerdictPlan(looks=LookPlan.fixed(n), folder=folder, declarations=known, **fields)


def planned(folder, at, **fields):
    """Declare the plan of three seeds before its runs."""
    return declare(plan_of(folder, declared=FAMILY, seeds=(1, 2, 3), **fields), at=at)


def report(folder, seeds=3, at=None, runs=None, **fields):
    runs = runs or outcomes(range(1, seeds + 1))
    plan = declare(plan_of(folder, seeds, **fields), FAMILY, runs, at=at)
    return {**judge(FAMILY, runs, plan), "plan": plan}


def lines(folder):
    return [json.loads(line) for line in (folder / DECLARATIONS_FILE).read_text().splitlines()]


# What is appended.


def test_a_plan_is_declared_before_its_runs_and_a_look_before_it_is_judged(tmp_path):
    plan = planned(tmp_path, 100.0, configurations={"base": "b"})
    assert lines(tmp_path) == [
        {
            "kind": "plan",
            "at": "1970-01-01T00:01:40.000+00:00",
            "rule": plan.rule_record,
            "look_plan": {"seeds": [3], "shares": [0.9]},
            "seeds": [1, 2, 3],
            "family": {
                "wide vs base": {"wide": "", "base": "b"},
                "gate vs base": {"gate": "", "base": "b"},
            },
        }
    ]
    # The same plan is declared once.
    for at in (200.0, 300.0):
        planned(tmp_path, at)
    assert len(lines(tmp_path)) == 2
    for _ in range(2):
        report(tmp_path, at=300.0)
    *_, look = lines(tmp_path)
    assert len(lines(tmp_path)) == 3 and look["kind"] == "look"
    assert (look["number"], look["n"], look["share"], look["planned"]) == (1, 3, 0.9, True)
    assert (look["seeds"], look["added"]) == ([1, 2, 3], False)
    assert look["judged"] == ["gate vs base", "wide vs base"]
    assert read_declarations(tmp_path)[-1].judged == dict.fromkeys(look["judged"], 300.0)
    # A table that takes no look writes nothing.
    study = report(tmp_path / "other", exploratory=True)
    assert not study["looks"] and not (tmp_path / "other").exists()
    assert study["verdicts"][0]["reason"] == "a table of selected steps or seeds takes no look"


def test_processes_that_report_at_once_declare_one_look(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        studies = list(pool.map(lambda _: report(tmp_path), range(8)))
    assert [line["kind"] for line in lines(tmp_path)] == ["plan", "look"]
    assert all(len(study["looks"]) == 1 for study in studies)
    # A file that was written without a lock.
    text = (tmp_path / DECLARATIONS_FILE).read_text().splitlines()
    (tmp_path / DECLARATIONS_FILE).write_text("\n".join([*text, text[-1], text[-1], ""]))
    assert [look.share for look in report(tmp_path)["looks"]] == [0.9]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("")
    os.symlink(tmp_path / "victim", tmp_path / DECLARATIONS_FILE)
    with pytest.raises(RunError) as caught:
        report(tmp_path)
    assert caught.value.codes == ["file.symbolic-link"]
    assert (tmp_path / "victim").read_text() == ""


# What is read.


PLANS = [
    *({"kind": "word"}, {"at": "yesterday"}, {"seeds": [1, 1, 2]}, {"seeds": [-1, 2, 3]}),
    *({"family": {"wide vs base": ["wide"]}}, {"family": ...}, {"rule": {"band": None}}),
    {"look_plan": {"seeds": [3, 5], "shares": [0.9]}},
    {"look_plan": {"seeds": [3], "shares": [1.1]}},
]
LOOKS = [
    *({"at": 1.5}, {"seeds": [1, 2, True]}, {"seeds": "1-3"}, {"family": ["wide vs base"]}),
    *({"family": {"wide vs base": {"wide": 3}}}, {"imported": "yes"}, {"share": 1.5}),
    *({"share": 0}, {"share": "all"}, {"n": 4}, {"judged": [1]}, {"planned": 1}),
]


@pytest.mark.parametrize(
    ("number", "fields"), [*((0, each) for each in PLANS), *((1, each) for each in LOOKS)]
)
def test_a_damaged_line_is_named(tmp_path, number, fields):
    report(tmp_path)
    whole = lines(tmp_path)
    whole[number] = {k: v for k, v in (whole[number] | fields).items() if v is not ...}
    text = "".join(json.dumps(line) + "\n" for line in whole)
    (tmp_path / DECLARATIONS_FILE).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_declarations(tmp_path)
    (problem,) = caught.value.problems
    assert problem.code == "run.damaged" and "move it aside" in problem.next
    assert problem.where == f"{tmp_path / DECLARATIONS_FILE}:{number + 1}"


def test_a_part_of_a_line_declares_nothing_and_is_replaced(tmp_path):
    """Nothing was judged before the whole line was on the disk."""
    report(tmp_path)
    path = tmp_path / DECLARATIONS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert not report(tmp_path, exploratory=True)["looks"]
    assert [look.n for look in report(tmp_path)["looks"]] == [3]
    assert len(lines(tmp_path)) == 2 and len(path.read_bytes()) == len(whole)


def test_looks_beyond_alpha_give_no_word():
    """Such as those of a file that was joined from two studies, or written by a stranger."""
    family = {"a vs b": {"a": "", "b": ""}}
    looks = [Look(1, n, 0.6, planned=True, seeds=tuple(range(n)), family=family) for n in (3, 4, 5)]
    assert [look.n for look in looks_of(looks)] == [3]


# What is noticed.


@pytest.mark.parametrize(
    ("declared_at", "fields", "is_first"),
    [
        (None, {}, False),
        (900.0, {}, True),
        (1500.0, {}, False),
        (900.0, {"rule": VerdictRule(band=1.0)}, False),
    ],
)
def test_a_rule_is_called_declared_first_only_if_it_was(tmp_path, declared_at, fields, is_first):
    runs = outcomes(started_at=1000.0, ended_at=2000.0)
    if declared_at:
        planned(tmp_path, declared_at)
    study = report(tmp_path, declared=FAMILY, runs=runs, at=3000.0, **fields)
    assert study["is_declared_first"] is is_first


def test_a_file_that_was_deleted_is_seen_by_the_dates_of_the_runs(tmp_path):
    runs = outcomes(started_at=1000.0)
    planned(tmp_path, 900.0)
    assert not report(tmp_path, runs=runs)["notes"]
    (tmp_path / DECLARATIONS_FILE).unlink()
    for _ in range(2):
        (note,) = report(tmp_path, runs=runs)["notes"]
        assert note.startswith("9 runs started before the first line of declarations.jsonl")
    # A run of another study, which this one reuses, may be older.
    reused = {arm: [replace(run, reused=True) for run in each] for arm, each in runs.items()}
    assert not report(tmp_path, runs=reused)["notes"]
    arm, (first, *_) = next(iter(runs.items()))
    (note,) = report(tmp_path, runs=reused | {arm: [first, *reused[arm][1:]]})["notes"]
    assert note.startswith("1 run started before")
    # A single training or seed declares nothing.
    assert not judge([], runs, plan_of(tmp_path / "none"))["notes"]


def test_a_look_that_was_deleted_is_seen_by_the_dates_of_its_runs(tmp_path):
    path = tmp_path / DECLARATIONS_FILE
    runs = outcomes(started_at=1000.0, ended_at=2000.0)
    report(tmp_path, at=900.0, runs=runs)
    later = outcomes((4, 5), started_at=4000.0, ended_at=5000.0)
    longer = {arm: [*runs[arm], *each] for arm, each in later.items()}
    assert not report(tmp_path, 5, at=3000.0, runs=longer)["notes"]
    plan, _, *rest = path.read_text().splitlines()
    path.write_text("\n".join([plan, *rest, ""]))
    (note,) = report(tmp_path, 5, runs=longer)["notes"]
    assert note == "the look at 3 seeds, whose runs have ended, is missing in declarations.jsonl"
    # The study was extended before all of its runs had ended: no look was due.
    late = {arm: [replace(run, ended_at=3500.0) for run in each] for arm, each in longer.items()}
    assert not report(tmp_path, 5, runs=late)["notes"]


def test_results_under_another_rule_are_marked(tmp_path):
    runs = outcomes((1,), started_at=100.0, ended_at=2000.0)
    report(tmp_path, at=1000.0, runs=runs, rule=VerdictRule(band=0.1))
    # Nothing had ended: a declaration may change before there are results.
    for at, rule, remarks in (
        (1500.0, VerdictRule(), []),
        (3000.0, VerdictRule("own"), ["rule changed after results: variance"]),
    ):
        study = report(tmp_path, at=at, runs=runs, rule=rule)
        assert study["verdicts"][0]["remarks"] == remarks


# Import of an earlier version's record.


def former_record(**fields):
    """Return a record with one look, as commit 478ca248 wrote it."""
    verdict = {"step": "wide", "reference": "base", "weights": {"wide": 1.0, "base": -1.0}}
    look = {"look": 1, "n": 3, "share": 0.9, "planned": True, "added": False, "seeds": [1, 2, 3]}
    look |= {"closed": ["wide vs base"], "verdicts": {"wide vs base": {"verdict": "WORSE"}}}
    look |= {"family": {f"{c.step} vs base": ["base", c.step] for c in FAMILY}}
    rule = VerdictPlan().rule_record
    return {
        "schema_version": 3,
        "rule": rule,
        "family": ["gate vs base", "wide vs base", "gone vs base"],
        "look_plan": {"seeds": [3], "shares": [0.9]},
        "looks": [look],
        "other_looks": [],
        "evaluation_set": "e" * 64,
        "verdicts": [{**verdict, "verdict": "WORSE"}],
        **fields,
    }


def test_looks_of_an_earlier_version_are_imported_once_and_words_are_not(tmp_path):
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps(former_record()))
    os.utime(path, (5000, 5000))
    runs = outcomes((1, 2, 3, 4, 5), started_at=1000.0)
    study = report(tmp_path, 5, runs=runs)
    assert [(look.n, look.share, look.imported) for look in study["looks"]] == [
        (3, 0.9, True),
        (5, 0.05, False),
    ]
    # The word is that of the runs, and the runs are older than the file.
    assert study["verdicts"][0]["verdict"] is BETTER and not study["notes"]
    imported = [line for line in lines(tmp_path) if line.get("imported")]
    assert [line["kind"] for line in imported] == ["plan", "look"]
    assert {line["at"] for line in imported} == {"1970-01-01T01:23:20.000+00:00"}
    assert '"WORSE"' not in (tmp_path / DECLARATIONS_FILE).read_text()
    # Once: the record is an output.
    path.write_text("{")
    assert [look.n for look in report(tmp_path, 5, runs=runs)["looks"]] == [3, 5]


def test_another_record_of_an_earlier_version_is_damaged_or_not_read(tmp_path):
    path = tmp_path / "verdicts.json"
    for version in (1, 4, None):
        path.write_text(json.dumps(former_record(schema_version=version)))
        assert read_declarations(tmp_path) == ()
    for text in ("{", json.dumps(former_record(looks=[{}])), json.dumps(former_record(rule=None))):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_declarations(tmp_path)
        (problem,) = caught.value.problems
        assert problem.code == "run.damaged" and "move it aside" in problem.next
