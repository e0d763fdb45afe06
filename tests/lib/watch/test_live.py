"""The screen of a terminal, as a terminal gets it."""

import os
import pty
import subprocess
import sys

from lib.project import ROOT
from lib.watch.screen import spark

LOOK = """
from lib.watch.screen import Line, watch

watch(lambda: [Line("fall", "success", 2, 2, 1.0, 1.0, None, None, None, [2.0, 1.0], {})])
"""


def test_a_curve_is_drawn_with_what_the_terminal_can_show() -> None:
    for encoding, curve, other in (("utf-8", "█▁", "@_"), ("ascii", "@_", "█▁")):
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-c", LOOK],
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": encoding, "TERM": "xterm", "COLUMNS": "120"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        # The other end is closed.
        except OSError:
            pass
        os.close(ours)
        assert child.wait() == 0
        assert curve in shown.decode() and other not in shown.decode()


def test_the_start_of_a_loss_does_not_flatten_the_rest() -> None:
    losses = [9.0, 5.0, 3.0, *(2.8 - 0.1 * i for i in range(13))]
    assert spark(losses, "01234567") == "7776555443222110"
