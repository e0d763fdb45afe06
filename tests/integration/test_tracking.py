"""A tracker that fails, seen from the command line."""

import json


def test_a_lost_tracker_is_one_line_and_no_failure(build, tmp_path):
    folder = build(TRACKER_WANDB=True, TRACKER_TENSORBOARD=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/wandb.py").write_text('raise RuntimeError("away")\n')
    code, _, said = folder.command(
        "scripts/run_test_matrix.py", STEPS="0", PYTHONPATH=str(tmp_path / "broken")
    )
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("WARN")]
    assert "tracker_wandb is lost: RuntimeError: away; the run goes on" in line
    (run,) = folder.runs("0")
    facts = json.loads((run / "trackers/facts.json").read_text())
    assert (facts["project"], facts["study"], facts["name"]) == ("kablate-ratio", "ratio", run.name)
    assert facts["step"] == run.name.rsplit("-", 2)[0] == "baseline"
