"""Sidecar processes of a training run, isolated from it: mirrors to trackers and the telemetry sampler."""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lib.env.snapshot import RedactingStream
from lib.files import no_follow
from lib.project import python_module_command
from lib.runner.signals import describe_death, signals_blocked
from lib.runs.run_dir import RunDir

# Time limit for a sidecar to store or send remaining records after the end of the run.
FINISH_TIMEOUT_SECONDS = 30
# Time after which a process is killed; it has hung where its own limit has no effect.
_PATIENCE_SECONDS = FINISH_TIMEOUT_SECONDS + 5
_MAX_MESSAGE_CHARACTERS = 200
# Training has priority.
NICENESS = 10


@dataclass(frozen=True)
class _Sidecar:
    name: str
    process: subprocess.Popen[bytes]
    # File of its output.
    log: Path
    # What its loss means, with the command that helps.
    consequence: str


class Sidecars:
    """All sidecars of a run, initially none. Leaving the context ends them.

    No method raises: a lost sidecar is reported once to ``warn``, in one line.
    """

    def __init__(self, warn: Callable[[str], None] = lambda text: None) -> None:
        self._warn = warn
        self._running: list[_Sidecar] = []

    def start_mirror(self, run: RunDir, tracker: str) -> None:
        """Start the mirror to ``tracker``; records that it has missed can be sent later."""
        arguments = ["lib.tracking.mirror", str(run.path), tracker]
        command = shlex.join(python_module_command(*arguments))
        consequence = (
            f"training continues, {run.metrics} is complete; to send the rest, type: "
            f"{command} < /dev/null"
        )
        self._start(tracker, arguments, run.tracker_log(tracker), consequence)

    def start_telemetry(self, run: RunDir, seconds: int) -> None:
        """Start the process that samples the machine every ``seconds``."""
        arguments = ["lib.tracking.telemetry", str(run.path), str(seconds)]
        consequence = "training continues without samples of GPUs and memory"
        self._start("telemetry", arguments, run.logs, consequence)

    def _start(self, name: str, arguments: Sequence[str], log: Path, consequence: str) -> None:
        try:
            # A batch system signals every process of a job; a sidecar ends after the run.
            with signals_blocked(), open(log, "ab", opener=no_follow) as stream:
                process = subprocess.Popen(
                    python_module_command(*arguments),
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=stream,
                    # Ctrl-C at the terminal must reach only the trainer.
                    start_new_session=True,
                )
        except OSError as error:
            self._warn(f"{name} cannot be started: {error}; {consequence}")
        else:
            self._running.append(_Sidecar(name, process, log, consequence))

    def check(self) -> None:
        """Report the sidecars that have died since the last check."""
        for sidecar in list(self._running):
            if sidecar.process.poll() is not None:
                self._running.remove(sidecar)
                self._report(sidecar)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Signal the end of the run to all sidecars and wait for them, with a time limit."""
        self.check()
        for sidecar in self._running:
            assert sidecar.process.stdin
            # One that has just died is reported below.
            with suppress(BrokenPipeError):
                # A newline is needed because a data loader process may keep the pipe open longer.
                sidecar.process.stdin.write(b"\n")
                sidecar.process.stdin.close()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for sidecar in self._running:
            try:
                if sidecar.process.wait(max(0.0, deadline - time.monotonic())):
                    self._report(sidecar)
            except subprocess.TimeoutExpired:
                sidecar.process.kill()
                sidecar.process.wait()
                self._report(sidecar, overdue=True)
        self._running.clear()

    def _report(self, sidecar: _Sidecar, *, overdue: bool = False) -> None:
        """Report the cause of a loss, its consequence and the command that helps."""
        code = sidecar.process.returncode
        if overdue or code == -signal.SIGALRM:
            cause = f"still running {FINISH_TIMEOUT_SECONDS} s after the end of the run"
        else:
            cause = (code > 0 and _last_error(sidecar.log)) or describe_death(code, "its process")
        self._warn(f"{sidecar.name} is lost: {cause}; {sidecar.consequence}")


def _last_error(log: Path) -> str:
    """Return the first line of the message after the last traceback of ``log``; "" without one."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    _, traceback, rest = text.rpartition("Traceback (most recent call last):\n")
    lines = rest.splitlines() if traceback else []
    message = next((line for line in lines if line.strip() and not line.startswith(" ")), "")
    return message[:_MAX_MESSAGE_CHARACTERS]


def become_sidecar() -> None:
    """Lower the priority of this process, and remove secrets from its output."""
    os.nice(NICENESS)
    # Libraries print the server address, and WANDB_BASE_URL may contain a password.
    sys.stdout = RedactingStream(sys.stdout.buffer, line_buffering=True)
    sys.stderr = RedactingStream(sys.stderr.buffer, line_buffering=True)


def should_exit(seconds: float) -> bool:
    """Return whether this sidecar process receives the end of the run within ``seconds``."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])
