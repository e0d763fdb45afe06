"""A program on a pseudo-terminal: keys go in, its screen comes out."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence

from lib.project import ROOT

# More than enough for a busy machine; a passing test waits for text, not for time.
PATIENCE_SECONDS = 20
# What takes colours or a live screen away where it is set.
_PLAIN = ("CI", "NO_COLOR")


class Terminal:
    """This interpreter in a child process with ``arguments`` and some variables set."""

    def __init__(self, arguments: Sequence[str], **variables: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _PLAIN}
        self._ours, theirs = pty.openpty()
        self._child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": "xterm", **variables},
        )
        os.close(theirs)

    def press(self, keys: str, then_wait_for: str) -> None:
        """Type ``keys`` and read the screen until the text appears."""
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
        """All that is shown until the program ends."""
        seen = b""
        try:
            while piece := os.read(self._ours, 65536):
                seen += piece
        # A pseudo-terminal ends with this error where a pipe ends with no bytes.
        except OSError:
            pass
        return seen.decode()

    def finish(self) -> int:
        """The exit code."""
        code = self._child.wait(PATIENCE_SECONDS)
        os.close(self._ours)
        return code
