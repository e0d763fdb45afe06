"""Several workers on one run: they end together, and the first cause is reported."""

import re
import time

from lib.runner import local
from lib.runs.run_dir import State
from lib.tracking import sidecar


def line_of_a(stderr: str) -> str:
    """Return the line with the outcome of run a."""
    (line,) = [
        x for x in stderr.splitlines() if x.startswith(("FAIL    fake/00-a", "DONE    fake"))
    ]
    return line


def test_a_rank_that_dies_takes_the_others_with_it(study):
    """Rank 0 would wait forever; it is killed, and the reported cause is the death of rank 1."""
    started = time.monotonic()
    code, stderr = study.make(
        processes=2, grace=0.5, names=["a"], all={"waits": True, "rank_1": "sigkill"}
    )
    assert code == 1 and time.monotonic() - started < 20
    assert re.search(r"rank 1 of 2 .*signal 9\b", line_of_a(stderr))
    assert re.match(r"rank 1 of 2 .*signal 9\b", study.status("a").message)


def test_a_stopped_rank_ends_the_run(study):
    """Rank 0 waits for rank 1, and no process dies."""
    started = time.monotonic()
    code, _ = study.make(
        processes=2,
        silent=1,
        grace=0.5,
        names=["a"],
        all={"waits": True, "fail_at": 0, "rank_1": "stopping"},
    )
    assert code == 1 and time.monotonic() - started < 20
    assert "STALL_LIMIT_SECONDS=1" in study.status("a").message
    log = (study.path("a") / "logs.txt").read_text()
    # The stacks of one rank are not mixed with those of the other.
    assert re.findall(r" in (misbehave|train|other_rank)$", log, re.M) == [
        *("train", "misbehave", "other_rank", "train") * 2
    ]


def test_the_first_error_is_told_and_not_what_follows_from_it(study):
    code, stderr = study.make(processes=2, names=["a"], all={"follows": True, "rank_1": "raising"})
    assert code == 1
    assert "rank 1 of 2: ZeroDivisionError: division by a fake" in line_of_a(stderr)
    assert "connection" not in line_of_a(stderr)
    # An error of every rank is reported once, as the error of the run.
    study.path("a").rename(study.folder / "aside")
    _, stderr = study.make(processes=2, names=["a"], all={"fail_at": 1, "fails_by": "raising"})
    assert "   ZeroDivisionError: division by a fake" in line_of_a(stderr)


def test_all_ranks_train_one_writes_and_may_take_its_time_once_the_others_have_ended(study):
    """Rank 0 waits for its sidecar processes, which other ranks do not have."""
    slow = {"steps": 2, "step_seconds": 0.4}
    code, stderr = study.make(processes=3, grace=0.3, names=["a"], all=slow)
    assert code == 0 and study.status("a").state is State.SUCCESS, stderr
    ranks = (study.path("a") / "ranks.txt").read_text().split()
    assert sorted(ranks) == ["0/3", "1/3", "2/3"] and study.journal() == ["a-s1-a 0"]
    patience = sidecar._PATIENCE_SECONDS
    assert patience + local.EXIT_TIMEOUT_SECONDS <= local.MAIN_RANK_EXIT_TIMEOUT_SECONDS


def test_rank_0_may_not_take_for_ever(study):
    started = time.monotonic()
    code, _ = study.make(processes=2, farewell=0.5, names=["a"], all={"waits": True})
    assert code == 1 and time.monotonic() - started < 20
