"""Local executor: results of calls, states of jobs, interrupts during start, and preloading."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.errors import ConfigError, PreflightError, Problem, RunError
from lib.project import ROOT
from lib.runner.local import LocalExecutor, _Worker
from lib.runner.worker import ParentConnection
from lib.runs.run_dir import RunStatus, State


@pytest.fixture
def executor() -> LocalExecutor:
    return LocalExecutor((), {})


def refuse(code: str) -> None:
    raise ConfigError(Problem("refused", code=code))


def count_to(number: int) -> Iterator[int]:
    yield from range(number)


def sleep_until_stopped(parent: ParentConnection) -> None:
    parent.send({"kind": "line", "tag": "DONE", "text": "started"})
    while not parent.stop_requested():
        time.sleep(0.01)


def test_a_call_returns_the_value_or_raises_the_error(executor: LocalExecutor) -> None:
    assert executor.call(abs, -2) == 2
    jobs = [executor.submit_call(count_to, number) for number in (3, 2)]
    assert sorted(executor.results(jobs)) == [0, 0, 1, 1, 2]
    with pytest.raises(ConfigError) as caught:
        executor.call(refuse, "demo.code")
    assert caught.value.codes == ["demo.code"]
    for code in (3, 0):
        with pytest.raises(RunError) as died:
            executor.call(os._exit, code)
        assert died.value.codes == ["worker.died"] and f"exit code {code}" in str(died.value)
    with pytest.raises(RunError) as late:
        executor.result(executor.submit_call(time.sleep, 60), 0.1)
    assert late.value.codes == ["worker.no-answer"]


def fail_to_load(error: type[ImportError] | type[MemoryError]) -> None:
    raise error("libtorch.so: cannot map")


@pytest.mark.parametrize(
    ("error", "code"), [(ImportError, "env.broken-package"), (MemoryError, "machine.no-memory")]
)
def test_a_worker_without_memory_or_package_is_one_problem(
    executor: LocalExecutor, error: type[ImportError] | type[MemoryError], code: str
) -> None:
    with pytest.raises(PreflightError) as caught:
        executor.call(fail_to_load, error)
    (problem,) = caught.value.problems
    assert problem.code == code and "libtorch.so" in problem.what


@pytest.mark.parametrize("immediately", [False, True])
def test_a_job_is_submitted_cancelled_and_waited_for(
    executor: LocalExecutor, immediately: bool
) -> None:
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


def run_script(command: list[str], *folders: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders)))},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )


def test_ctrl_c_while_a_worker_starts_is_no_error_of_the_server() -> None:
    made = run_script(["-c", INTERRUPTED])
    assert made.returncode == 130
    assert made.stderr == "EXIT    code 130\n"


def test_a_worker_that_has_just_died_is_no_error() -> None:
    """The server knows that the worker has exited, but the parent does not yet."""
    process: Callable = SimpleNamespace(pid=2**22 + 1, exitcode=None)
    _Worker(0, process, None).signal(signal.SIGKILL)


LOADING = """
import gc, os, sys
from lib import console
from lib.runner.local import LocalExecutor

def show():
    executor = LocalExecutor(("heavy",), {})
    print(executor.call(eval, "'heavy' in __import__('sys').modules"))
    print(executor.call(gc.isenabled), executor.call(os.getenv, "KABLATE_PRELOAD"))
    return 0

if __name__ == "__main__":
    console.run_main(show)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", (0, "True\nTrue None\n")),
        ("raise MemoryError", (0, "False\nTrue None\n")),
        ("import os; os.kill(os.getpid(), 9)", (1, "")),
    ],
)
def test_workers_start_with_modules_loaded_and_a_server_that_dies_is_no_traceback(
    tmp_path: Path, code: str, expected: tuple[int, str]
) -> None:
    """A process of its own, since the server lives as long as the process that starts it."""
    (tmp_path / "heavy.py").write_text(code)
    script = tmp_path / "show.py"
    script.write_text(LOADING)
    done = run_script([str(script)], tmp_path)
    assert (done.returncode, done.stdout) == expected and "Traceback" not in done.stderr
    assert ("[worker.server-died]" in done.stderr) == bool(done.returncode)
