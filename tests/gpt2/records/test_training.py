"""Run lengths and batches are compared with each other and with the declared budgets."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpt2.records.verify import batch_remarks, length_remarks, stop_row
from lib.files import write_json
from lib.report.checklist import CheckVerdict, RunEvidence
from lib.report.run_facts import RunFacts
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

ITERATIONS, SECONDS = {"train.budget": "iterations"}, {"train.budget": "time"}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run of ten iterations of 64 tokens and one second each."""

    def build(name: str, settings: dict[str, Any], state: RunStatus | None = None, **final: Any):
        files = RunDir(tmp_path / name)
        files.path.mkdir()
        planned = 10 if settings == ITERATIONS else 0
        write_status(files, state or RunStatus(State.SUCCESS, 0, "", 10, planned))
        limit = {**settings, "train.max_time_seconds": 10}
        batch = {"micro_batch": 2, "accumulation": 2, "global_sequences": 4}
        manifest = {
            "batch": {**batch, "tokens_per_iteration": 64},
            "processes": {"world_size": 1},
            "volatile": {"attempts": [{}]},
        }
        figures = {"iterations": 10, "tokens": 640, "budget_stretch": 1.0} | final
        seconds = figures.pop("seconds", 10.5)
        timing = {"train_seconds": seconds, "mean_step_seconds": 1.0}
        write_json(files.manifest, manifest)
        write_json(files.summary, {"final": figures, "timing": timing})
        facts = RunFacts(RunRecord(files), limit, {}, {}, {}, {})
        return RunEvidence(facts, {}, frozenset())

    return build


def said(remarks: Any) -> list[tuple[CheckVerdict, str]]:
    return [(remark.verdict, remark.what) for remark in remarks]


def judged(remarks: Any) -> list[tuple[CheckVerdict, str]]:
    return [(remark.verdict, remark.run) for remark in remarks]


def test_equal_tokens_of_a_budget_in_iterations(run: Any) -> None:
    first = run("a", ITERATIONS)
    # How long that took is the machine's affair.
    assert said(length_remarks([first, run("b", ITERATIONS, seconds=99.0)])) == []
    more = run("c", ITERATIONS, tokens=704)
    assert said(length_remarks([first, more])) == [(CheckVerdict.FAIL, "tokens: 640 (a), 704 (c)")]


def test_a_longer_budget_that_pruning_declares(run: Any) -> None:
    first = run("a", ITERATIONS)
    assert said(length_remarks([first, run("b", ITERATIONS, tokens=832, budget_stretch=1.3)])) == []
    other = run("c", ITERATIONS, tokens=960, budget_stretch=1.3)
    assert said(length_remarks([first, other])) == [(CheckVerdict.FAIL, "tokens: 640 (a), 960 (c)")]


def test_equal_time_of_a_budget_in_seconds(run: Any) -> None:
    first, faster = run("a", SECONDS), run("b", SECONDS, tokens=6400)
    assert said(length_remarks([first, faster])) == []
    assert stop_row([first, faster]).verdict is CheckVerdict.PASS
    late = run("c", SECONDS, seconds=14.0)
    (remark,) = length_remarks([first, late])
    assert (remark.verdict, remark.run) == (CheckVerdict.FAIL, "c") and "14.0 s" in remark.what
    early = run("d", SECONDS, seconds=9.0)
    row = stop_row([first, early])
    assert (row.verdict, row.runs) == (CheckVerdict.FAIL, ["d"])
    assert "9.0 of 10 s" in row.what


def test_a_run_that_ended_before_its_budget(run: Any) -> None:
    row = stop_row([run("a", ITERATIONS), run("b", ITERATIONS, iterations=9)])
    assert (row.verdict, row.what) == (CheckVerdict.FAIL, "b: SUCCESS at 9 of 10 iterations")
    stopped = RunStatus(State.INTERRUPTED, 130, "interrupted", 10, 10)
    assert stop_row([run("c", ITERATIONS, stopped)]).verdict is CheckVerdict.FAIL


def test_a_resumed_run_is_listed(run: Any) -> None:
    again = run("a", ITERATIONS)
    again.facts.record.manifest.fields["volatile"]["attempts"].append({})
    row = stop_row([again])
    assert row.verdict is CheckVerdict.PASS and row.what.endswith("resumed: a")


def test_what_is_not_recorded_is_unknown(run: Any) -> None:
    lost = run("a", ITERATIONS)
    del (
        lost.facts.record.summary.fields["final"]["tokens"],
        lost.facts.record.summary.fields["timing"]["train_seconds"],
    )
    assert judged(length_remarks([lost])) == [(CheckVerdict.UNKNOWN, "a")]
    assert stop_row([lost]).verdict is CheckVerdict.UNKNOWN
    del lost.facts.record.manifest.fields["batch"]["micro_batch"]
    assert judged(batch_remarks([lost])) == [(CheckVerdict.UNKNOWN, "a")]


def test_a_batch_is_the_product_of_its_parts(run: Any) -> None:
    odd = run("a", ITERATIONS)
    odd.facts.record.manifest.fields["batch"] = json.loads(
        json.dumps(odd.facts.record.manifest.fields["batch"])
    ) | {"accumulation": 3}
    assert said(batch_remarks([odd])) == [(CheckVerdict.FAIL, "a: 2 × 3 × 1 is not 4")]
