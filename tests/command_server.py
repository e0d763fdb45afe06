"""Fork server for commands of the tree: each is a fresh process with the libraries loaded.

Importing torch takes longer than most commands; the server imports it once for the workers of all
tests, and ends with its last client. Of the tree it imports only the modules that plan and launch,
which import no torch; a command of another tree starts without them. The fork server of
multiprocessing, which a command that trains starts, is a fork as well. The speed of the machine,
which plans predict times with, is measured once. Each line of a client is a request: a command,
answered with its process id, or the id of a process, answered with its exit code or null.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import resource
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.util import spawnv_passfds
from pathlib import Path
from typing import Any, TextIO

LIBRARIES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "safetensors.torch",
    "rich.console",
    "rich.live",
    "rich.table",
    "kconfiglib",
    "yaml",
    "matplotlib.figure",
    "jinja2",
)
TIMEOUT_SECONDS = 120
ROOT = Path(__file__).resolve().parents[1]
CLIENT = Path(__file__).with_name("command_client.py")
# Loaded by every command that trains, so that the sources recorded by a run remain the same.
MODULES = ("gpt2.study.view", "gpt2.running.launch")
# Packages of a tree, and the modules that its scripts import from their own folder.
TREE = ("gpt2", "lib", "tests", "_start", "fake_train")


def words_of(command: str) -> list[str]:
    """Return the words after the interpreter of a script of the tree, or of a command of kablate."""
    return [str(ROOT / command)] if "/" in command else ["-m", "lib.kablate", command]


class Command:
    """A command that runs in a process of the server."""

    def __init__(self, ask: Callable[[object], Any], request: Mapping[str, Any]) -> None:
        self._ask, self._request = ask, request
        for stream in ("out", "err"):
            Path(request[stream]).touch()
        self.pid: int = ask(request)
        self._code: int | None = None

    @property
    def stdout(self) -> str:
        """Return the output so far."""
        return Path(self._request["out"]).read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """Return the messages so far."""
        return Path(self._request["err"]).read_text()

    def poll(self) -> int | None:
        """Return the exit code if the command has ended."""
        if self._code is None:
            self._code = self._ask(self.pid)
        return self._code

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> int:
        """Wait for the end; return the exit code. Raise TimeoutError."""
        if self._code is None:
            # Until the server has waited for the process, its id is not used again.
            ended = os.pidfd_open(self.pid)
            try:
                if not wait([ended], timeout):
                    raise TimeoutError(f"{self._request['command']} runs after {timeout} s")
            finally:
                os.close(ended)
            self.poll()
        assert self._code is not None
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def processes(self) -> list[int]:
        """Return the processes of the session, without zombies."""
        alive = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(session) == self.pid and state != "Z":
                alive.append(int(entry.name))
        return alive

    def kill(self) -> None:
        """Kill every process of the session, and wait until they hold no lock any more."""
        while everyone := self.processes():
            for process in everyone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)
        self.wait()


class CommandServer:
    """Client of the server of a folder, which starts with the first command, under ``library``."""

    def __init__(self, place: Path, library: Path | None = None) -> None:
        self._place, self._library = place, library
        self._connected: TextIO | None = None
        self._numbers = count()

    @property
    def _stream(self) -> TextIO:
        if self._connected is None:
            with socket.socket(socket.AF_UNIX) as client, locked(self._place):
                address = str(self._place / "socket")
                try:
                    client.connect(address)
                except (FileNotFoundError, ConnectionRefusedError):
                    self._start_server(address)
                    client.connect(address)
                self._connected = client.makefile("rw")
        return self._connected

    def _start_server(self, address: str) -> None:
        """Start the server with a socket that accepts connections during the imports."""
        Path(address).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            self._started = subprocess.Popen(
                [sys.executable, __file__, str(self._place), str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                # A command has the variables of its request instead.
                env={**os.environ, **({"LD_PRELOAD": str(self._library)} if self._library else {})},
            )

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        scratch: Path,
        cwd: Path | None = None,
        seconds: int = TIMEOUT_SECONDS,
        python: Path | None = None,
    ) -> Command:
        """Start a script with its arguments in a session of its own, which ends after ``seconds``.

        ``python`` is the interpreter of the processes that it starts, instead of this one.
        """
        number = next(self._numbers)
        request = {
            "command": list(command),
            "environment": dict(environment),
            "cwd": str(cwd or Path.cwd()),
            "seconds": seconds,
            "python": str(python or sys.executable),
            "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
            "in": os.devnull,
            "out": str(scratch / f"stdout-{number}"),
            "err": str(scratch / f"stderr-{number}"),
        }
        return Command(self._ask, request)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        scratch: Path,
        cwd: Path | None = None,
    ) -> tuple[int, str, str]:
        """Run a script with its arguments; return exit code, stdout and stderr."""
        done = self.start(command, environment, scratch, cwd)
        return done.wait(), done.stdout, done.stderr

    def interpreter(self) -> Path:
        """Return a program that runs scripts of this tree in the server, all else as Python does.

        Modules of gpt2 after -P -m, as the product starts them, scripts after -u, as torchrun starts
        them, and code after -u -c, as xdist starts its workers, run in the server too.
        """
        program = self._place / "python"
        assert self._stream
        with locked(self._place):
            if not program.exists():
                python = shlex.quote(sys.executable)
                client = shlex.join(["-ISB", str(CLIENT), str(self._place)])
                scripts, gpt2 = (shlex.quote(str(ROOT / name)) for name in ("scripts", "gpt2"))
                program.write_text(
                    f'#!/bin/sh\ncase "$1" in\nscripts/*|{scripts}/*) exec {python} {client} "$@" ;;\n'
                    f'-m) case "$2" in lib.kablate) exec {python} {client} "$@" ;; esac ;;\n'
                    f'-u|-P) case "$2 $3" in {gpt2}/*|-c\\ import*|-m\\ gpt2.*) shift;'
                    f' exec {python} {client} "$@" ;; esac ;;\n'
                    f'esac\nexec {python} "$@"\n'
                )
                program.chmod(0o755)
        return program

    def _ask(self, request: object) -> Any:
        print(json.dumps(request), file=self._stream, flush=True)
        return json.loads(self._stream.readline())

    def close(self) -> None:
        """Disconnect."""
        if self._connected is not None:
            self._connected.close()


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """Exclude other processes that connect to the server of a folder, or end it."""
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def serve(place: Path, listener: socket.socket) -> dict[str, Any]:
    """Answer requests; return only in a command's process, with its request."""
    clients: dict[socket.socket, TextIO] = {}
    while True:
        for ready in wait([listener, *clients]):
            if ready is listener:
                connection = listener.accept()[0]
                clients[connection] = connection.makefile("rw")
            elif line := clients[ready].readline():
                request: dict[str, Any] | int = json.loads(line)
                if isinstance(request, int):
                    ended, status = os.waitpid(request, os.WNOHANG)
                    answer = os.waitstatus_to_exitcode(status) if ended else None
                elif not (answer := os.fork()):
                    for opened in (listener, *clients, *clients.values()):
                        opened.close()
                    return request
                print(json.dumps(answer), file=clients[ready], flush=True)
            else:
                clients.pop(ready).close()
                ready.close()
        if not clients:
            with locked(place):
                if not wait([listener], timeout=0):
                    os._exit(0)


def become(request: Mapping[str, Any]) -> str:
    """Take over a request's arguments, variables, limit and streams; return the script, -c or -m."""
    # A worker of the tests is interrupted with the process that started it.
    if request["command"][0] != "-c":
        os.setsid()
    for path, descriptor in ((request["in"], 0), (request["out"], 1), (request["err"], 2)):
        # A file of the client has been begun by other processes.
        begin = 0 if path.startswith("/proc/") else os.O_TRUNC
        writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND | begin
        flags = os.O_RDONLY if descriptor == 0 else writing
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    # Whether a stream can seek is decided when it is opened.
    if request["out"].startswith("/proc/"):
        sys.stdin = sys.__stdin__ = _stream_of(0, sys.stdin)
        sys.stdout = sys.__stdout__ = _stream_of(1, sys.stdout)
        sys.stderr = sys.__stderr__ = _stream_of(2, sys.stderr)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_FSIZE, request["file_size"])
    signal.alarm(request["seconds"])
    sys.argv, sys.executable = request["command"], request["python"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[0:1] = paths
    if sys.argv[0] == "-c":
        forget_tree()
        return sys.argv[0]
    multiprocessing.util.spawnv_passfds = partial(fork_interpreter, tuple(sys.path))
    if sys.argv[0] == "-m":
        # As the interpreter does, without -P.
        sys.path.insert(0, os.getcwd())
        if paths and Path(paths[0]) != ROOT:
            forget_tree()
        return sys.argv[0]
    script = Path(sys.argv[0])
    # As the interpreter does for a script.
    sys.path.insert(0, str(script.parent))
    if not script.is_relative_to(ROOT):
        forget_tree()
    return sys.argv[0]


def _stream_of(descriptor: int, before: TextIO) -> TextIO:
    """Open a stream on a descriptor, like the stream that had it before."""
    mode, buffering = ("w" if descriptor else "r"), (1 if before.line_buffering else -1)
    named = {"encoding": before.encoding, "errors": before.errors, "closefd": False}
    return open(descriptor, mode, buffering, **named)


def forget_tree() -> None:
    """Remove the modules of a tree, so that they are imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in TREE]:
        del sys.modules[name]


def measure_speeds() -> None:
    """Measure the speed of one and of two threads, so that no command does that again."""
    for threads in (1, 2):
        sys.modules["lib.env.speed"]._measure(threads)


def fork_interpreter(
    search: Sequence[str], path: str, arguments: Sequence[str], descriptors: Sequence[int]
) -> int:
    """Fork the fork server of multiprocessing instead of starting an interpreter for it.

    Like ``multiprocessing.util.spawnv_passfds``, return the process id. The child loses everything
    that a new interpreter would not have: modules of the tree, signal handlers, other descriptors,
    streams with a buffer.
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
    forget_tree()
    multiprocessing.util.spawnv_passfds = spawnv_passfds
    # Held by the caller.
    multiprocessing.forkserver._forkserver._lock._at_fork_reinit()
    sys.argv, sys.path[:] = ["-c"], search
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def leave() -> None:
    """Exit with the script's code before the libraries are torn down, which takes long."""
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    code: object = 1
    # Registered first, so it runs after the exit functions of libraries and script.
    atexit.register(leave)
    sys.path[0] = str(ROOT)
    # No test survives a crash of the machine; a library that fails at writes counts the calls.
    if "LD_PRELOAD" not in os.environ:
        os.fsync = lambda descriptor: None
    gc.disable()
    for module in LIBRARIES + MODULES:
        import_module(module)
    measure_speeds()
    # A command would otherwise traverse the libraries' objects in every collection.
    gc.freeze()
    gc.enable()
    place, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    try:
        script = become(serve(place, listener))
        if script == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        elif script == "-m":
            module, sys.argv = sys.argv[1], sys.argv[1:]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
        code = None
    except SystemExit as end:
        code = end.code
        raise
