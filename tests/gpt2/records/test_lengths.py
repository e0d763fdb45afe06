"""Run lengths and batches are compared with each other and with the declared budgets."""

from typing import Any

import pytest

from gpt2.records.verify import length_remarks
from lib.files import write_json
from lib.report.checklist import FAIL, UNDECIDED
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

ITERATIONS, SECONDS = {"train.budget": "iterations"}, {"train.budget": "time"}


@pytest.fixture
def run(tmp_path) -> Any:
    """A run of ten iterations of 64 tokens and one second each."""

    def build(name: str, settings: dict[str, Any], **final: Any):
        files = RunDir(tmp_path / name)
        files.path.mkdir()
        planned = 10 if settings == ITERATIONS else 0
        write_status(files, RunStatus(State.SUCCESS, 0, "", 10, planned))
        limit = {**settings, "train.max_time_seconds": 10}
        batch = {"micro_batch": 2, "accumulation": 2, "global_sequences": 4}
        manifest = {
            "batch": {**batch, "tokens_per_iteration": 64},
            "processes": {"world_size": 1},
        }
        figures = {"iterations": 10, "tokens": 640, "budget_stretch": 1.0} | final
        seconds = figures.pop("seconds", 10.5)
        timing = {"train_seconds": seconds, "mean_step_seconds": 1.0}
        write_json(files.manifest, manifest)
        write_json(files.summary, {"final": figures, "timing": timing})
        budget = {name.removeprefix("train."): value for name, value in limit.items()}
        write_json(files.resolved_config, {"identity": {"train": budget}})
        return RunRecord(files)

    return build


def said(remarks: Any) -> list[tuple[str, str]]:
    return [(remark.verdict, remark.what) for remark in remarks]


@pytest.mark.parametrize(
    ("settings", "figures", "what"),
    [
        # How long equal tokens take depends on the machine.
        (ITERATIONS, {"seconds": 99.0}, ""),
        (ITERATIONS, {"tokens": 704}, "tokens: 640 (a), 704 (b)"),
        # A longer budget that pruning declares.
        (ITERATIONS, {"tokens": 832, "budget_stretch": 1.3}, ""),
        (ITERATIONS, {"tokens": 960, "budget_stretch": 1.3}, "tokens: 640 (a), 960 (b)"),
        (ITERATIONS, {"iterations": 9}, "b ended at 9 of 10 iterations"),
        (SECONDS, {"tokens": 6400}, ""),
        (SECONDS, {"seconds": 14.0}, "b trained for 14.0 s (expected 10 s)"),
        (SECONDS, {"seconds": 9.0}, "b trained for 9.0 s (expected 10 s)"),
        (SECONDS, {"seconds": 13.5, "budget_stretch": 1.3}, ""),
    ],
)
def test_lengths_are_those_of_the_budget(run, settings, figures, what):
    remarks = said(length_remarks([run("a", settings), run("b", settings, **figures)]))
    assert remarks == ([(FAIL, what)] if what else [])


def test_what_is_not_recorded_is_unknown(run):
    lost = run("a", ITERATIONS)
    del lost.summary.fields["timing"]["train_seconds"]
    assert said(length_remarks([lost])) == [(UNDECIDED, "the length of a is unknown")]
