"""Local executor: results of calls, states of jobs, interrupts during start, and preloading."""

import os
import re
import time
from collections.abc import Iterator

import pytest

from lib.errors import ConfigError, KablateError, Problem, RunError
from lib.project import ROOT
from lib.runner.local import LocalExecutor
from lib.runner.worker import ParentConnection
from lib.runs.run_dir import RunStatus, State


@pytest.fixture
def executor() -> LocalExecutor:
    return LocalExecutor((), {})


def count_to(number: int) -> Iterator[int]:
    yield from range(number)


def test_a_call_returns_the_value_and_a_generator_all_of_them(executor):
    assert executor.call(abs, -2) == 2
    jobs = [executor.submit_call(count_to, number) for number in (3, 2)]
    assert sorted(executor.results(jobs)) == [0, 0, 1, 1, 2]
    with pytest.raises(RunError) as late:
        executor.result(executor.submit_call(time.sleep, 60), 0.1)
    assert late.value.codes == ["worker.no-answer"]


def refuse(what: str) -> None:
    raise ConfigError(Problem(what, code="demo.code"))


def fail_to_load(error: type[ImportError] | type[MemoryError]) -> None:
    raise error("libtorch.so: cannot map")


@pytest.mark.parametrize(
    ("function", "argument", "code", "what"),
    [
        (refuse, "refused", "demo.code", "refused"),
        (fail_to_load, ImportError, "env.broken-package", "libtorch.so"),
        (fail_to_load, MemoryError, "machine.no-memory", "libtorch.so"),
        (os._exit, 3, "worker.died", "exit code 3"),
        (os._exit, 0, "worker.died", "exit code 0"),
    ],
)
def test_a_call_that_fails_is_one_problem(executor, function, argument, code, what):
    with pytest.raises(KablateError) as caught:
        executor.call(function, argument)
    (problem,) = caught.value.problems
    assert problem.code == code and what in problem.what


def sleep_until_stopped(parent: ParentConnection) -> None:
    parent.send({"kind": "line", "tag": "DONE", "text": "started"})
    while not parent.stop_requested():
        time.sleep(0.01)


@pytest.mark.parametrize("immediately", [False, True])
def test_a_job_is_submitted_cancelled_and_waited_for(executor, immediately):
    job = executor.submit(sleep_until_stopped, world_size=2)
    assert len(job.running) == 2
    # Both have started once both have sent an event.
    while len(job.events) < 2:
        executor.collect(None)
    job.cancel(immediately=immediately)
    while job.running:
        executor.collect(None)
    cause = job.failure_cause(RunStatus(State.SUCCESS))
    assert ("SIGKILL" in cause) == immediately
    # The events are still there, and the end comes last.
    events = list(executor.events(0.0))
    assert [event and event["text"] for _, event in events] == ["started", "started", None]
    assert all(each is job for each, _ in events)


# Ctrl-C after the server has forked the worker and before the parent has sent the job.
INTERRUPTED = """
import os, signal
from multiprocessing import forkserver
from lib import console
from lib.runner.local import LocalExecutor

connect = forkserver.connect_to_new_process

def interrupted(descriptors):
    connection = connect(descriptors)
    os.killpg(0, signal.SIGINT)
    return connection

forkserver.connect_to_new_process = interrupted
console.run_main(lambda: LocalExecutor(("lib.runner.runner",), {}).call(os.getpid))
"""
# Of the modules, one is loaded before another one fails.
LOADING = """
import gc, os, sys
from lib import console
from lib.runner.local import LocalExecutor

def show():
    executor = LocalExecutor(("heavy", "failing"), {})
    print(executor.call(eval, "'heavy' in __import__('sys').modules"))
    print(executor.call(gc.isenabled), executor.call(os.getenv, "KABLATE_PRELOAD"))
    return 0

if __name__ == "__main__":
    console.run_main(show)
"""


@pytest.mark.parametrize(
    ("script", "failing", "code", "printed", "said"),
    [
        (INTERRUPTED, "", 130, "", "EXIT    code 130\n"),
        (LOADING, "raise MemoryError", 0, "True\nTrue None\n", ""),
        (
            LOADING,
            "import os; os.kill(os.getpid(), 9)",
            1,
            "",
            r"ERROR .*\[worker.server-died\]\n.* make JOBS=1\nEXIT    code 1\n",
        ),
    ],
    ids=["Ctrl-C while a worker starts", "a module that cannot be loaded", "a server that dies"],
)
def test_workers_start_with_modules_loaded_and_what_prevents_it_is_no_traceback(
    tmp_path, server, script, failing, code, printed, said
):
    """A process of its own, since the fork server lives as long as the process that starts it."""
    (tmp_path / "heavy.py").write_text("")
    (tmp_path / "failing.py").write_text(failing)
    (tmp_path / "script.py").write_text(script)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, tmp_path)))}
    done = server.run([str(tmp_path / "script.py")], variables, tmp_path)
    assert done[:2] == (code, printed) and re.fullmatch(said, done[2]), done
