"""Sidecar processes of a training run: mirrors to trackers and the telemetry sampler.

Sidecars are isolated from the training process: it does not share errors, threads or random
generators with them.
"""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
_NICENESS = 10


@dataclass(frozen=True)
class SidecarCommand:
    """Command of one sidecar process."""

    # Name in messages.
    name: str
    # A module of this tree and its arguments.
    arguments: Sequence[str]
    # File for stdout and stderr.
    log: Path
    # Consequence of losing this process, and the command that helps.
    consequence: str


class Sidecars:
    """All sidecars of a run, initially none. Leaving the context ends them.

    No method raises: a lost sidecar is reported once to ``warn``, in one line.
    """

    def __init__(self, warn: Callable[[str], None] = lambda text: None) -> None:
        self._warn = warn
        self._running: list[_Sidecar] = []

    def start(self, job: SidecarCommand) -> None:
        """Start a process for ``job``."""
        try:
            self._running.append(_Sidecar(job))
        except OSError as error:
            self._warn(f"{job.name} cannot be started: {error}; {job.consequence}")

    def check(self) -> None:
        """Report the sidecars that have died since the last check."""
        for companion in list(self._running):
            if companion.process.poll() is not None:
                self._running.remove(companion)
                self._warn(companion.epitaph())

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
        for companion in self._running:
            companion.end()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for companion in self._running:
            if not companion.finishes(deadline):
                self._warn(companion.epitaph())
        self._running.clear()


def become_sidecar() -> None:
    """Lower the priority of this process, and remove secrets from its output."""
    os.nice(_NICENESS)
    # Libraries print the server address, and WANDB_BASE_URL may contain a password.
    sys.stdout = RedactingStream(sys.stdout.buffer, line_buffering=True)
    sys.stderr = RedactingStream(sys.stderr.buffer, line_buffering=True)


def should_exit(seconds: float) -> bool:
    """Return whether this sidecar process receives the end of the run within ``seconds``."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


class _Sidecar:
    """One running sidecar process."""

    def __init__(self, job: SidecarCommand) -> None:
        """Start the process.

        Raises OSError if the process cannot be started.
        """
        self._job = job
        self._overdue = False
        # A batch system signals every process of a job; a sidecar ends after the run.
        with signals_blocked(), open(job.log, "ab", opener=no_follow) as log:
            self.process = subprocess.Popen(
                python_module_command(*job.arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C at the terminal must reach only the trainer.
                start_new_session=True,
            )

    def end(self) -> None:
        """Signal the end of the run to the process."""
        assert self.process.stdin is not None
        try:
            # A newline is needed because a data loader process may keep the pipe open longer.
            self.process.stdin.write(b"\n")
            self.process.stdin.close()
        except BrokenPipeError:
            # The process has just died; its exit code is reported later.
            return

    def finishes(self, deadline: float) -> bool:
        """Wait for a successful exit; kill the process at ``deadline``."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            self._overdue = True
            self.process.kill()
            self.process.wait()
            return False

    def epitaph(self) -> str:
        """Return the cause of the loss, its consequence and the command that helps."""
        return f"{self._job.name} is lost: {self._cause()}; {self._job.consequence}"

    def _cause(self) -> str:
        code = self.process.returncode
        if self._overdue or code == -signal.SIGALRM:
            return f"still running {FINISH_TIMEOUT_SECONDS} s after the end of the run"
        path = self._job.log
        log = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return (code > 0 and _last_error(log)) or describe_death(code, "its process")


def _last_error(log: str) -> str:
    """Return the first line of the message after the last traceback; "" if there is none."""
    traceback = log.rpartition("Traceback (most recent call last):\n")
    lines = traceback[2].splitlines() if traceback[1] else []
    message = next((line for line in lines if line.strip() and not line.startswith(" ")), "")
    return message[:_MAX_MESSAGE_CHARACTERS]


# Sidecar processes that mirror a run to its trackers.


def mirror_sidecar(run: RunDir, name: str) -> SidecarCommand:
    """Return the sidecar process for the tracker ``name``; missed records can be sent later."""
    arguments = ["lib.tracking.mirror", str(run.path), name]
    command = shlex.join(python_module_command(*arguments))
    consequence = (
        f"training continues, {run.metrics} is complete; to send the rest, type: "
        f"{command} < /dev/null"
    )
    return SidecarCommand(name, arguments, run.tracker_log(name), consequence)


# Sidecar process that samples the machine during a run.


def telemetry_sidecar(run: RunDir, seconds: int) -> SidecarCommand:
    """Return the sidecar process that samples every ``seconds``."""
    return SidecarCommand(
        name="telemetry",
        arguments=["lib.tracking.telemetry", str(run.path), str(seconds)],
        log=run.logs,
        consequence="training continues without samples of GPUs and memory",
    )
