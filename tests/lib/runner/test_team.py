"""Several workers on one run: they end together, and the first cause is told."""

import time

from lib import companions
from lib.runner import team
from lib.status import State


def line_of_a(said: str) -> str:
    """The line that says what became of run a."""
    (line,) = [x for x in said.splitlines() if x.startswith(("FAIL    fake/00-a", "DONE    fake"))]
    return line


def test_all_ranks_train_and_one_writes(study):
    code, _ = study.make(processes=3, names=["a"])
    assert code == 0
    assert study.status("a").state is State.SUCCESS
    assert study.journal() == ["a-s1-a 0"]
    ranks = (study.path("a") / "ranks.txt").read_text().split()
    assert sorted(ranks) == ["0/3", "1/3", "2/3"]


def test_a_rank_that_dies_takes_the_others_with_it(study):
    """Rank 0 would wait for ever: it is ended, and its end is not the message."""
    started = time.monotonic()
    code, said = study.make(
        processes=2, grace=0.5, names=["a"], all={"waits": True, "rank_1": "sigkill"}
    )
    assert code == 1 and time.monotonic() - started < 20
    assert "rank 1 of 2 died with signal 9" in line_of_a(said)
    assert study.status("a").message.startswith("rank 1 of 2 died with signal 9")


def test_the_first_error_is_told_and_not_what_follows_from_it(study):
    code, said = study.make(processes=2, names=["a"], all={"follows": True, "rank_1": "raising"})
    assert code == 1
    assert "rank 1 of 2: ZeroDivisionError: division by a fake" in line_of_a(said)
    assert "connection" not in line_of_a(said)
    # An error of every rank is told once, as that of the run.
    study.path("a").rename(study.folder / "aside")
    _, said = study.make(processes=2, names=["a"], all={"fail_at": 1, "fails_by": "raising"})
    assert "   ZeroDivisionError: division by a fake" in line_of_a(said)


def test_rank_0_may_take_its_time_once_the_others_have_ended_well(study):
    """It waits for its companions, which the others do not have."""
    slow = {"steps": 4, "step_seconds": 0.5}
    code, said = study.make(processes=2, grace=0.3, names=["a"], all=slow)
    assert code == 0, said
    assert study.status("a").state is State.SUCCESS
    assert team.FAREWELL_SECONDS >= companions._PATIENCE_SECONDS + team.GRACE_SECONDS


def test_rank_0_may_not_take_for_ever(study):
    started = time.monotonic()
    code, _ = study.make(processes=2, farewell=0.5, names=["a"], all={"waits": True})
    assert code == 1 and time.monotonic() - started < 20
