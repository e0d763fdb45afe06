"""The trainer's side: starts the processes that mirror its run, and says when one has died.

Nothing that a tracker does reaches the training process: not its errors, threads or random numbers.
"""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from lib.rundir import RunDir
from lib.runner.pool import describe_death
from lib.tracking.contract import Facts
from lib.tracking.mirror import FINISH_SECONDS

# A process that has not ended so long after its own limit hangs where the limit does not reach.
_PATIENCE_SECONDS = FINISH_SECONDS + 5
_MOST_CHARACTERS = 200


class Trackers:
    """All trackers of a run as one; at first there is none. Leaving the context ends them.

    Nothing here raises: the loss of a tracker is told to ``warn``, once, in one line.
    """

    def __init__(self) -> None:
        self._warn: Callable[[str], None] = lambda text: None
        self._mirrors: list[_Mirror] = []

    @classmethod
    def start(
        cls, run: RunDir, names: Sequence[str], facts: Facts, warn: Callable[[str], None]
    ) -> Self:
        """Start a process for each of ``names``; ``facts`` are written down for them to read."""
        trackers = cls()
        trackers._warn = warn
        try:
            run.trackers.mkdir(exist_ok=True)
            facts.write(run.tracker_facts)
            for name in names:
                trackers._mirrors.append(_Mirror(run, name))
        except OSError as error:
            warn(f"not every tracker could be started: {error}; the run goes on without")
        return trackers

    def check(self) -> None:
        """Say which trackers have died since the last time."""
        for mirror in list(self._mirrors):
            if mirror.process.poll() is not None:
                self._mirrors.remove(mirror)
                self._warn(mirror.epitaph())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let each tell the rest, and wait for it, but not for ever."""
        self.check()
        for mirror in self._mirrors:
            mirror.end()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for mirror in self._mirrors:
            if not mirror.finishes(deadline):
                self._warn(mirror.epitaph())
        self._mirrors.clear()


class _Mirror:
    """One tracker's process."""

    def __init__(self, run: RunDir, name: str) -> None:
        """Start it. OSError where that cannot be done."""
        self._run = run
        self._name = name
        self._overdue = False
        # -P: a folder called wandb in the working directory is not the package.
        module = ["-P", "-m", "lib.tracking.mirror"]
        self._command = [sys.executable, *module, str(run.path), name]
        with open(run.tracker_log(name), "ab") as log:
            self.process = subprocess.Popen(
                self._command,
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
        """Whether it has told everything; killed at ``deadline``."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            self._overdue = True
            self.process.kill()
            self.process.wait()
            return False

    def epitaph(self) -> str:
        """Why it died, what is not lost, and what to type."""
        return (
            f"{self._name} is lost: {self._cause()}; the run goes on, {self._run.metrics} has it "
            f"all; to tell the rest, type: {shlex.join(self._command)} < /dev/null"
        )

    def _cause(self) -> str:
        code = self.process.returncode
        if self._overdue or code == -signal.SIGALRM:
            return f"it did not finish within {FINISH_SECONDS} s of the run's end"
        path = self._run.tracker_log(self._name)
        log = path.read_text(errors="replace") if path.exists() else ""
        return code > 0 and _last_error(log) or describe_death(code, "its process")


def _last_error(log: str) -> str:
    """The first line of the message that follows the last traceback; "" where there is none."""
    traceback = log.rpartition("Traceback (most recent call last):\n")
    lines = traceback[2].splitlines() if traceback[1] else []
    message = next((line for line in lines if line.strip() and not line.startswith(" ")), "")
    return message[:_MOST_CHARACTERS]
