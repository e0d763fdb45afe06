#!/usr/bin/env python3
"""Write the result table of .config's runs from their directories: table.md and table.csv.

It is what "make" prints at the end, without training anything. The table also goes to stdout.
"""

import _start

from gpt2 import launch
from gpt2.arguments import add_json, add_selection, asked_plan, new_parser
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    given = parser.parse_args()
    _, plan = asked_plan(given)
    print(launch.report(plan, json=given.json), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
