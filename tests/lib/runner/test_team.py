"""Several workers on one run: they end together, and the first cause is reported."""

import re

from lib.runner import local
from lib.runs.run_dir import State
from lib.tracking import sidecar

FAILURES = {
    # Rank 0 would wait forever; it is killed, and the reported cause is the death of rank 1.
    "a": ({"fails_by": "waiting for data", "rank_1": "sigkill"}, r"rank 1 of 2 .*signal 9\b"),
    "b": ({"fails_by": "following", "rank_1": "raising"}, "rank 1 of 2: ZeroDivisionError: "),
    # An error of every rank is reported once, as the error of the run.
    "c": ({"fails_by": "raising"}, "ZeroDivisionError: division by a fake"),
    # Rank 1 has ended, and rank 0 may not take for ever.
    "d": ({"fails_by": "waiting for data", "rank_1": ""}, "worker died with exit code 0"),
}


def test_a_failing_rank_ends_the_others_and_is_told_instead_of_what_follows_from_it(study):
    runs = {name: behaviour for name, (behaviour, _) in FAILURES.items()}
    names = [*FAILURES, "e"]
    code, stderr = study.make(processes=2, grace=0.5, farewell=0.5, names=names, runs=runs)
    assert code == 1 and study.status("e").state is State.SUCCESS
    for number, (name, (_, cause)) in enumerate(FAILURES.items()):
        assert re.match(cause, study.status(name).message), name
        assert re.search(rf"^FAIL    fake/0{number}-{name} s1   {cause}", stderr, re.M), name


def test_a_stopped_rank_ends_the_run(study):
    """Rank 0 waits for rank 1, and no process dies."""
    stopped = {"fails_by": "waiting for data", "rank_1": "stopping"}
    code, _ = study.make(processes=2, stall_limit=1, grace=0.5, names=["a"], all=stopped)
    assert code == 1 and "STALL_LIMIT_SECONDS=1" in study.status("a").message
    log = (study.path("a") / "logs.txt").read_text()
    # The stacks of one rank are not mixed with those of the other.
    assert re.findall(r" in (misbehave|train|_train)$", log, re.M) == 4 * [
        *("misbehave", "train", "_train")
    ]


def test_all_ranks_train_one_writes_and_may_take_its_time_once_the_others_have_ended(study):
    """Rank 0 waits for its sidecar processes, which other ranks do not have."""
    slow = {"steps": 2, "step_seconds": 0.4}
    code, stderr = study.make(processes=3, grace=0.3, names=["a"], all=slow)
    assert code == 0 and study.status("a").state is State.SUCCESS, stderr
    ranks = (study.path("a") / "ranks.txt").read_text().split()
    assert sorted(ranks) == ["0/3", "1/3", "2/3"] and study.journal() == ["a-s1-a 0"]
    patience = sidecar._PATIENCE_SECONDS
    assert patience + local.EXIT_TIMEOUT_SECONDS <= local.MAIN_RANK_EXIT_TIMEOUT_SECONDS
