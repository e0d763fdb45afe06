"""The command after a study that an error ends; tests/integration/test_trained.py has the rest."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2.running import launch
from lib.errors import Problem, RunError
from lib.runner.runner import RunnerOptions

SAVE = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


@pytest.mark.parametrize(
    ("begins", "is_damaged", "written"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_an_error_is_not_hidden_and_starts_it_if_a_run_had_begun(
    tmp_path, monkeypatch, capsys, begins, is_damaged, written
):
    plan: Any = SimpleNamespace(folder=tmp_path / "demo", auto=None, runs=[])

    def train(plan, runs, options, begun):
        begun += [plan] * begins
        raise RunError(Problem("the disk is full", code="disk.write-failed"))

    def document(plan):
        if is_damaged:
            raise RunError(Problem("damaged", code="run.damaged"))
        return {"study": "demo", "title": "$(touch pwned)"}

    monkeypatch.setattr(launch, "train_runs", train)
    monkeypatch.setattr(launch, "judged_document", document)
    words = [sys.executable, "-c", SAVE, str(tmp_path / "read")]
    with pytest.raises(RunError):
        launch.train_plan(plan, RunnerOptions(study_command=words), plan)
    assert ("WARN" in capsys.readouterr().err) == is_damaged
    texts = [json.loads(path.read_text()) for path in tmp_path.glob("read")]
    assert [text["title"] for text in texts] == ["$(touch pwned)"] * written
    assert not list(tmp_path.rglob("pwned"))
