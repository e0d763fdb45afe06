"""SEEDS=auto end to end: a study of three steps, judged at three and at four seeds."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from lib.runs.run_dir import RunDir, State, read_status
from tests.integration.conftest import Folder

STUDY = {
    "RA_MLA_ABLATION_STEPS": "0-2",
    "VERDICT_AA": False,
    "VERDICT_LOOKS": "3,4",
    "VERDICT_SPEND": ".2,.7",
}
TRAIN = "all"


def record(folder: Path) -> dict:
    return json.loads((folder / "results/ratio/verdicts.json").read_text())


def seeds_of(folder: Path, slug: str) -> list[int]:
    """Return the seeds of the finished runs of a step."""
    paths = (folder / "results/ratio").glob(f"{slug}-s*")
    done = [p for p in paths if read_status(RunDir(p)).state is State.SUCCESS]
    return sorted(int(path.name.split("-s")[-1].split("-")[0]) for path in done)


def kill_after(folder: Folder, runs: int) -> None:
    """Start make's command, and kill all of its processes once ``runs`` runs have finished."""
    process = folder.start(TRAIN, SEEDS="auto", JOBS="1")
    deadline = time.monotonic() + 120
    while len(list((folder.path / "results/ratio").glob("*/summary.json"))) < runs:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()


@pytest.mark.slow
def test_a_study_stops_early_and_an_interrupted_one_ends_with_the_same_record(build):
    folder = build(**STUDY)
    code, text, said = folder.command("plan", SEEDS="auto")
    assert code == 0 and "9 runs" in text and "at most 3 more runs, until 4 seeds" in text, said
    code, _, said = folder.command(TRAIN, SEEDS="auto", JOBS="1")
    assert code == 0, said
    # The pruned step has a word after three seeds, the other comparison after four.
    whole = record(folder.path)
    assert (folder.path / "results/index.html").exists()
    assert [(look["n"], look["share"]) for look in whole["looks"]] == [(3, 0.2), (4, 0.7)]
    assert {v["step"]: (v["verdict"], v["look"], v["n"]) for v in whole["verdicts"]} == {
        "pruned-50": ("WORSE", 1, 3),
        "golden": ("BETTER", 2, 4),
    }
    assert [seeds_of(folder.path, s) for s in ("baseline", "pruned-50", "golden")] == [
        [1, 2, 3, 4],
        [1, 2, 3],
        [1, 2, 3, 4],
    ]
    assert re.search(r"LOOK +pruned-50  baseline  .*WORSE", said)
    for script in ("report", "verdicts", "status", "watch"):
        before = (folder.path / "results/ratio/verdicts.json").read_bytes()
        assert folder.command(script, SEEDS="auto")[0] == 0
        assert (folder.path / "results/ratio/verdicts.json").read_bytes() == before
    assert folder.command("verdicts", SEEDS="auto", STRICT="1")[0] == 0
    # Without SEEDS=, the words of the looks stay.
    code, text, _ = folder.command("verdicts")
    words = " ".join(text.split())
    assert code == 0 and re.search(r" 3 \S+ WORSE .* 4 \S+ BETTER ", words)
    code, text, said = folder.command(TRAIN, SEEDS="auto")
    assert code == 0 and "nothing to run" in said

    shutil.rmtree(folder.path / "results")
    # In the first block, and between the first look and the second.
    for runs in (2, 10):
        kill_after(folder, runs)
    code, _, said = folder.command(TRAIN, SEEDS="auto", JOBS="1")
    assert code == 0, said
    again = record(folder.path)
    for part in ("verdicts", "looks", "family", "alpha_spent"):
        assert again[part] == whole[part]


@pytest.mark.slow
def test_a_look_waits_for_runs_that_have_not_ended_and_strict_wants_words(build):
    folder = build(**STUDY | {"VERDICT_SPEND": ".001,.001"})
    code, _, said = folder.command(TRAIN, "--runs", "baseline", SEEDS="auto")
    assert code == 0 and "waits until each of their runs has ended" in said
    assert record(folder.path)["looks"] == []
    code, _, said = folder.command(TRAIN, SEEDS="auto", STRICT="1")
    assert code == 5, said
    assert len(record(folder.path)["looks"]) == 2
    assert folder.command("verdicts", SEEDS="auto")[0] == 0
    # A step has its word without the runs of the others, which are judged at the same look.
    shutil.rmtree(folder.path / "results")
    code, _, said = folder.command(TRAIN, SEEDS="1-3", STEPS="0-1")
    (first,) = record(folder.path)["looks"]
    (pruned,) = record(folder.path)["verdicts"]
    assert code == 0 and (pruned["verdict"], pruned["planned_comparisons"]) == ("WORSE", 2), said
    assert (first["share"], first["judged"]) == (0.9, ["pruned-50 vs baseline"])
    declared = (folder.path / "results/ratio/declarations.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in declared] == ["plan", "look"]
    code, _, said = folder.command(TRAIN, SEEDS="1-3")
    (look,) = record(folder.path)["looks"]
    assert code == 0 and look["judged"] == ["golden vs baseline", "pruned-50 vs baseline"]
    notes = record(folder.path)["notes"]
    assert not any("declarations.jsonl" in note for note in notes), notes


def test_a_diverged_baseline_ends_the_study(build):
    """Without a learning rate, nothing is learned: every run has diverged."""
    rates = {"LEARNING_RATE": "1e-9", "MIN_LEARNING_RATE": "0"}
    folder = build(**STUDY | rates | {"RA_MLA_ABLATION_STEPS": "0-1"})
    code, table, said = folder.command(TRAIN, SEEDS="auto")
    assert code == 1, said
    (verdict,) = record(folder.path)["verdicts"]
    assert (verdict["verdict"], verdict["reason"]) == ("DIVERGED", "baseline, seeds 1, 2, 3")
    numbers = ("difference", "sd", "interval_95", "p", "p_adjusted", "p_own", "more_seeds")
    assert {verdict[name] for name in numbers} == {None}
    assert "DIVERGED" in table and " nan" not in table.lower()
    # No further seeds, and the same exit code.
    code, _, said = folder.command(TRAIN, SEEDS="auto")
    assert code == 1 and "nothing to run" in said
    assert seeds_of(folder.path, "pruned-50") == [1, 2, 3]
    code, _, said = folder.command("verdicts", SEEDS="auto")
    assert code == 1 and "WARN" not in said
    assert "DIVERGED" in (folder.path / "results/ratio/report.html").read_text()
