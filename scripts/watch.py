#!/usr/bin/env python3
"""Show the started runs of .config, running or finished, with their alarms. Starts nothing.

On a terminal, the view is refreshed until no run is running (Ctrl-C exits earlier). Without a
terminal, or with --json, the view is printed once, with exit code 1 if there is an alarm.
"""

import sys
import time

import _start

from gpt2.planning.arguments import add_json, add_selection, asked_plan, new_parser
from lib import console
from lib.errors import EXIT_DONE, EXIT_FAILED
from lib.tracking import watch


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    args = parser.parse()
    _, plan = asked_plan(args)
    runs = watch.WatchedRuns(plan.runs, plan.base.watch)
    if sys.stdout.isatty() and not args.json:
        watch.watch(lambda: runs.lines(time.time()))
        return EXIT_DONE
    lines = runs.lines(time.time())
    console.show(watch.lines_to_json(lines) if args.json else watch.lines_to_text(lines))
    return EXIT_FAILED if any(line.alarms for line in lines) else EXIT_DONE


if __name__ == "__main__":
    console.run_main(main)
