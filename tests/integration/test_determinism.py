"""One configuration trained twice."""

import gpt2.running.reproduce
from gpt2.running.reproduce import train_twice
from tests.lib.fabricated import write_run


def test_twice_is_the_same_bytes(build):
    folder = build()
    code, told, said = folder.command("reproduce", TWICE="1", STEPS="1")
    assert code == 0, said
    assert told.startswith("BITWISE\n") and "determinism/second" in told
    assert "first s1" in said and "second s1" in said and not (folder.path / "results").exists()


def test_the_first_difference_is_reported(build, monkeypatch):
    folder = build()

    def not_twice(plan):
        for run, loss in zip(plan.runs, (3.2, 3.25), strict=True):
            write_run(run.path, losses=(3.5, loss))
        return 0

    monkeypatch.setattr(gpt2.running.reproduce, "train_scratch", not_twice)
    code, told = train_twice(folder.path, steps="1")
    assert code == 1
    assert told.startswith("DIVERGED\n") and "iteration 2" in told
    assert "3.2 and 3.25, A - B = -0.05" in told
    monkeypatch.setattr(gpt2.running.reproduce, "train_scratch", lambda plan: 130)
    assert train_twice(folder.path, steps="1") == (130, "")
