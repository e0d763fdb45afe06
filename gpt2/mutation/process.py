"""Processes in which planted faults run: forked, limited, and with a folder of their own to write.

A process imports the product again, with the faulty module in place of the one on the disk.
"""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from lib.project import ROOT
from lib.units import GIB

_PRODUCT = ("gpt2", "lib")
_TRIAL = "gpt2.mutation.trial"
# Of a process: address space of data, size of a file.
_LIMITS = (
    (resource.RLIMIT_DATA, 12 * GIB),
    (resource.RLIMIT_FSIZE, GIB),
    (resource.RLIMIT_CORE, 0),
)
# Operations on files that are refused outside of the folder, with the index of the path.
_WRITES = {"os.remove": 0, "os.rename": 1, "os.mkdir": 0, "os.rmdir": 0, "os.truncate": 0}
_WRITES |= {"os.chmod": 0, "os.link": 1, "os.symlink": 1, "shutil.rmtree": 0}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_DEVICES = ("/dev/", "/proc/")
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Plant:
    """Code of one module, in place of the code on the disk; no path for none."""

    path: str = ""
    code: CodeType | None = None


@dataclass(frozen=True)
class TrialResult:
    """Result of a process: its value, or how it ended without one."""

    value: Any
    # "", crash, or time limit; "stopped" if the command was interrupted.
    end: str
    # Last line of the output.
    text: str
    cpu_seconds: float


def run_trial(
    function: str,
    arguments: Sequence[Any],
    plant: Plant,
    limit_seconds: float,
    stopped: Callable[[], bool],
) -> TrialResult:
    """Call a function of ``gpt2.mutation.trial`` in a new process with a fault.

    The process is killed after ``limit_seconds`` of CPU time, after four times as long, or if
    ``stopped()``.
    """
    before = _child_seconds()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="kablate-fault-") as folder:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve,
            args=(function, arguments, plant, Path(folder), limit_seconds, theirs),
        )
        process.start()
        theirs.close()
        deadline = time.monotonic() + 4 * limit_seconds
        value, end = None, ""
        while not connection.wait([ours, process.sentinel], _POLL_SECONDS):
            if stopped() or time.monotonic() > deadline:
                end = "stopped" if stopped() else "time limit"
                break
        if not end:
            try:
                value, end = ours.recv(), ""
            except EOFError:
                end = "crash"
        _end_group(process.pid)
        process.join()
        if end == "crash" and process.exitcode == -signal.SIGXCPU:
            end = "time limit"
        output = (Path(folder) / "output").read_text(encoding="utf-8", errors="replace")
        last = (output.strip().splitlines() or [f"exit code {process.exitcode}"])[-1]
    return TrialResult(value, end, last, _child_seconds() - before)


def _serve(
    function: str,
    arguments: Sequence[Any],
    plant: Plant,
    folder: Path,
    limit_seconds: float,
    pipe: Connection,
) -> None:
    """Call the function and send its result; the main function of a process."""
    # A separate process group, so that its children end with it.
    os.setsid()
    _redirect_output(folder / "output")
    for kind, limit in _LIMITS:
        resource.setrlimit(kind, (limit, limit))
    seconds = int(limit_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.addaudithook(_write_guard(folder.resolve()))
    for name in [name for name in sys.modules if name.partition(".")[0] in _PRODUCT]:
        del sys.modules[name]
    if plant.code is not None:
        sys.meta_path.insert(0, _PlantedFinder(plant.path, plant.code))
    value = vars(import_module(_TRIAL))[function](*arguments)
    pipe.send(value)


def _end_group(pid: int | None) -> None:
    """Kill a process and its children."""
    assert pid is not None
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It has ended, or has not created its group yet.
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _write_guard(folder: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that refuses to write outside of ``folder``: a fault may write anywhere."""
    allowed = (f"{folder}/", *_DEVICES)

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not flags & _WRITE_FLAGS:
                return
        elif event in _WRITES:
            path = arguments[_WRITES[event]]
        else:
            return
        if isinstance(path, int) or path is None:
            return
        text = os.path.realpath(os.fsdecode(path))
        if not f"{text}/".startswith(allowed):
            raise PermissionError(f"a write outside of the trial's folder: {text}")

    return guard


class _PlantedLoader(SourceFileLoader):
    """Loader of one module with other code than its file."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        """Return the faulty code."""
        return self._code


class _PlantedFinder:
    """Finder of the module with the fault."""

    def __init__(self, path: str, code: CodeType) -> None:
        self._name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._path = str(ROOT / path)
        self._code = code

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the faulty module; None for others."""
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        spec.loader = _PlantedLoader(name, self._path, self._code)
        return spec


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
