"""Execution of external programs whose output is recorded in a snapshot, with validation."""

import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lib.errors import PreflightError, Problem

# A solver that waits for the network would never finish.
_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Question:
    """A command, the file for its output, and a predicate that validates the output."""

    file: str
    command: Sequence[str]
    reads: Callable[[str], bool]

    def answer(self) -> str:
        """Run the command and return its output.

        Raises PreflightError if the command fails or its output is invalid.
        """
        command = shlex.join(self.command)
        code, output, errors = run(self.command)
        if code:
            last_line = (errors.strip() or output.strip() or "no message").splitlines()[-1]
            raise _error(f"{command} failed with exit code {code}: {last_line}", "program.failed")
        if not output.strip():
            raise _error(f"{command}: no output", "program.no-output")
        if not self.reads(output):
            first = output.splitlines()[0]
            what = f"{command}: invalid output for {self.file}, got {first!r}"
            raise _error(what, "program.invalid-output")
        return output


def run(command: Sequence[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of ``command``.

    Raises PreflightError if the program cannot be started or times out.
    """
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"{shlex.join(command)} cannot be run: {error}"
        raise _error(what, "program.cannot-run") from error
    return process.returncode, process.stdout, process.stderr


def _error(what: str, code: str) -> PreflightError:
    advice = "fix it, or skip the snapshot: RUN_PROFILE_MAXOUT_SPEED=y with ENV_SNAPSHOT=n"
    return PreflightError(Problem(f"snapshot: {what}", next=advice, code=code))
