"""Fork server for commands of the tree: each is a fresh process with the libraries loaded.

Importing torch takes longer than most commands; the server imports it once for all tests of a worker.
It imports nothing of the tree, so a command loads the same modules of it as in an interpreter of its
own. Each line of standard input is a request; the answer is the exit code.
"""

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
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
)
TIMEOUT_SECONDS = 120


class CommandServer:
    """Client of a server process, which starts with the first command."""

    def __init__(self) -> None:
        self._started: subprocess.Popen[str] | None = None

    @property
    def _process(self) -> subprocess.Popen[str]:
        if self._started is None:
            self._started = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._started

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], scratch: Path
    ) -> tuple[int, str, str]:
        """Run a script with its arguments; return exit code, stdout and stderr."""
        out, err = scratch / "stdout", scratch / "stderr"
        request = {
            "command": list(command),
            "environment": dict(environment),
            "cwd": os.getcwd(),
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
    # As the interpreter does for a script.
    sys.path[0] = str(Path(sys.argv[0]).parent)
    return sys.argv[0]


if __name__ == "__main__":
    for library in LIBRARIES:
        import_module(library)
    runpy.run_path(become(serve()), run_name="__main__")
