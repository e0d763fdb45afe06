"""Forks of one run: trained, compared with each other, and judged with several seeds."""

import json

from tests.integration.conftest import SINGLE

TRAIN = "all"
PROLONG = ("prolong", "run", "--iters", "4", "--count", "3")


def test_forks_of_one_run_are_a_study(build):
    folder = build(**SINGLE)
    code, _, said = folder.command(TRAIN)
    assert code == 0, said
    code, table, said = folder.command(*PROLONG)
    assert code == 0 and "forks of one run" in table, said
    code, text, said = folder.command(*PROLONG, "--set", "RECIPROCAL=y", JSON="1")
    assert code == 0, said
    document = json.loads(text)
    assert [(row["slug"], row["n"]) for row in document["rows"]] == [
        ("unchanged", 3),
        ("reciprocal", 3),
    ]
    (verdict,) = document["verdicts"]
    assert (verdict["name"], verdict["n"]) == ("reciprocal vs unchanged", 3)
    assert verdict["verdict"] is not None
    assert "forks of one run" in document["notes"][0]
    # The listing has them, with the run that they continue.
    code, text, said = folder.command("ls", "--where", "state=done", JSON="1")
    assert code == 0, said
    studies = [run["study"] for run in json.loads(text)["runs"]]
    assert sum(study.startswith("prolonged-run-s1-") for study in studies) == 6
    # The same command prints the table again, and trains nothing.
    code, text, said = folder.command(*PROLONG)
    assert code == 0 and "3 of 3 done" in said and "reciprocal" in text


def test_forks_of_a_kept_checkpoint_are_audited_and_reproduced(build):
    kept = {"CHECKPOINT_KEEP_FINISHED": True, "CHECKPOINT_INTERVAL": 2}
    folder = build(**SINGLE, **kept)
    assert folder.command(TRAIN)[0] == 0
    code, _, said = folder.command("prolong", "run", "--iters", "4", "--from", "2")
    assert code == 0 and "continues with its state" in said, said
    (fork,) = folder.path.glob("results/prolonged-run-s1-*-2-4/unchanged-s1001-*")
    assert json.loads((fork / "status.json").read_text())["iteration"] == 4
    for command in (("audit", "--runs"), ("reproduce", "--run")):
        code, text, said = folder.command(*command, str(fork))
        assert code == 0, text + said
    code, _, said = folder.command("prolong", "run", "--iters", "4", "--from", "3")
    assert code == 2 and "[run.no-checkpoint]" in said and "2, 4" in said
