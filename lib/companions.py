"""Processes beside the trainer that follow its run: mirrors to trackers, the machine's sampler.

Nothing they do reaches the training process: not their errors, threads or random numbers.
"""

import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lib.modules import module_command
from lib.runner.pool import describe_death

# What a companion may take to keep or send the rest after the run's end.
FINISH_SECONDS = 30
# A process that has not ended so long after its own limit hangs where the limit does not reach.
_PATIENCE_SECONDS = FINISH_SECONDS + 5
_MOST_CHARACTERS = 200


@dataclass(frozen=True)
class Job:
    """What one companion is to do."""

    # How it is called when it is lost.
    name: str
    # A module of this tree, and its arguments.
    arguments: Sequence[str]
    # What it prints.
    log: Path
    # What its loss means, and what to type.
    consequence: str


class Companions:
    """All companions of a run as one; at first there is none. Leaving the context ends them.

    Nothing here raises: a loss is told to ``warn``, once, in one line.
    """

    def __init__(self, warn: Callable[[str], None] = lambda text: None) -> None:
        self._warn = warn
        self._running: list[_Companion] = []

    def start(self, job: Job) -> None:
        """Start a process for ``job``."""
        try:
            self._running.append(_Companion(job))
        except OSError as error:
            self._warn(f"{job.name} could not be started: {error}; {job.consequence}")

    def check(self) -> None:
        """Say which have died since the last time."""
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
        """Let each do the rest, and wait for it, but not for ever."""
        self.check()
        for companion in self._running:
            companion.end()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for companion in self._running:
            if not companion.finishes(deadline):
                self._warn(companion.epitaph())
        self._running.clear()


def told_to_end(seconds: float) -> bool:
    """Whether this process, a companion, is told within ``seconds`` that the run is over."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


class _Companion:
    """One process."""

    def __init__(self, job: Job) -> None:
        """Start it. OSError where that cannot be done."""
        self._job = job
        self._overdue = False
        with open(job.log, "ab") as log:
            self.process = subprocess.Popen(
                module_command(*job.arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # A Ctrl-C at the terminal is for the trainer.
                start_new_session=True,
            )

    def end(self) -> None:
        """Tell it that the run is over."""
        assert self.process.stdin is not None
        try:
            # Not only the end of the pipe, which a loader's process may hold open longer.
            self.process.stdin.write(b"\n")
            self.process.stdin.close()
        except BrokenPipeError:
            # It has died just now, and its exit code says so.
            return

    def finishes(self, deadline: float) -> bool:
        """Whether it has done everything; killed at ``deadline``."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            self._overdue = True
            self.process.kill()
            self.process.wait()
            return False

    def epitaph(self) -> str:
        """Why it died, what is not lost, and what to type."""
        return f"{self._job.name} is lost: {self._cause()}; {self._job.consequence}"

    def _cause(self) -> str:
        code = self.process.returncode
        if self._overdue or code == -signal.SIGALRM:
            return f"it did not finish within {FINISH_SECONDS} s of the run's end"
        path = self._job.log
        log = path.read_text(errors="replace") if path.exists() else ""
        return code > 0 and _last_error(log) or describe_death(code, "its process")


def _last_error(log: str) -> str:
    """The first line of the message that follows the last traceback; "" where there is none."""
    traceback = log.rpartition("Traceback (most recent call last):\n")
    lines = traceback[2].splitlines() if traceback[1] else []
    message = next((line for line in lines if line.strip() and not line.startswith(" ")), "")
    return message[:_MOST_CHARACTERS]
