#!/usr/bin/env python3
"""Write report and tables of .config's runs, and the index of all studies, from the run directories.

The table is the one that "make" prints at the end; nothing is trained. It also goes to stdout. The
files contain all started runs of the study: --steps and --seeds select only what is printed. A run
that differs from the baseline in more than the changes of its step is not compared; --label-by
torch,code shows such runs in separate rows.
"""

import _start

from gpt2.planning.arguments import (
    add_json,
    add_selection,
    add_variable,
    asked_tables,
    new_parser,
)
from gpt2.records.comparison import words
from gpt2.running import launch
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "label-by", "symbols or fields that get separate rows")
    add_json(parser)
    args = parser.parse()
    plan, whole, selected = asked_tables(args)
    labels = words(args.label_by)
    text = launch.report(plan, whole, selected=selected, json=args.json, label_by=labels)
    console.show(text)
    return 0


if __name__ == "__main__":
    console.run_main(main)
