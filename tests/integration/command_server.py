"""Fork server for commands of the tree: each is a fresh process with the libraries loaded.

Importing torch takes longer than most commands; the server imports it once for all tests of a worker.
It imports nothing of the tree, so a command loads the same modules of it as in an interpreter of its
own, of any tree. The fork server of multiprocessing, which a command that trains starts, is a fork as
well. Each line of standard input is a request; the answer is the exit code.
"""

import gc
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import resource
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.util import spawnv_passfds
from pathlib import Path
from typing import Any

LIBRARIES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.attention.flex_attention",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "safetensors.torch",
    "rich.console",
    "rich.live",
    "rich.table",
    "kconfiglib",
    "yaml",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "matplotlib.ticker",
)
TIMEOUT_SECONDS = 120
# Packages of a tree, and the modules that its scripts import from their own folder.
TREE = ("gpt2", "lib", "_start")


class CommandServer:
    """Client of a server process, which starts with the first command."""

    def __init__(self) -> None:
        self._started: subprocess.Popen[str] | None = None

    @property
    def _process(self) -> subprocess.Popen[str]:
        if self._started is None:
            self._started = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._started

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        scratch: Path,
        cwd: Path | None = None,
    ) -> tuple[int, str, str]:
        """Run a script with its arguments; return exit code, stdout and stderr."""
        out, err = scratch / "stdout", scratch / "stderr"
        request = {
            "command": list(command),
            "environment": dict(environment),
            "cwd": str(cwd or Path.cwd()),
            "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
            "out": str(out),
            "err": str(err),
        }
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin)
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, out.read_text(), err.read_text()

    def close(self) -> None:
        """End the server."""
        if self._started is not None:
            self._started.communicate(timeout=10)


def serve() -> dict[str, Any]:
    """Answer requests; return only in a command's process, with its request."""
    answers = os.fdopen(os.dup(1), "w")
    for line in iter(sys.stdin.readline, ""):
        request: dict[str, Any] = json.loads(line)
        process = os.fork()
        if process == 0:
            answers.close()
            return request
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    os._exit(0)


def become(request: Mapping[str, Any]) -> str:
    """Take over a request's arguments, variables, limit and streams; return the script."""
    for path, descriptor in ((os.devnull, 0), (request["out"], 1), (request["err"], 2)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_FSIZE, request["file_size"])
    signal.alarm(TIMEOUT_SECONDS)
    sys.argv = request["command"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[0:1] = paths
    multiprocessing.util.spawnv_passfds = partial(fork_interpreter, tuple(sys.path))
    # As the interpreter does for a script.
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    return sys.argv[0]


def fork_interpreter(
    search: Sequence[str], path: str, arguments: Sequence[str], descriptors: Sequence[int]
) -> int:
    """Fork the fork server of multiprocessing instead of starting an interpreter for it.

    Like ``multiprocessing.util.spawnv_passfds``, return the process id. The child loses everything
    that a new interpreter would not have: modules of the tree, signal handlers, other descriptors.
    """
    code = arguments[-1]
    if not code.startswith("from multiprocessing.forkserver import main;"):
        return spawnv_passfds(path, arguments, descriptors)
    if child := os.fork():
        return child
    low = 3
    for descriptor in sorted({*map(int, descriptors), os.sysconf("SC_OPEN_MAX")}):
        os.closerange(low, descriptor)
        low = descriptor + 1
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for name in [name for name in sys.modules if name.partition(".")[0] in TREE]:
        del sys.modules[name]
    multiprocessing.util.spawnv_passfds = spawnv_passfds
    # Held by the caller.
    multiprocessing.forkserver._forkserver._lock._at_fork_reinit()
    sys.argv, sys.path[:] = ["-c"], search
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for library in LIBRARIES:
        import_module(library)
    # A command would otherwise traverse the libraries' objects at its exit, for more than a second.
    gc.freeze()
    runpy.run_path(become(serve()), run_name="__main__")
