"""Scenarios of make with fake runs; see conftest.py for the fake study."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from lib.runner.queue import stale_text
from lib.runs.lease import current_holder
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.terminal import Terminal

SLOW = {"steps": 200, "step_seconds": 0.02}


def test_trains_everything_once_and_then_nothing(study):
    code, stderr = study.make()
    assert code == 0
    assert [study.status(name).state for name in "abc"] == [State.SUCCESS] * 3
    assert re.search(r"^DONE    fake/00-a s1   val loss 3\.0   \(1/3", stderr, re.M)
    code, stderr = study.make()
    assert code == 0
    assert stderr.count("SKIP") == 1 and "2 more runs" in stderr and "3 of 3 done" in stderr
    assert study.journal() == ["a-s1-a 0", "b-s1-b 0", "c-s1-c 0"]


def test_trains_exactly_the_run_whose_directory_was_removed(study):
    study.make()
    for file in study.path("b").iterdir():
        file.unlink()
    study.path("b").rmdir()
    assert study.make()[0] == 0
    assert study.journal()[3:] == ["b-s1-b 0"]


def test_goes_on_after_a_failure_and_says_where_the_log_is(study):
    runs = {"a": {"fail_at": 1, "fails_by": "raising"}}
    code, stderr = study.make(runs=runs)
    assert code == 1
    assert study.status("a").message == "ZeroDivisionError: division by a fake"
    assert [study.status(name).state for name in "bc"] == [State.SUCCESS] * 2
    (line,) = re.findall(r"^FAIL    fake/00-a s1 .*$", stderr, re.M)
    assert "division by a fake" in line and line.endswith(f"log: {study.path('a')}/logs.txt")
    assert "Traceback" not in stderr
    assert "Traceback" in (study.path("a") / "logs.txt").read_text()
    assert stderr.splitlines()[-1] == "EXIT    code 1"


def test_a_file_that_cannot_be_written_at_the_end_is_the_message_of_the_failure(study):
    """The result has been reported by then."""
    code, stderr = study.make(runs={"a": {"full": True}})
    assert code == 1
    (line,) = re.findall(r"^FAIL    fake/00-a s1 .*$", stderr, re.M)
    assert "No space left on device" in line and "manifest.json" in line and "val loss" not in line


def test_stops_after_a_failure_where_asked_to(study):
    runs = {"a": {"fail_at": 1, "fails_by": "raising"}}
    code, stderr = study.make(runs=runs, keep_going=False)
    assert code == 1
    assert study.status("b") is None and study.status("c") is None
    assert "0 done, 1 failed, 2 left" in stderr


@pytest.mark.parametrize(
    ("manner", "cause"), [("sigkill", "signal 9 (SIGKILL"), ("exit", "exit code 7")]
)
def test_a_worker_that_dies_is_a_failed_run_and_is_tried_again(study, manner, cause):
    runs = {"b": {"fail_at": 2, "fails_by": manner}}
    code, stderr = study.make(runs=runs)
    assert code == 1
    assert cause in study.status("b").message and cause in stderr
    assert [study.status(name).state for name in "ac"] == [State.SUCCESS] * 2
    (study.folder / "healed").touch()
    assert study.make(runs=runs)[0] == 0
    # The run resumes: no step is repeated.
    assert study.steps("b") == [0, 1, 2]


@pytest.mark.parametrize("other", ["link", "folder"])
def test_a_log_that_cannot_be_written_is_the_cause_of_the_failure(study, other):
    """No log yet, no output: the terminal has one line of the run, with the cause."""
    victim = study.folder / "victim"
    victim.write_text("of another program\n")
    log = study.path("b") / "logs.txt"
    log.parent.mkdir(parents=True)
    log.symlink_to(victim) if other == "link" else log.mkdir()
    code, stderr = study.make()
    assert code == 1 and "Traceback" not in stderr
    cause = "symbolic link" if other == "link" else "Is a directory"
    assert cause in study.status("b").message and cause in stderr
    assert victim.read_text() == "of another program\n"
    assert [study.status(name).state for name in "ac"] == [State.SUCCESS] * 2


def test_a_stopped_worker_writes_its_stacks_and_its_run_goes_on(study):
    runs = {"b": {"fail_at": 1, "fails_by": "stopping"}}
    code, stderr = study.make(runs=runs, names=["a", "b"], silent=1)
    assert code == 0 and len(re.findall(r"^RETRY   fake/01-b s1   no sign", stderr, re.M)) == 1
    # Written by faulthandler once the process goes on.
    assert (study.path("b") / "logs.txt").read_text().count(" in misbehave") == 1
    assert study.status("b").state is State.SUCCESS
    assert study.steps("b") == [0, 1, 2]


def test_a_run_that_stalls_twice_fails_and_is_resumed(study):
    """A worker that waits in a system call does not react to SIGTERM, and is killed."""
    runs = {"b": {"fail_at": 1, "fails_by": "waiting for data"}}
    code, stderr = study.make(runs=runs, silent=1, grace=0.5)
    assert code == 1
    assert study.status("b").state is State.FAILED
    assert "STALL_LIMIT_SECONDS=1" in study.status("b").message
    assert re.findall(r"^(\w+) +fake/01-b s1   no sign", stderr, re.M) == ["RETRY", "FAIL"]
    assert (study.path("b") / "logs.txt").read_text().count(" in misbehave") == 2
    assert study.journal().count("b-s1-b 1") == 1
    assert [study.status(name).state for name in "ac"] == [State.SUCCESS] * 2
    (study.folder / "healed").touch()
    assert study.make(runs=runs)[0] == 0
    assert study.steps("b") == [0, 1, 2]


def test_a_worker_without_its_server_is_ended(study):
    runs = {"b": {"fail_at": 2, "fails_by": "killing the server"}}
    code, _ = study.make(runs=runs)
    assert code == 1
    assert study.status("b").state is State.FAILED
    # No process trains on: its lease is free, and the next run has a new server.
    assert current_holder(RunDir(study.path("b"))) is None
    assert study.status("c").state is State.SUCCESS


def test_ctrl_c_saves_says_how_to_go_on_and_is_continued(study):
    make = study.start(all=SLOW, slots=2)
    study.wait_until(lambda: len(study.steps("a")) > 3 and len(study.steps("b")) > 3)
    # A terminal signals the whole group: parent, server and workers.
    os.killpg(make.pid, signal.SIGINT)
    code, stderr = study.finish(make)
    assert code == 130
    assert re.search(r"^STOP .*\b3 left; .*type: make$", stderr, re.M)
    assert stderr.splitlines()[-1] == "EXIT    code 130"
    assert [study.status(name).state for name in "ab"] == [State.INTERRUPTED] * 2
    assert study.status("c") is None
    assert study.make(all={**SLOW, "step_seconds": 0})[0] == 0
    assert study.steps("a") == list(range(200))


def test_ctrl_c_twice_stops_at_once(study):
    # The first step waits for data; a worker between steps would save.
    make = study.start(all={"steps": 2, "fail_at": 0, "fails_by": "waiting for data"})
    study.wait_until(lambda: (study.folder / "journal.fifo").exists())
    os.killpg(make.pid, signal.SIGINT)
    time.sleep(0.5)
    os.killpg(make.pid, signal.SIGINT)
    started = time.monotonic()
    code, stderr = study.finish(make)
    assert code == 130 and time.monotonic() - started < 5
    (line,) = re.findall(r"^STOP    fake/00-a s1 .*$", stderr, re.M)
    assert "saved at" not in line and study.steps("a") == []


def test_sigterm_is_like_ctrl_c(study):
    make = study.start(all=SLOW)
    study.wait_until(lambda: len(study.steps("a")) > 3)
    # Signal the whole group, as a batch system does.
    os.killpg(make.pid, signal.SIGTERM)
    code, stderr = study.finish(make)
    assert code == 143
    # The parent waited for the worker, whose server survived the signal.
    assert "fake/00-a s1   interrupted; saved at iteration" in stderr
    assert study.status("a").state is State.INTERRUPTED


@pytest.mark.parametrize("silent", [False, True])
def test_workers_of_a_killed_parent_save_and_stop(study, silent):
    make = study.start(all={**SLOW, "silent": silent})
    study.wait_until(lambda: len(study.steps("a")) > 3)
    os.kill(make.pid, signal.SIGKILL)
    study.wait_until(lambda: study.status("a").state is State.INTERRUPTED)
    done = len(study.steps("a"))
    assert done < 200
    assert study.make(all={**SLOW, "step_seconds": 0})[0] == 0
    assert study.steps("a") == list(range(200))
    assert study.journal()[1] == f"a-s1-a {done}"


def test_continues_after_the_whole_tree_was_killed(study):
    make = study.start(all=SLOW)
    study.wait_until(lambda: len(study.steps("a")) > 3)
    os.killpg(make.pid, signal.SIGKILL)
    make.wait()
    assert study.status("a").state is State.RUNNING
    assert study.make(all={**SLOW, "step_seconds": 0})[0] == 0
    assert study.steps("a") == list(range(200))


def test_waits_for_a_worker_that_outlives_its_parent(study):
    make = study.start(all={"steps": 6, "step_seconds": 0.4})
    study.wait_until(lambda: len(study.steps("a")) == 1)
    os.kill(make.pid, signal.SIGKILL)
    # The old worker finishes its step before it stops; no other worker trains the run meanwhile.
    assert study.make(all={"steps": 6, "step_seconds": 0.4}, slots=3)[0] == 0
    assert study.steps("a") == list(range(6))


def test_two_makes_train_each_run_once_and_both_wait_for_all(study):
    everyone = {"all": {"steps": 5, "step_seconds": 0.1}, "names": list("abcdef")}
    makes = [study.start(**everyone), study.start(**everyone)]
    outcomes = [study.finish(make) for make in makes]
    assert [code for code, _ in outcomes] == [0, 0]
    assert sorted(study.journal()) == [f"{name}-s1-{name} 0" for name in "abcdef"]
    # Each trained some, and was informed about the others.
    for _, stderr in outcomes:
        assert 0 < stderr.count("by another process") < 6
        assert stderr.count("DONE") == 6


def test_the_run_of_a_killed_make_is_continued_by_its_helper(study):
    makes = [study.start(all=SLOW, names=["a"]), None]
    study.wait_until(lambda: len(study.steps("a")) > 3)
    makes[1] = study.start(all=SLOW, names=["a"])
    study.wait_until(lambda: "WAIT" in makes[1].stderr)
    os.killpg(makes[0].pid, signal.SIGKILL)
    assert study.finish(makes[1])[0] == 0
    assert study.steps("a") == list(range(200))


def test_a_failed_run_is_tried_by_one_of_two_makes(study):
    everyone = {
        "all": {"steps": 5, "step_seconds": 0.1},
        "runs": {"a": {"fail_at": 1, "fails_by": "raising"}},
    }
    outcomes = [study.finish(m) for m in [study.start(**everyone), study.start(**everyone)]]
    assert [code for code, _ in outcomes] == [1, 1]
    assert sum(line.startswith("a-s1-a") for line in study.journal()) == 1


def test_a_make_stopped_until_its_lease_is_taken_writes_nothing_more(study):
    slow = {"steps": 60, "step_seconds": 0.05}
    first = study.start(all=slow, names=["a"], lease=1)
    study.wait_until(lambda: len(study.steps("a")) > 3)
    # Parent, server and worker, as a machine that does not answer.
    os.killpg(first.pid, signal.SIGSTOP)
    stopped = len(study.steps("a"))
    second = study.start(all=slow, names=["a"], lease=1)
    study.wait_until(lambda: len(study.steps("a")) > stopped)
    os.killpg(first.pid, signal.SIGCONT)
    code, stderr = study.finish(first)
    assert code == 0 and "by another process" in stderr
    (line,) = re.findall(r"^STOP    fake/00-a s1 .*$", stderr, re.M)
    assert f"process {second.pid}" in line
    assert study.finish(second)[0] == 0
    assert study.steps("a") == list(range(60))


def test_a_worker_that_does_not_wait_ends_once_the_others_are_seen_alive(study):
    first = study.start(all=SLOW, names=["a"], lease=2)
    study.wait_until(lambda: len(study.steps("a")) > 3)
    code, stderr = study.make(all=SLOW, names=["a"], lease=2, wait=False)
    assert code == 0 and study.status("a").state is State.RUNNING, stderr
    os.kill(first.pid, signal.SIGINT)
    assert study.finish(first)[0] == 130


def test_a_worker_that_does_not_wait_trains_one_run_after_the_other(study):
    assert study.make(wait=False)[0] == 0
    assert [study.status(name).state for name in "abc"] == [State.SUCCESS] * 3


def test_a_stop_of_the_study_reaches_every_make_and_no_later_one(study):
    makes = [study.start(all=SLOW), study.start(all=SLOW)]
    study.wait_until(lambda: len(study.steps("a")) > 3 and len(study.steps("b")) > 3)
    (study.folder / "results/fake/stop").write_text("")
    assert [study.finish(make)[0] for make in makes] == [130, 130]
    assert [study.status(name).state for name in "ab"] == [State.INTERRUPTED] * 2
    assert study.make(all={**SLOW, "step_seconds": 0})[0] == 0


@pytest.mark.parametrize("status", ['{"state": "SUCC', "", None])
def test_a_run_with_a_damaged_status_is_refused_untouched(study, status):
    finished = study.path("b")
    finished.mkdir(parents=True)
    (finished / "summary.json").write_text("{}")
    if status is not None:
        (finished / "status.json").write_text(status)
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    code, stderr = study.make()
    assert code == 2
    assert "[run.damaged]" in stderr and "make rerun RUNS=b" in stderr
    assert f"{finished}: " in stderr
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before
    assert study.journal() == []


@pytest.mark.parametrize("state", ["SUCCESS", "RUNNING"])
def test_a_directory_that_holds_another_run_is_refused_untouched(study, state):
    foreign = study.path("b")
    foreign.mkdir(parents=True)
    (foreign / "resolved_config.yaml").write_text('{"identity": {"name": "z"}}')
    write_status(RunDir(foreign), RunStatus(State(state)))
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    code, stderr = study.make()
    assert code == 2
    assert "[run.foreign-directory]" in stderr and "OUTPUT_DIR" in stderr
    assert f"{foreign}: " in stderr and "fake/01-b s1" in stderr
    assert {path.name: path.read_bytes() for path in foreign.iterdir()} == before
    assert study.journal() == []


def test_runs_as_many_at_a_time_as_jobs_says(study):
    everyone = {"all": {"steps": 4, "step_seconds": 0.2}}
    code, _ = study.make(**everyone, jobs=2, names=["a", "b", "c", "d"])
    assert code == 0
    began = [(study.path(n) / "behaviour.json").stat().st_mtime for n in "abcd"]
    ended = [(study.path(n) / "status.json").stat().st_mtime for n in "abcd"]
    most = max(sum(b <= t < e for b, e in zip(began, ended)) for t in began)
    assert most == 2
    assert began == sorted(began)


def test_stale_results_stop_make_until_the_user_says(study):
    study.make()
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


def test_a_command_is_started_after_each_run_of_its_state(study):
    save = "import json, sys; open(sys.argv[1], 'a').write(json.load(sys.stdin)['run'] + ' ')"
    done, failed = study.folder / "done", study.folder / "failed"
    commands = {
        state: [sys.executable, "-c", save, str(file)]
        for state, file in (("SUCCESS", done), ("FAILED", failed))
    }
    study.make(runs={"b": {"fail_at": 1, "fails_by": "raising"}}, commands=commands)
    assert sorted(done.read_text().split()) == ["fake/00-a", "fake/02-c", "s1", "s1"]
    assert failed.read_text().split() == ["fake/01-b", "s1"]


def test_facts_that_runs_share_are_logged_once(study):
    _, stderr = study.make()
    assert stderr.count("a cpu") == stderr.count("fp32") == 1
    assert all(stderr.count(f"folder {name}-s1-{name}") == 1 for name in "abc")


def test_changes_of_several_runs_are_one_line():
    changes = {"a s1": ["torch", "m.py"], "b s1": ["m.py"], "b s2": ["m.py", "n.py", "o.py"]}
    text = stale_text(changes)
    assert text.startswith("a s1 and 2 more runs: ") and "\n" not in text
    assert "m.py, torch (1 run), n.py (1 run) and 1 more" in text
    assert stale_text({"a s1": ["m.py"]}) == "a s1: changed since: m.py"


def test_a_stale_failure_is_started_anew_without_asking(study):
    runs = {"a": {"fail_at": 1, "fails_by": "raising"}}
    study.make(runs=runs, names=["a"])
    (study.folder / "healed").touch()
    assert study.make(runs=runs, names=["a"], changed=["gpt2/model.py"])[0] == 0
    assert study.steps("a") == [0, 1, 2]
    assert len(list(study.path("a").parent.glob("a-s1-a.old-*"))) == 1


def test_preflight_lists_everything_and_creates_nothing(study):
    code, stderr = study.make(device=False, bytes=1 << 60)
    assert code == 3
    assert "[gpu.missing]" in stderr and "[disk.no-space]" in stderr
    assert list(study.folder.iterdir()) == []


def test_a_file_in_place_of_the_results_is_refused(study):
    (study.folder / "results").write_text("")
    code, stderr = study.make()
    assert code == 3
    assert "[output.not-a-folder]" in stderr and str(study.folder / "results") in stderr


def test_output_of_a_run_goes_to_its_log(study):
    code, stderr = study.make()
    assert code == 0 and "hello" not in stderr
    assert (study.path("a") / "logs.txt").read_text() == "hello from a-s1-a\n"


def test_a_terminal_gets_a_live_table_and_ends_clean(study):
    script = Path(__file__).with_name("fake_make.py")
    options = json.dumps({"all": {"step_seconds": 0.3}})
    terminal = Terminal([str(script), str(study.folder), options], COLUMNS="100")
    text = terminal.rest()
    assert terminal.finish() == 0
    assert "RUNS" in text and "elapsed 00:0" in text
    assert text.count("fake/00-a s1   val loss 3.0") == 1
    # The cursor is shown again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
