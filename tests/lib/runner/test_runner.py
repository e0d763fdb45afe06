"""Scenarios of make with fake runs; see conftest.py for the fake study."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from lib.runner import local
from lib.runs.lease import current_holder
from lib.runs.run_dir import RunDir, State
from lib.tracking import sidecar
from tests.integration.conftest import wait_for
from tests.lib.terminal import Terminal

SLOW = {"steps": 80, "step_seconds": 0.02}


def states(study, names: str) -> list[State | None]:
    statuses = [study.status(name) for name in names]
    return [status.state if status else None for status in statuses]


def line_of(stderr: str, tag: str, run: str) -> str:
    """Return the only line with this tag of a run."""
    (line,) = re.findall(rf"^{tag} +fake/{run} s1 .*$", stderr, re.M)
    return line


def test_trains_once_with_shared_facts_logged_once_and_again_where_asked_to(study):
    code, stderr = study.make()
    assert code == 0 and states(study, "abc") == [State.SUCCESS] * 3
    assert re.search(r"^DONE    fake/00-a s1   val loss 3\.0   \(1/3", stderr, re.M)
    assert stderr.count("a cpu") == stderr.count("fp32") == 1
    assert all(stderr.count(f"folder {name}-s1-{name}") == 1 for name in "abc")
    # The output of a run is in its log alone.
    assert "hello" not in stderr
    assert (study.path("a") / "logs.txt").read_text() == "hello from a-s1-a\n"
    code, stderr = study.make()
    assert code == 0
    assert stderr.count("SKIP") == 1 and "2 more runs" in stderr and "3 of 3 done" in stderr
    assert study.journal() == ["a-s1-a 0", "b-s1-b 0", "c-s1-c 0"]
    # Results of other code stop make until the user says what to do.
    code, stderr = study.make(changed=["gpt2/model.py", "torch"])
    assert code == 2
    assert stderr.count("[run.other-code]") == stderr.count("gpt2/model.py, torch") == 1
    assert "ON_STALE=rerun" in stderr and "ON_STALE=keep" in stderr
    code, stderr = study.make(changed=["gpt2/model.py"], stale="keep")
    assert code == 0 and len(re.findall(r"^SKIP .* 2 more .* kept$", stderr, re.M)) == 1
    # File and reason are named once.
    assert stderr.count("gpt2/model.py") == 1
    assert len(study.journal()) == 3
    code, _ = study.make(changed=["gpt2/model.py"], stale="rerun")
    assert code == 0 and len(study.journal()) == 6
    # The old results are moved aside, not deleted.
    (old,) = study.path("a").parent.glob("a-s1-a.old-*")
    assert json.loads((old / "status.json").read_text())["state"] == "SUCCESS"


FAILURES = {
    "a": ("raising", "ZeroDivisionError: division by a fake"),
    "b": ("sigkill", "signal 9 (SIGKILL"),
    "c": ("exit", "exit code 7"),
    # At the end, when the result has been reported.
    "d": ("full", "No space left on device"),
    # The next run has a new server.
    "e": ("killing the server", "exit code 255"),
    # No log, no output: the terminal has one line of the run, with the cause.
    "f": ("", "symbolic link"),
    "g": ("", "Is a directory"),
}


def test_goes_on_after_failures_and_the_next_make_resumes_them(study):
    save = "import json, sys; open(sys.argv[1], 'a').write(json.load(sys.stdin)['run'] + ' ')"
    files = {state: study.folder / state for state in ("SUCCESS", "FAILED")}
    commands = {state: [sys.executable, "-c", save, str(file)] for state, file in files.items()}
    victim = study.folder / "victim"
    victim.write_text("of another program\n")
    for name in "fg":
        study.path(name).mkdir(parents=True)
    (study.path("f") / "logs.txt").symlink_to(victim)
    (study.path("g") / "logs.txt").mkdir()
    runs = {name: {"fail_at": 2, "fails_by": how} for name, (how, _) in FAILURES.items()}
    names = [*FAILURES, "z"]
    code, stderr = study.make(names=names, runs=runs, commands=commands)
    assert code == 1 and study.status("z").state is State.SUCCESS
    assert "Traceback" not in stderr and stderr.splitlines()[-1] == "EXIT    code 1"
    for number, (name, (_, cause)) in enumerate(FAILURES.items()):
        assert study.status(name).state is State.FAILED
        line = line_of(stderr, "FAIL", f"0{number}-{name}")
        assert cause in study.status(name).message and cause in line and "val loss" not in line
        assert line.endswith(f"log: {study.path(name)}/logs.txt")
        # No process trains on.
        assert current_holder(RunDir(study.path(name))) is None
    assert "Traceback" in (study.path("a") / "logs.txt").read_text()
    assert victim.read_text() == "of another program\n"
    assert files["SUCCESS"].read_text() == "fake/07-z s1 "
    failed = [f"fake/0{number}-{name}" for number, name in enumerate(FAILURES)]
    assert files["FAILED"].read_text().split()[::2] == failed
    (study.folder / "healed").touch()
    assert study.make(names=["a", "b", "c"], runs=runs)[0] == 0
    # The runs resume: no step is repeated.
    assert all(study.steps(name) == [0, 1, 2] for name in "abc")
    # Where it is asked to, make stops after a failure.
    runs = {"h": {"fails_by": "full"}}
    code, stderr = study.make(names=["h", "i", "j"], runs=runs, keep_going=False)
    assert code == 1 and states(study, "ij") == [None, None]
    assert "0 done, 1 failed, 2 left" in stderr


def test_a_run_that_stalls_twice_fails_and_is_resumed(study):
    """Rank 0 waits in a system call, where it does not react to SIGTERM; rank 1 is stopped."""
    runs = {"b": {"fail_at": 1, "fails_by": "waiting for data", "rank_1": "stopping"}}
    code, stderr = study.make(processes=2, runs=runs, stall_limit=1, grace=0.5)
    assert code == 1 and states(study, "abc") == [State.SUCCESS, State.FAILED, State.SUCCESS]
    assert "STALL_LIMIT_SECONDS=1" in study.status("b").message
    assert re.findall(r"^(\w+) +fake/01-b s1   no sign", stderr, re.M) == ["RETRY", "FAIL"]
    log = (study.path("b") / "logs.txt").read_text()
    # The stacks of one rank are not mixed with those of the other.
    stacks = re.findall(r" in (misbehave|train|_train)$", log, re.M)
    assert stacks == 4 * ["misbehave", "train", "_train"]
    assert study.journal().count("b-s1-b 1") == 1
    (study.folder / "healed").touch()
    assert study.make(runs=runs)[0] == 0
    assert study.steps("b") == [0, 1, 2]


def test_ctrl_c_twice_stops_at_once(study):
    # The first step waits for data; a worker between steps would save.
    make = study.start(all={"fails_by": "waiting for data"})
    wait_for(lambda: (study.folder / "journal.fifo").exists())
    os.killpg(make.pid, signal.SIGINT)
    time.sleep(0.5)
    os.killpg(make.pid, signal.SIGINT)
    started = time.monotonic()
    code, stderr = study.finish(make)
    assert code == 130 and time.monotonic() - started < 5
    assert re.search(r"^STOP .*\b3 left; .*type: make\nEXIT    code 130$", stderr, re.M)
    assert "saved at" not in line_of(stderr, "STOP", "00-a") and study.steps("a") == []


def test_the_worker_of_a_killed_parent_saves_and_the_next_make_waits_for_it(study):
    """Without a report, which would show that the pipe is closed."""
    slow = {"all": {"steps": 3, "step_seconds": 0.4, "silent": True}, "names": ["a"]}
    make = study.start(**slow)
    wait_for(lambda: len(study.steps("a")) == 1)
    os.kill(make.pid, signal.SIGKILL)
    # The old worker finishes its step before it stops; no other worker trains the run meanwhile.
    assert study.make(**slow)[0] == 0
    assert study.steps("a") == list(range(3)) and study.journal()[1] == "a-s1-a 2"


def test_two_makes_train_each_run_once_and_both_wait_for_all(study):
    everyone = {
        "all": {"steps": 3, "step_seconds": 0.1},
        "names": list("abcdef"),
        "runs": {"a": {"fails_by": "raising"}},
    }
    outcomes = [study.finish(m) for m in [study.start(**everyone), study.start(**everyone)]]
    # The run that fails is tried by one of them.
    assert [code for code, _ in outcomes] == [1, 1]
    assert sorted(study.journal()) == [f"{name}-s1-{name} 0" for name in "abcdef"]
    # Each trained some, and was informed about the others.
    for _, stderr in outcomes:
        assert 0 < stderr.count("by another process") < 6 and stderr.count("DONE") == 5


def test_a_make_stopped_until_its_lease_is_taken_writes_nothing_more(study):
    slow = {"steps": 20, "step_seconds": 0.05}
    first = study.start(all=slow, names=["a"], lease_seconds=1)
    wait_for(lambda: len(study.steps("a")) > 3)
    # Parent, server and worker, as a machine that does not answer.
    os.killpg(first.pid, signal.SIGSTOP)
    stopped = len(study.steps("a"))
    second = study.start(all=slow, names=["a"], lease_seconds=1)
    wait_for(lambda: len(study.steps("a")) > stopped)
    os.killpg(first.pid, signal.SIGCONT)
    code, stderr = study.finish(first)
    assert code == 0 and "by another process" in stderr
    assert f"process {second.pid}" in line_of(stderr, "STOP", "00-a")
    assert study.finish(second)[0] == 0
    assert study.steps("a") == list(range(20))


def test_a_worker_that_does_not_wait_trains_what_is_free_and_ends(study):
    first = study.start(all={**SLOW, "steps": 400}, names=["a"], lease_seconds=2)
    wait_for(lambda: len(study.steps("a")) > 3)
    code, stderr = study.make(runs={"a": SLOW}, lease_seconds=2, wait=False)
    assert code == 0, stderr
    assert states(study, "abc") == [State.RUNNING, State.SUCCESS, State.SUCCESS]
    os.kill(first.pid, signal.SIGINT)
    assert study.finish(first)[0] == 130


def test_a_run_that_was_asked_to_stop_is_not_taken_by_another_make(study):
    first, second = (study.start(all={**SLOW, "steps": 400}, names=["a"]) for _ in range(2))
    wait_for(lambda: "WAIT" in first.stderr + second.stderr)
    if "WAIT" in first.stderr:
        first, second = second, first
    wait_for(lambda: len(study.steps("a")) > 3)
    (study.path("a") / "stop").touch()
    os.killpg(first.pid, signal.SIGINT)
    assert study.finish(first)[0] == 130
    code, stderr = study.finish(second)
    assert code == 130 and "stop requested" in line_of(stderr, "STOP", "00-a")


def test_a_stop_of_the_study_reaches_every_make_and_no_later_one(study):
    makes = [study.start(all=SLOW), study.start(all=SLOW)]
    wait_for(lambda: len(study.steps("a")) > 3 and len(study.steps("b")) > 3)
    (study.folder / "results/fake/stop").write_text("")
    assert [study.finish(make)[0] for make in makes] == [130, 130]
    assert states(study, "ab") == [State.INTERRUPTED] * 2
    assert study.make(all={**SLOW, "step_seconds": 0})[0] == 0


def test_runs_as_many_at_a_time_as_jobs_says(study):
    everyone = {"all": {"steps": 3, "step_seconds": 0.1}}
    assert study.make(**everyone, jobs=2, names=list("abcd"))[0] == 0
    began = [(study.path(n) / "behaviour.json").stat().st_mtime for n in "abcd"]
    ended = [(study.path(n) / "status.json").stat().st_mtime for n in "abcd"]
    assert max(sum(b <= t < e for b, e in zip(began, ended)) for t in began) == 2
    assert began == sorted(began)


def test_a_terminal_gets_a_live_table_and_ends_clean(study):
    script = Path(__file__).with_name("fake_make.py")
    options = json.dumps({"all": {"step_seconds": 0.3}, "names": ["a"]})
    terminal = Terminal([str(script), str(study.folder), options], COLUMNS="100")
    text = terminal.rest()
    assert terminal.finish() == 0
    assert "RUNS" in text and "elapsed 00:0" in text
    assert text.count("fake/00-a s1   val loss 3.0") == 1
    # The cursor is shown again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


TEAM_FAILURES = {
    # Rank 0 would wait forever; it is killed, and the reported cause is the death of rank 1.
    "a": ({"fails_by": "waiting for data", "rank_1": "sigkill"}, r"rank 1 of 2 .*signal 9\b"),
    "b": ({"fails_by": "following", "rank_1": "raising"}, "rank 1 of 2: ZeroDivisionError: "),
    # An error of every rank is reported once, as the error of the run.
    "c": ({"fails_by": "raising"}, "ZeroDivisionError: division by a fake"),
    # Rank 1 has ended, and rank 0 may not take for ever.
    "d": ({"fails_by": "waiting for data", "rank_1": ""}, "worker died with exit code 0"),
}


def test_a_failing_rank_ends_the_others_and_is_told_instead_of_what_follows_from_it(study):
    runs = {name: behaviour for name, (behaviour, _) in TEAM_FAILURES.items()}
    names = [*TEAM_FAILURES, "e"]
    code, stderr = study.make(processes=2, grace=0.5, farewell=0.5, names=names, runs=runs)
    assert code == 1 and study.status("e").state is State.SUCCESS
    for number, (name, (_, cause)) in enumerate(TEAM_FAILURES.items()):
        assert re.match(cause, study.status(name).message), name
        assert re.search(rf"^FAIL    fake/0{number}-{name} s1   {cause}", stderr, re.M), name


def test_all_ranks_train_one_writes_and_may_take_its_time_once_the_others_have_ended(study):
    """Rank 0 waits for its sidecar processes, which other ranks do not have."""
    slow = {"steps": 2, "step_seconds": 0.4}
    code, stderr = study.make(processes=3, grace=0.3, names=["a"], all=slow)
    assert code == 0 and study.status("a").state is State.SUCCESS, stderr
    ranks = (study.path("a") / "ranks.txt").read_text().split()
    assert sorted(ranks) == ["0/3", "1/3", "2/3"] and study.journal() == ["a-s1-a 0"]
    patience = sidecar._PATIENCE_SECONDS
    assert patience + local.EXIT_TIMEOUT_SECONDS <= local.MAIN_RANK_EXIT_TIMEOUT_SECONDS
