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
            self._running.append(_Sidecar(name, arguments, log, consequence))
        except OSError as error:
            self._warn(f"{name} cannot be started: {error}; {consequence}")

    def check(self) -> None:
        """Report the sidecars that have died since the last check."""
        for sidecar in list(self._running):
            if sidecar.process.poll() is not None:
                self._running.remove(sidecar)
                self._warn(sidecar.epitaph())

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
            sidecar.end()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for sidecar in self._running:
            if not sidecar.finishes(deadline):
                self._warn(sidecar.epitaph())
        self._running.clear()


def become_sidecar() -> None:
    """Lower the priority of this process, and remove secrets from its output."""
    os.nice(NICENESS)
    # Libraries print the server address, and WANDB_BASE_URL may contain a password.
    sys.stdout = RedactingStream(sys.stdout.buffer, line_buffering=True)
    sys.stderr = RedactingStream(sys.stderr.buffer, line_buffering=True)


def should_exit(seconds: float) -> bool:
    """Return whether this sidecar process receives the end of the run within ``seconds``."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


class _Sidecar:
    """One running process, the file of its output, and the consequence of losing it."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, consequence: str) -> None:
        """Start a module of this tree. Raises OSError if it cannot be started."""
        self._name, self._log, self._consequence = name, log, consequence
        self._overdue = False
        # A batch system signals every process of a job; a sidecar ends after the run.
        with signals_blocked(), open(log, "ab", opener=no_follow) as stream:
            self.process = subprocess.Popen(
                python_module_command(*arguments),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                # Ctrl-C at the terminal must reach only the trainer.
                start_new_session=True,
            )

    def end(self) -> None:
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
        code = self.process.returncode
        if self._overdue or code == -signal.SIGALRM:
            cause = f"still running {FINISH_TIMEOUT_SECONDS} s after the end of the run"
        else:
            cause = (code > 0 and self._last_error()) or describe_death(code, "its process")
        return f"{self._name} is lost: {cause}; {self._consequence}"

    def _last_error(self) -> str:
        """Return the first line of the message after the last traceback of the log; "" without one."""
        if not self._log.exists():
            return ""
        log = self._log.read_text(encoding="utf-8", errors="replace")
        _, traceback, rest = log.rpartition("Traceback (most recent call last):\n")
        lines = rest.splitlines() if traceback else []
        message = next((line for line in lines if line.strip() and not line.startswith(" ")), "")
        return message[:_MAX_MESSAGE_CHARACTERS]
