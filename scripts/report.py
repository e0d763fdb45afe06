#!/usr/bin/env python3
"""Write the result table of .config's runs from their directories: table.md and table.csv.

It is what "make" prints at the end, without training anything. The table also goes to stdout. A run
that differs from the baseline in more than its step says is not compared; --label-by torch,code
keeps such runs apart, in rows of their own.
"""

import _start

from gpt2 import launch
from gpt2.arguments import add_json, add_selection, add_variable, asked_plan, new_parser
from gpt2.comparison import words
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "label-by", "symbols or fields that keep rows apart")
    add_json(parser)
    given = parser.parse_args()
    _, plan = asked_plan(given)
    print(launch.report(plan, json=given.json, label_by=words(given.label_by)), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
