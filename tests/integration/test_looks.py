"""SEEDS=auto end to end: a study of three steps, judged at three and at four seeds."""

import json
import re
import shutil
from pathlib import Path

import pytest

from lib.runs.run_dir import RunDir, State, read_status
from tests.integration.conftest import Folder, set_up

STUDY = {
    "RA_MLA_ABLATION_STEPS": "0-2",
    "VERDICT_AA": False,
    "VERDICT_LOOKS": "3,4",
    "VERDICT_SPEND": ".2,.7",
}


def record(folder: Path) -> dict:
    return json.loads((folder / "results/ratio/verdicts.json").read_text())


def seeds_of(folder: Path, slug: str) -> list[int]:
    """Return the seeds of the finished runs of a step."""
    paths = (folder / "results/ratio").glob(f"{slug}-s*")
    done = [p for p in paths if read_status(RunDir(p)).state is State.SUCCESS]
    return sorted(int(path.name.split("-s")[-1].split("-")[0]) for path in done)


@pytest.fixture
def judged(shared) -> Folder:
    """Return the study's folder after its last look, and with what its command has read."""

    def train(folder: Folder) -> None:
        set_up(folder.path, **STUDY, ON_STUDY_DONE_CMD=f"tee {folder.path}/read")
        code, _, said = folder.command("all", SEEDS="auto", JOBS="1")
        assert code == 0, said
        assert re.search(r"LOOK +pruned-50  baseline  .*WORSE", said)

    return shared("judged", train)


@pytest.mark.slow
def test_a_study_stops_early_and_its_words_stay(judged):
    # The pruned step has a word after three seeds, the other comparison after four.
    whole = record(judged.path)
    assert (judged.path / "results/index.html").exists()
    assert [(look["n"], look["share"]) for look in whole["looks"]] == [(3, 0.2), (4, 0.7)]
    assert {v["step"]: (v["verdict"], v["look"], v["n"]) for v in whole["verdicts"]} == {
        "pruned-50": ("WORSE", 1, 3),
        "golden": ("BETTER", 2, 4),
    }
    assert [seeds_of(judged.path, s) for s in ("baseline", "pruned-50", "golden")] == [
        [1, 2, 3, 4],
        [1, 2, 3],
        [1, 2, 3, 4],
    ]
    # Once, at the end.
    assert json.loads((judged.path / "read").read_text()) == whole
    before = (judged.path / "results/ratio/verdicts.json").read_bytes()
    for script in ("report", "verdicts", "status", "watch"):
        assert judged.command(script, SEEDS="auto")[0] == 0
        assert (judged.path / "results/ratio/verdicts.json").read_bytes() == before
    assert judged.command("verdicts", SEEDS="auto", STRICT="1")[0] == 0
    # Without SEEDS=, the words of the looks stay.
    code, text, _ = judged.command("verdicts")
    words = " ".join(text.split())
    assert code == 0 and re.search(r" 3 \S+ WORSE .* 4 \S+ BETTER ", words)
    code, text, said = judged.command("all", SEEDS="auto")
    assert code == 0 and "nothing to run" in said


@pytest.mark.slow
def test_a_study_that_ends_between_two_looks_goes_on_to_the_same_record(judged):
    whole, study = record(judged.path), judged.path / "results/ratio"
    declared = (study / "declarations.jsonl").read_text().splitlines(keepends=True)
    first = [json.loads(line)["kind"] for line in declared].index("look")
    (study / "declarations.jsonl").write_text("".join(declared[: first + 1]))
    for path in study.glob("*-s4-*"):
        shutil.rmtree(path)
    (study / "verdicts.json").unlink()
    code, _, said = judged.command("all", SEEDS="auto", JOBS="1")
    assert code == 0, said
    again = record(judged.path)
    for part in ("verdicts", "looks", "family", "alpha_spent"):
        assert again[part] == whole[part]


@pytest.mark.slow
def test_strict_wants_words(judged):
    """What a look waits for: tests/lib/report/test_looks.py."""
    (judged.path / "results/ratio/declarations.jsonl").unlink()
    strict = {"SEEDS": "auto", "SET": "VERDICT_SPEND=.001,.001"}
    code, _, said = judged.command("all", STRICT="1", **strict)
    assert code == 5, said
    assert len(record(judged.path)["looks"]) == 2
    assert judged.command("verdicts", **strict)[0] == 0
    # The runs are older than the declarations, and nothing else is wrong with these.
    (note,) = (note for note in record(judged.path)["notes"] if "declarations.jsonl" in note)
    assert "runs started before the first line" in note


def test_a_diverged_baseline_ends_the_study(build):
    """Without a learning rate, nothing is learned: every run has diverged."""
    rates = {"LEARNING_RATE": "1e-9", "MIN_LEARNING_RATE": "0", "MAX_ITERS": 1}
    folder = build(**STUDY | rates | {"RA_MLA_ABLATION_STEPS": "0-1", "WARMUP_STEPS": 0})
    code, table, said = folder.command("all", SEEDS="auto")
    assert code == 1, said
    (verdict,) = record(folder.path)["verdicts"]
    assert (verdict["verdict"], verdict["reason"]) == ("DIVERGED", "baseline, seeds 1, 2, 3")
    assert verdict["difference"] is None and verdict["interval_95"] is None
    assert "DIVERGED" in table and " nan" not in table.lower()
    # No further seeds, and the same exit code.
    code, _, said = folder.command("all", SEEDS="auto")
    assert code == 1 and "nothing to run" in said
