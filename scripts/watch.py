#!/usr/bin/env python3
"""Show the runs of .config that have begun, at work or done, with their alarms; starts nothing.

On a terminal it goes on until no run is at work (Ctrl-C ends it before); elsewhere, and with --json,
it looks once. Exit code 1 where a look finds an alarm.
"""

import sys
import time

import _start

from gpt2.arguments import add_json, add_selection, asked_plan, new_parser
from lib import cli
from lib.errors import EXIT_DONE, EXIT_FAILED
from lib.watch import screen


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    given = parser.parse_args()
    _, plan = asked_plan(given)

    def read() -> list[screen.Line]:
        return screen.look(plan.runs, plan.base.watch, time.time())

    if sys.stdout.isatty() and not given.json:
        screen.watch(read)
        return EXIT_DONE
    lines = read()
    print(screen.to_json(lines) if given.json else screen.to_text(lines), end="")
    return EXIT_FAILED if any(line.alarms for line in lines) else EXIT_DONE


if __name__ == "__main__":
    cli.run(main)
