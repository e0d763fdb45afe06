"""Pseudo-terminal for tests: sends keys to a program and reads its screen."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence

from lib.project import ROOT

# Generous, for a busy machine; a passing test waits for text, not for a timeout.
PATIENCE_SECONDS = 20
# Environment variables that disable colours or the live screen.
_PLAIN_OUTPUT = ("CI", "NO_COLOR")


class Terminal:
    """Python process on a pseudo-terminal, with ``arguments`` and additional variables."""

    def __init__(self, arguments: Sequence[str], **variables: str) -> None:
        inherited = {k: value for k, value in os.environ.items() if k not in _PLAIN_OUTPUT}
        self._ours, theirs = pty.openpty()
        self._child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**inherited, "TERM": "xterm", **variables},
        )
        os.close(theirs)

    def press(self, keys: str, then_wait_for: str) -> None:
        """Type ``keys`` and read the screen until ``then_wait_for`` appears."""
        os.write(self._ours, keys.encode())
        self.wait_for(then_wait_for)

    def wait_for(self, text: str) -> None:
        """Read the screen until ``text`` appears."""
        seen = b""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text.encode() not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([self._ours], [], [], 0.1)[0]:
                seen += os.read(self._ours, 65536)

    def rest(self) -> str:
        """Return all output until the program ends."""
        seen = b""
        try:
            while piece := os.read(self._ours, 65536):
                seen += piece
        # At its end, a pseudo-terminal raises this error instead of returning no bytes.
        except OSError:
            pass
        return seen.decode()

    def finish(self) -> int:
        """Return the exit code."""
        code = self._child.wait(PATIENCE_SECONDS)
        os.close(self._ours)
        return code


def unaligned(table: str) -> str:
    """Return a table with single blanks; columns are aligned with more."""
    return re.sub(" +", " ", table)
