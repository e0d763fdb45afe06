"""Run lengths and batches are compared with each other and with the declared budgets."""

import pytest

from gpt2.records.verify import length_remarks
from lib.files import write_json
from lib.report.checklist import FAIL, UNDECIDED
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

ITERATIONS, SECONDS = "iterations", "time"


@pytest.fixture
def run(tmp_path):
    """Return a factory of runs of ten iterations of 64 tokens and one second each."""

    def build(name, settings, seconds=10.5, **final):
        files = RunDir(tmp_path / name)
        files.path.mkdir()
        write_status(files, RunStatus(State.SUCCESS, 0, "", 10, 10 * (settings == ITERATIONS)))
        batch = {"micro_batch": 2, "accumulation": 2, "global_sequences": 4}
        batch["tokens_per_iteration"] = 64
        write_json(files.manifest, {"batch": batch, "processes": {"world_size": 1}})
        figures = {"iterations": 10, "tokens": 640, "budget_stretch": 1.0} | final
        timing = {"train_seconds": seconds, "mean_step_seconds": 1.0}
        write_json(files.summary, {"final": figures, "timing": timing})
        budget = {"budget": settings, "max_time_seconds": 10}
        write_json(files.resolved_config, {"identity": {"train": budget}})
        return RunRecord(files)

    return build


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
    remarks = length_remarks([run("a", settings), run("b", settings, **figures)])
    assert [(r.verdict, r.what) for r in remarks] == ([(FAIL, what)] if what else [])


def test_what_is_not_recorded_is_unknown(run):
    lost = run("a", ITERATIONS)
    del lost.summary.fields["timing"]["train_seconds"]
    (remark,) = length_remarks([lost])
    assert (remark.verdict, remark.what) == (UNDECIDED, "the length of a is unknown")
