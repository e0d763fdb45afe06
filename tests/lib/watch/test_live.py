"""The live screen, captured from a pseudo-terminal."""

from lib.tracking.watch import sparkline
from tests.lib.terminal import Terminal

LOOK = """
from lib.tracking.watch import RunLine, watch

watch(lambda: [RunLine("fall", "success", 2, 2, 1.0, 1.0, None, None, None, [2.0, 1.0], {})])
"""


def test_a_curve_is_drawn_with_what_the_terminal_can_show() -> None:
    for encoding, curve, other in (("utf-8", "█▁", "@_"), ("ascii", "@_", "█▁")):
        terminal = Terminal(["-c", LOOK], PYTHONIOENCODING=encoding, COLUMNS="120")
        shown = terminal.rest()
        assert terminal.finish() == 0
        assert curve in shown and other not in shown


def test_the_start_of_a_loss_does_not_flatten_the_rest() -> None:
    losses = [9.0, 5.0, 3.0, *(2.8 - 0.1 * i for i in range(13))]
    assert sparkline(losses, "01234567") == "7776555443222110"
