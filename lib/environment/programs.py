"""Asking a program for a fact: it has to be there, to succeed, and to say something that reads."""

import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lib.errors import PreflightError, Problem

# A solver that looks something up in the network never answers otherwise.
_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Question:
    """A command, the file its answer goes to, and whether an answer is one."""

    file: str
    command: Sequence[str]
    reads: Callable[[str], bool]

    def answer(self) -> str:
        """What the command prints. PreflightError where it fails, or its answer is none."""
        words = shlex.join(self.command)
        code, output, errors = run(self.command)
        if code:
            last = (errors.strip() or output.strip() or "no message").splitlines()[-1]
            raise _refusal(f"{words} failed with exit code {code}: {last}")
        if not output.strip():
            raise _refusal(f"{words} printed nothing")
        if not self.reads(output):
            raise _refusal(f"{words} printed what is no {self.file}: {output.splitlines()[0]!r}")
        return output


def run(command: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, output and error output. PreflightError where the program cannot be run."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refusal(f"{shlex.join(command)} cannot be run: {error}") from error
    return done.returncode, done.stdout, done.stderr


def _refusal(what: str) -> PreflightError:
    advice = "mend it; with RUN_PROFILE_MAXOUT_SPEED=y, ENV_SNAPSHOT=n does without a snapshot"
    return PreflightError(Problem(f"snapshot: {what}", next=advice))
