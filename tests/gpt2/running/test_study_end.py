"""The command after a study that an error ends; tests/integration/test_trained.py has the rest."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2.running import launch
from lib.errors import PreflightError, Problem, RunError
from lib.runner.runner import RunnerOptions
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

SAVE = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


@pytest.mark.parametrize(
    ("error", "is_damaged", "written"),
    [(PreflightError, False, False), (RunError, False, True), (RunError, True, False)],
)
def test_an_error_is_not_hidden_and_starts_it_if_a_run_had_begun(
    tmp_path, monkeypatch, capsys, error, is_damaged, written
):
    plan: Any = SimpleNamespace(folder=tmp_path / "demo", auto=None, runs=[])
    raised = error(Problem("the disk is full", code="disk.write-failed"))

    def train(plan: object, runs: object, options: object, begun: list[object]) -> None:
        # A run that another make has begun meanwhile is none of this one.
        run = RunDir(tmp_path / "demo/a-s1-00000000")
        run.path.mkdir(parents=True)
        write_status(run, RunStatus(State.FAILED))
        if error is RunError:
            begun.append(plan)
        raise raised

    def document(plan: object) -> dict[str, str]:
        if is_damaged:
            raise RunError(Problem("damaged", code="run.damaged"))
        return {"study": "demo", "title": "$(touch pwned)"}

    monkeypatch.setattr(launch, "train_runs", train)
    monkeypatch.setattr(launch, "judged_document", document)
    words = [sys.executable, "-c", SAVE, str(tmp_path / "read")]
    with pytest.raises(error):
        launch.train_plan(plan, RunnerOptions(study_command=words), plan)
    assert (tmp_path / "read").exists() == written
    assert ("WARN" in capsys.readouterr().err) == is_damaged
    if written:
        read = json.loads((tmp_path / "read").read_text())
        assert read.items() >= document(plan).items() and not list(tmp_path.rglob("pwned"))
