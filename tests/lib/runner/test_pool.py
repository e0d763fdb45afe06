"""Worker pool: interrupts during start, workers that have died, and preloading."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

from lib.project import ROOT
from lib.runner.pool import WorkerPool

# Ctrl-C after the server has forked the worker and before the parent has sent the job.
INTERRUPTED = """
import os, signal
from multiprocessing import forkserver
from lib import cli
from lib.runner.pool import Pool

connect = forkserver.connect_to_new_process

def interrupted(descriptors):
    connection = connect(descriptors)
    os.killpg(0, signal.SIGINT)
    return connection

forkserver.connect_to_new_process = interrupted
cli.run(lambda: Pool(("lib.runner.runner",), {}).call("os:getpid"))
"""


def test_ctrl_c_while_a_worker_starts_is_no_error_of_the_server():
    made = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert made.returncode == 130
    assert made.stderr == "EXIT    code 130\n"


def test_a_worker_that_has_just_died_is_no_error():
    """The server knows that the worker has exited, but the parent does not yet."""
    gone = SimpleNamespace(process=SimpleNamespace(pid=2**22 + 1, exitcode=None))
    WorkerPool((), {}).signal(signal.SIGKILL, [gone])


PRELOADED = """
from lib import cli
from lib.runner.pool import Pool

def show():
    pool = Pool(("colorsys",), {})
    for question in (("builtins:eval", "'colorsys' in __import__('sys').modules"),
                     ("gc:isenabled",), ("gc:get_freeze_count",), ("os:getenv", "KABLATE_PRELOAD")):
        print(pool.call(*question))
    return 0

if __name__ == "__main__":
    cli.run(show)
"""


def test_workers_start_with_modules_loaded_and_out_of_the_collectors_way(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(PRELOADED)
    made = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded, collecting, frozen, variable = made.stdout.splitlines()
    assert (loaded, collecting, variable) == ("True", "True", "None")
    # More than the modules of a bare interpreter.
    assert int(frozen) > 1_000
